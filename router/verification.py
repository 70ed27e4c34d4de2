"""How many draft tokens of each proposal the next pass verifies."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

from router.cost_model import CostModel
from router.plan import UNKNOWN_DRAFTER, Capacity, DrafterView, SequenceView

VerificationPolicy = Callable[
    [Sequence[SequenceView], Mapping[str, DrafterView], Capacity, CostModel],
    dict[str, int],
]


def verify_all(
    ready: Sequence[SequenceView], drafters: Mapping[str, DrafterView], capacity: Capacity, cost: CostModel
) -> dict[str, int]:
    """Every draft token that can still matter, in order of arrival, as far as the pass has room."""
    num_free = capacity.max_pass_tokens - len(ready)
    lengths = {}
    for sequence in ready:
        lengths[sequence.request_id] = max(0, min(useful_len(sequence, capacity), num_free))
        num_free -= lengths[sequence.request_id]
    return lengths


def verify_goodput(
    ready: Sequence[SequenceView], drafters: Mapping[str, DrafterView], capacity: Capacity, cost: CostModel
) -> dict[str, int]:
    """The lengths that maximise expected tokens per second of the pass, over the batch as a whole (DSpark, section 3.2.2).

    Token i of a proposal survives with the probability that calibration gives for it, or where its drafter is not known
    well enough with a^(i+1), a the drafter's measured conditional acceptance. Tokens join in order of survival, which never
    rises along a proposal, so this is the best choice for each number of rows; the best number maximises
        E / step(rows),   E = expected tokens of the pass so far (bonus tokens included).
    Rows are cheap up to a knee and dear beyond it, so it is looked for beyond a flat stretch too, and given up where even
    free rows could not make up for what was lost. Exactness of the output does not depend on it (DESIGN idea 1), so unlike
    the paper's scheduler it need not stop at the first token that does not pay.
    """
    num_ready, context = len(ready), sum(s.committed_len for s in ready)
    if not ready:
        return {}
    survivals = [_survival(sequence, useful_len(sequence, capacity), drafters) for sequence in ready]
    flat = np.fromiter(chain.from_iterable(survivals), np.float64)
    owners = np.repeat(np.arange(num_ready), [len(survival) for survival in survivals])
    # Stable, so of equals the earlier token of a proposal comes first.
    order = np.argsort(-flat, kind="stable")[: max(0, capacity.max_pass_tokens - num_ready)]
    gains = flat[order]
    expected = num_ready + np.cumsum(gains)
    most = float(expected[-1]) if len(expected) else float(num_ready)
    num_best, best_goodput = 0, num_ready / cost.step_s(num_ready, context)
    for num_joined, tokens in enumerate(expected.tolist(), start=1):
        step_s = cost.step_s(num_ready + num_joined, context)
        if tokens > best_goodput * step_s:
            best_goodput, num_best = tokens / step_s, num_joined
        elif most <= best_goodput * step_s:
            break  # a pass of more rows takes at least as long
    lengths = np.bincount(owners[order[:num_best]], minlength=num_ready)
    return {sequence.request_id: length for sequence, length in zip(ready, lengths.tolist(), strict=True)}


def useful_len(sequence: SequenceView, capacity: Capacity) -> int:
    """Draft tokens beyond the last wanted token, or the context's end, cannot be committed: the bonus token comes after."""
    room = capacity.max_model_len - sequence.committed_len
    return max(0, min(sequence.num_drafted, sequence.max_new_tokens - 1, room - 1))


def _survival(sequence: SequenceView, num_tokens: int, drafters: Mapping[str, DrafterView]) -> Sequence[float]:
    """Of the first ``num_tokens`` prefixes of a proposal; never rising."""
    if len(sequence.survival) >= num_tokens:
        return sequence.survival[:num_tokens]
    known = drafters.get(sequence.drafter, UNKNOWN_DRAFTER) if sequence.drafter else UNKNOWN_DRAFTER
    rate = min(max(known.acceptance, 0.01), 0.99)
    return [rate ** (i + 1) for i in range(num_tokens)]


VERIFICATION_POLICIES: dict[str, VerificationPolicy] = {"all": verify_all, "goodput": verify_goodput}
