"""What a row of a pass costs, in tokens, and how fast the target decodes."""

from router.cost_model import CostModel
from router.estimates.decayed import DecayedMean

PRICE_STEPS = 64  # a row price is rounded to this share of a token, so that it rarely changes and is rarely sent


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
    """How many times faster than plain decoding the last rounds decoded: tokens of a request and round, over the plain
    passes of its batch that the round lasted.

    Whole rounds count, but for the time that prompts took in a pass, and each counts the same, whatever its batch. A rate
    itself would lag behind a batch that grows or shrinks: its share of each request would price drafts by a batch that is
    gone.
    """

    def __init__(self) -> None:
        self._tokens, self._plain_passes = DecayedMean(), DecayedMean()
        self._last: tuple[float, float, float, float] | None = None  # of the last round, if it decoded

    @property
    def over_plain(self) -> float | None:
        """None: not known yet."""
        return self._tokens.value / self._plain_passes.value if self._plain_passes.is_known else None

    def note(self, began_s: float, num_tokens: int, prompts_s: float, num_requests: int, plain_s: float) -> None:
        """A round that began at ``began_s`` decoded so many tokens; prompts took ``prompts_s`` of its pass.

        Args:
            num_requests: that decode; 0: they had only begun, and the round does not count.
            plain_s: of a plain pass of them.
        """
        if self._last is not None:
            last_began_s, num_each, last_prompts_s, last_plain_s = self._last
            seconds = began_s - last_began_s - last_prompts_s
            if seconds > 0.0:  # else the prompts' time was overestimated
                self._tokens.add(num_each)
                self._plain_passes.add(self._plain_passes.clipped(seconds / last_plain_s))
        decodes = num_tokens and num_requests
        self._last = (began_s, num_tokens / num_requests, prompts_s, plain_s) if decodes else None

    def interrupt(self) -> None:
        """A round decoded nothing: the time until the next one does not count."""
        self._last = None


def row_price(
    tokens_per_s: float | None, num_rows: int, num_context: int, cost: CostModel, best_left_out: float = 0.0
) -> float:
    """What a row is worth, from 0 to 1: a draft token less likely to survive is not worth its row.

    That is the number of tokens that could be decoded in its time. At a knee of the cost, where the next row takes longer
    than the last one, rows are scarce: one is worth the best token that has none, between the prices of both.

    Args:
        best_left_out: survival of the best draft token without a row.
    """
    if tokens_per_s is None:
        return 0.0
    here_s = cost.step_s(num_rows, num_context)
    next_price = tokens_per_s * (cost.step_s(num_rows + 1, num_context) - here_s)
    last_price = next_price
    if num_rows > 1:
        last_price = tokens_per_s * (here_s - cost.step_s(num_rows - 1, num_context))
    price = min(next_price, max(last_price, best_left_out))
    return max(0.0, min(1.0, price))  # a cost that is corrected meanwhile may fall
