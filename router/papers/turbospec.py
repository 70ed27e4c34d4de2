"""TurboSpec (Liu et al., arXiv 2406.14066): the one length for the batch that maximises its goodput, drafted and verified.

    goodput(k) = sum over requests of (1 - a^(k+1)) / (1 - a)  /  (draft time of k tokens + verification time)

a: acceptance of a draft token, a moving average; here one for each drafter. The numerator counts the bonus tokens.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from cluster.types import DraftTerms
from router.drafting.length import DraftLengths, decoding
from router.drafting.value import DraftingValue
from router.drafting.verification import PassContext, PassRows, survivals
from router.plan import SequenceView

PROBE_PERIOD = 64


class TurboSpec(DraftLengths):
    """A length of 0 is among the candidates. A draft time that is not in the profile is taken from the drafter's replies, as
    proportional to the length. Every second of drafting counts, as in the paper. One token is drafted after
    PROBE_PERIOD plain passes: at length 0 nothing is learned, so that it could never be left."""

    _best_len = 0
    _num_plain = 0  # passes in a row with length 0

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        sequences = list(sequences)
        self._best_len = self._argmax(decoding(sequences) or sequences, value)
        self._num_plain = 0 if self._best_len else self._num_plain + 1
        if self._num_plain > PROBE_PERIOD:
            self._best_len, self._num_plain = 1, 0
        return super().budgets(sequences, value)

    def budget_of(self, drafter: str, value: DraftingValue) -> DraftTerms:
        return DraftTerms(min(self._best_len, self.max_len(drafter)))

    def _argmax(self, ready: list[SequenceView], value: DraftingValue) -> int:
        num_of = Counter(sequence.drafter for sequence in ready if sequence.drafter is not None)
        context = sum(sequence.committed_len for sequence in ready)

        def goodput(length: int) -> float:
            tokens, num_rows, draft_s = float(len(ready)), len(ready), 0.0
            for drafter, num in num_of.items():
                if own_len := min(length, self.max_len(drafter)):
                    acceptance = value.view(drafter).acceptance
                    num_rows += num * own_len
                    tokens += num * sum(acceptance**k for k in range(1, own_len + 1))
                    draft_s = max(draft_s, value.draft_s(drafter, num, own_len))
            return tokens / (draft_s + value.cost.step_s(num_rows, context))

        return max(range(max(map(self.max_len, num_of), default=0) + 1), key=goodput)


class GoodputVerification:
    """The length k that maximises the batch's expected tokens per second; a shorter proposal is verified whole.

    TurboSpec (arXiv 2406.14066), whose goodput is generated tokens over the time of the step. There the acceptance rate is
    one moving average; here it is the survival of each token.
    """

    def rows(self, ready: Sequence[SequenceView], context: PassContext) -> PassRows:
        if not ready:
            return PassRows([], context.num_prompt_tokens)
        proposals = survivals(ready, context)
        capacity, limit_s = context.capacity, context.limit_s
        table = context.cost.table(sum([sequence.committed_len for sequence in ready]))
        num_rows, expected = len(ready), float(len(ready))
        best, best_rate = 0, expected / table.at(num_rows)
        for position in range(max(map(len, proposals))):
            reached = [survival[position] for survival in proposals if len(survival) > position]
            num_rows += len(reached)
            expected += sum(reached)
            seconds = table.at(num_rows)
            if num_rows > capacity.max_pass_tokens or (limit_s is not None and seconds > limit_s):
                break
            if expected / seconds > best_rate:
                best, best_rate = position + 1, expected / seconds
        lens = [min(best, len(survival)) for survival in proposals]
        return PassRows(lens, context.num_prompt_tokens)
