"""FASER's adaptive drafting (section 4.1): a length for each request by GP-LCB over a sliding window.

    s_n = argmin over s of mu(s; b, r) - sqrt(beta_n) sigma(s; b, r)                                    (3)
    J(s; b, r) = T(s, b, r) / (s a + epsilon)                                                           (4)

J: seconds per committed token of a round with s draft tokens, of which the share a was accepted, in a batch of b and a
compute partition r. mu, sigma: posterior of a Gaussian process over the last rounds of the request.

Where this differs from the paper:

- epsilon is 1, the bonus token, which every round commits. With a small epsilon, a round without an accepted token costs
  orders of magnitude more than any other, and the process fits those rounds alone.
- The paper leaves kernel and beta open: a squared exponential in s and the octave of b, partitions apart; beta_n =
  0.2 log(2 n) (Kandasamy et al., 2015).
- Posteriors are updated for at most MAX_UPDATES requests a round, in turn: others keep their length for some rounds.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import sqrt

import numpy as np

from cluster.types import DraftTerms
from router.cost_model import Floats
from router.drafting.length import DraftLengths, PassFeedback, decoding
from router.drafting.value import DraftingValue
from router.plan import SequenceView

MAX_UPDATES = 4
_LEN_SCALE = 2.0  # of the kernel, draft tokens
_NOISE = 1.0  # variance of a round's J about its mean, in units of the variance of all
_BETA = 0.2


@dataclass(slots=True)
class _Arms:
    """The bandit of one request. Rounds: length, octave of the batch, J."""

    drafter: str
    length: int  # chosen
    drafted_len: int  # chosen for the proposal under way
    rounds: dict[str, deque[tuple[int, int, float]]] = field(default_factory=dict)  # by partition
    num_rounds: int = 0


class Faser(DraftLengths):
    """``max_lens`` as of the base. ``window``: rounds of a request that count."""

    _octave: int  # of the number of decoding requests, as of the last budgets

    def __init__(self, max_lens: Mapping[str, int], window: int) -> None:
        super().__init__(max_lens)
        self._window = window
        self._arms: dict[str, _Arms] = {}
        self._due: dict[str, None] = {}  # requests with new rounds, oldest first
        self._partition = ""
        self._of_length: dict[int, DraftTerms] = {}

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        sequences = list(sequences)
        self._octave, self._partition = len(decoding(sequences)).bit_length(), value.partition
        self._choose()
        if len(self._arms) > len(sequences):  # some were aborted
            live = {sequence.request_id for sequence in sequences}
            self._arms = {key: arms for key, arms in self._arms.items() if key in live}
            self._due = {key: None for key in self._due if key in live}
        of_length = self._of_length
        budgets = {}
        for sequence in sequences:
            if sequence.drafter is not None:
                length = self._length(sequence.request_id, sequence.drafter)
                budget = of_length.get(length)
                if budget is None:
                    budget = of_length[length] = DraftTerms(length)
                budgets[sequence.request_id] = budget
        return budgets

    def learn(self, feedback: PassFeedback) -> None:
        for commit in feedback.commits:
            request_id = commit.request_id
            arms, judgement = self._arms.get(request_id), feedback.judgements.get(request_id)
            if arms is None:
                continue
            if commit.finish is not None:
                del self._arms[request_id]
                self._due.pop(request_id, None)
            elif judgement is not None and judgement.drafter == arms.drafter:
                rounds = arms.rounds.get(self._partition)
                if rounds is None:
                    rounds = arms.rounds[self._partition] = deque(maxlen=self._window)
                # The committed tokens are s a and the bonus token.
                rounds.append((arms.drafted_len, self._octave, feedback.round_s / len(commit.token_ids)))
                arms.num_rounds += 1
                arms.drafted_len = arms.length
                self._due[request_id] = None

    def _length(self, request_id: str, drafter: str) -> int:
        arms = self._arms.get(request_id)
        if arms is None or arms.drafter != drafter:
            first = max(1, self.max_len(drafter) // 2)  # nothing is known of it
            arms = self._arms[request_id] = _Arms(drafter, first, first)
            self._due.pop(request_id, None)
        return arms.length

    def _choose(self) -> None:
        """Anew for the next MAX_UPDATES requests with new rounds."""
        due = [self._arms[request_id] for request_id in islice(self._due, MAX_UPDATES)]
        for request_id in list(islice(self._due, MAX_UPDATES)):
            del self._due[request_id]
        due = [arms for arms in due if arms.rounds.get(self._partition)]
        if not due:
            return
        longest = [self.max_len(arms.drafter) for arms in due]
        tried = [list(arms.rounds[self._partition]) for arms in due]
        bounds = lower_bounds(tried, max(longest), self._octave, [arms.num_rounds for arms in due])
        for arms, length, row in zip(due, longest, bounds, strict=True):
            arms.length = 1 + int(np.argmin(row[:length]))


def lower_bounds(
    tried: Sequence[Sequence[tuple[int, int, float]]], longest: int, octave: int, num_rounds: Sequence[int]
) -> Floats:
    """(requests, longest): mu - sqrt(beta_n) sigma of lengths 1 .. ``longest``, in standard deviations of J.

    Args:
        tried: rounds of each request, at least one: length, octave of the batch, J.
        octave: of the present batch.
        num_rounds: n of each request.
    """
    cells = [_cells(rounds) for rounds in tried]
    num = max(map(len, cells))
    data = np.zeros((len(tried), num, 4))  # length, octave, standardised J, rounds
    for i, of_request in enumerate(cells):
        data[i, : len(of_request)] = of_request
    lens, octaves, targets, counts = (data[..., k] for k in range(4))
    is_round = (counts > 0).astype(np.float64)
    among = _kernel(lens[:, :, None] - lens[:, None, :], octaves[:, :, None] - octaves[:, None, :])
    among *= is_round[:, None, :]
    among += np.eye(num) * (_NOISE / np.maximum(counts, 1.0))[:, :, None]
    candidates = np.arange(1.0, longest + 1)
    towards = _kernel(lens[:, :, None] - candidates, (octaves - octave)[:, :, None]) * is_round[:, :, None]
    solved = np.linalg.solve(among, np.concatenate([targets[:, :, None], towards], axis=2))
    mean = np.einsum("rnm,rn->rm", towards, solved[:, :, 0])
    variance = np.maximum(1.0 - np.einsum("rnm,rnm->rm", towards, solved[:, :, 1:]), 0.0)
    betas = _BETA * np.log(2.0 * np.array(num_rounds))
    bounds: Floats = mean - np.sqrt(betas[:, None] * variance)
    return bounds


def _cells(rounds: Sequence[tuple[int, int, float]]) -> list[tuple[float, float, float, float]]:
    """Rounds of one length and octave of the batch as one: length, octave, mean standardised J, and their number."""
    costs = [cost for _, _, cost in rounds]
    mean = sum(costs) / len(costs)
    spread = max(sqrt(sum([(cost - mean) ** 2 for cost in costs]) / len(costs)), 1e-9)
    sums: dict[tuple[int, int], tuple[float, int]] = {}
    for length, octave, cost in rounds:
        total, num = sums.get((length, octave), (0.0, 0))
        sums[length, octave] = total + cost, num + 1
    return [(length, octave, (total / num - mean) / spread, num) for (length, octave), (total, num) in sums.items()]


def _kernel(lens: Floats, octaves: Floats) -> Floats:
    kernel: Floats = np.exp(-0.5 * ((lens / _LEN_SCALE) ** 2 + octaves**2))
    return kernel
