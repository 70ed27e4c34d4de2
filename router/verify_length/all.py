"""`all`: verify every draft token."""

from collections.abc import Sequence

from router.plan import SequenceView
from router.verify_length.context import PassRows, VerifyContext, useful_len


class VerifyAll:
    """Every useful draft token, in order of arrival, as far as the pass has room."""

    def rows(self, ready: Sequence[SequenceView], context: VerifyContext) -> PassRows:
        num_free = context.capacity.max_pass_tokens - len(ready)
        lengths = []
        for sequence in ready:
            lengths.append(max(0, min(useful_len(sequence, context.capacity), num_free)))
            num_free -= lengths[-1]
        return PassRows(lengths, context.num_prompt_tokens)
