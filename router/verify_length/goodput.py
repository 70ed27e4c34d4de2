"""`goodput`: one verification length for the whole batch (TurboSpec)."""

from collections.abc import Sequence

from router.plan import SequenceView
from router.verify_length.context import PassRows, VerifyContext, survivals
from router.verify_length.ranking import padded_one


class GoodputVerification:
    """The length k that maximises the batch's expected tokens per second; a shorter proposal is verified whole.

    TurboSpec (arXiv 2406.14066), whose goodput is generated tokens over the time of the step. There the acceptance rate is
    one moving average; here it is the survival of each token.
    """

    def rows(self, ready: Sequence[SequenceView], context: VerifyContext) -> PassRows:
        if not ready:
            return PassRows([], context.num_prompt_tokens)
        proposals = survivals(ready, context)
        capacity, limit_s = context.capacity, context.limit_s
        table = context.cost.table(sum([sequence.committed_len for sequence in ready]))
        num_rows, expected = len(ready), float(len(ready))
        best, best_rate = 0, expected / table.at(padded_one(num_rows, capacity.prepared_rows))
        for position in range(max(map(len, proposals))):
            reached = [survival[position] for survival in proposals if len(survival) > position]
            num_rows += len(reached)
            expected += sum(reached)
            seconds = table.at(padded_one(num_rows, capacity.prepared_rows))
            if num_rows > capacity.max_pass_tokens or (limit_s is not None and seconds > limit_s):
                break
            if expected / seconds > best_rate:
                best, best_rate = position + 1, expected / seconds
        lens = [min(best, len(survival)) for survival in proposals]
        return PassRows(lens, context.num_prompt_tokens)
