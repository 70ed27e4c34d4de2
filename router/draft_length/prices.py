"""What a row of a pass costs, in tokens, and how fast the target decodes."""

from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean

PRICE_STEPS = 64  # a row price is rounded to this share of a token, so that it rarely changes and is rarely sent
_MEMORY = 64.0  # rounds that the decode rate averages


class QuotedPrice:
    """A price that is told to drafters. It stays while the true one is within ``share`` of it, or within ``least``: a price
    that moves about a threshold would make lengths flap, and each change is a message."""

    def __init__(self, share: float, least: float) -> None:
        self._share, self._least = share, least
        self.value = 0.0

    def follow(self, price: float) -> bool:
        """Takes note of the true price. Returns whether the quoted one changed."""
        margin = max(self._least, self._share * self.value)
        if abs(price - self.value) <= margin and (price or not self.value):
            return False
        changed = price != self.value
        self.value = price
        return changed


class DecodeRate:
    """How many times faster than plain decoding the last rounds decoded.

    Whole rounds count, but for the time that prompts took in a pass. A rate itself would lag behind a batch that grows or
    shrinks: its share of each request would price drafts by a batch that is gone.
    """

    def __init__(self) -> None:
        self._tokens, self._plain_tokens = DecayedMean(), DecayedMean()
        self._last: tuple[float, int, float, float] | None = None  # of the last round, as for `note`, if it decoded

    @property
    def over_plain(self) -> float | None:
        """None: not known yet."""
        return self._tokens.value / self._plain_tokens.value if self._plain_tokens.is_known else None

    def note(self, began_s: float, num_tokens: int, prompts_s: float, plain_per_s: float) -> None:
        """A round that began at ``began_s`` decoded so many tokens; prompts took ``prompts_s`` of its pass. ``plain_per_s``:
        tokens per second of plain decoding of its batch; 0: its requests had only begun, and it does not count."""
        if self._last is not None:
            last_began_s, num_last, last_prompts_s, last_plain_per_s = self._last
            seconds = began_s - last_began_s - last_prompts_s
            if seconds > 0.0:  # else the prompts' time was overestimated
                self._tokens.add(num_last, _MEMORY)
                self._plain_tokens.add(self._plain_tokens.clipped(seconds * last_plain_per_s), _MEMORY)
        self._last = (began_s, num_tokens, prompts_s, plain_per_s) if num_tokens and plain_per_s else None

    def interrupt(self) -> None:
        """A round decoded nothing: the time until the next one does not count."""
        self._last = None


def row_price(tokens_per_s: float | None, num_rows: int, num_context: int, cost: CostModel) -> float:
    """Tokens that could be decoded in the time of one row more, or of the last one, from 0 to 1. A draft token less likely
    to survive than this is not worth its row. At a knee of the cost the cheaper side counts."""
    if tokens_per_s is None:
        return 0.0
    here_s = cost.step_s(num_rows, num_context)
    row_s = cost.step_s(num_rows + 1, num_context) - here_s
    if num_rows > 1:
        row_s = min(row_s, here_s - cost.step_s(num_rows - 1, num_context))
    return max(0.0, min(1.0, row_s * tokens_per_s))  # a cost that is corrected meanwhile may fall
