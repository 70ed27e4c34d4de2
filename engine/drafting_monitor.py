"""What drafting saves and wastes at a target: time of decoding with drafts and without, and draft lengths by load."""

from collections.abc import Sequence

from cluster.client import DraftingEffect, DraftsByLoad
from cluster.types import Commit
from router.cost_model import CostModel

_NUM_LOADS = 16  # octaves of requests in a pass


class DraftingMonitor:
    """Owned by the round; other threads may call ``effect``.

    A round lasts until the next one begins. Without drafts, ``n`` requests that commit ``c`` tokens in one pass would take
    ``c / n`` passes of ``n`` rows. The cost model predicts how much shorter such a pass is than the one that was measured:
    a busy machine slows both alike. What a round does beside its pass counts on one side only: the saving is rather
    underestimated.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._decode_s = self._plain_s = self._rejected_s = 0.0
        self._by_load = [(0, 0, 0)] * _NUM_LOADS  # rounds, draft tokens verified, accepted
        self._last: tuple[float, float, float] | None = None  # when the last round began, and its predicted times

    def note(self, began_s: float, pass_s: float, commits: Sequence[Commit], num_rows: int, num_context: int) -> None:
        """A round that began at ``began_s`` only decoded, in a pass of ``pass_s``."""
        self.interrupt(began_s)
        num_requests = len(commits)
        if not num_requests:
            return
        num_tokens = num_proposed = num_accepted = 0
        for commit in commits:
            num_tokens += len(commit.token_ids)
            num_proposed += commit.num_proposed
            num_accepted += commit.num_accepted
        load = min((num_requests - 1).bit_length(), _NUM_LOADS - 1)
        rounds, proposed, accepted = self._by_load[load]
        self._by_load[load] = rounds + num_requests, proposed + num_proposed, accepted + num_accepted
        expected_s = self._cost.step_s(num_rows, num_context)
        plain_share = 1.0  # of the pass, as is `rejected_share`
        if num_rows > num_requests:
            plain_share = self._cost.step_s(num_requests, num_context) / expected_s
        num_rejected = num_proposed - num_accepted
        rejected_share = 1.0 - self._cost.step_s(num_rows - num_rejected, num_context) / expected_s if num_rejected else 0.0
        plain_s = num_tokens / num_requests * plain_share * pass_s
        self._last = began_s, plain_s, max(0.0, rejected_share) * pass_s

    def interrupt(self, end_s: float | None = None) -> None:
        """What comes next is no decoding. ``end_s``: when the last round ended; None: it does not count."""
        if self._last is not None and end_s is not None:
            began_s, plain_s, rejected_s = self._last
            self._decode_s += end_s - began_s
            self._plain_s += plain_s
            self._rejected_s += rejected_s
        self._last = None

    def effect(self) -> DraftingEffect:
        by_load = [DraftsByLoad(2**i, *counts) for i, counts in enumerate(self._by_load) if counts[0]]
        return DraftingEffect(self._decode_s, self._plain_s, self._rejected_s, tuple(by_load))
