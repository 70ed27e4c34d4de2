"""Which target serves a request: each gateway's view of what targets have cached, and of how much they have to do.

A target is preferred for the prompt tokens that it need not compute, at the price of the work before it there. Where no
target has a part of the prompt, the one with the fewest requests is chosen. Costs are in tokens that a target computes.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

from cluster.types import Request
from router.estimates.decayed import LASTING, DecayedMean

Target = TypeVar("Target")

BLOCK_LEN = 64  # tokens of a prompt that are compared at once
MAX_BLOCKS = 2**15  # known of each target: 2 million tokens, in at most 4 MB
MAX_RECENT = 2**13  # blocks that gateways tell each other at once
MISSED_BLOCKS = 4  # missing blocks that show an eviction; the blocks of a target's cache may be larger than BLOCK_LEN
# Requests at a target, over the mean of all, above which it gets another only if it has the fewest.
MAX_SHARE, SPARE = 1.2, 2
LEFT = 0.25  # of the work of a request under way: what delays another one; the rest is done, or decoded in shared passes
KEPT = 1.0 - 1.0 / 128  # of the earlier work of a target, with each request that ends at any
WORK_PRICE = 0.1  # of a recently computed token: otherwise the first target would get every request of an idle server


@dataclass(slots=True)
class _Known:
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # by chained hash, least recently used first
    work: float = 0.0  # tokens computed for recent requests


class TargetChoice(Generic[Target]):
    """Not thread-safe. What it knows of targets comes from their answers; gateways that differ serve on.

    Args:
        by_prefix: False: always the target with the fewest requests.
    """

    def __init__(self, by_prefix: bool = True) -> None:
        self._by_prefix = by_prefix
        self._known: dict[Target, _Known] = {}
        self._work = DecayedMean(LASTING)  # tokens computed for a request
        # Prompts with new blocks of its own answers: since the last exchange, and between that and the one before.
        self._recent: deque[tuple[Target, Sequence[int]]] = deque()
        self._num_recent = 0  # blocks
        self._last: tuple[tuple[Target, Sequence[int]], ...] = ()

    def blocks(self, request: Request) -> Sequence[int]:
        """Chained hashes of the full blocks of its prompt, alike in all processes. Without its last token, which targets
        always compute."""
        salt = blake2b(request.salt.encode(errors="surrogatepass"), digest_size=7)
        tokens, digest = request.prompt_token_ids, int.from_bytes(salt.digest())
        if not self._by_prefix or request.sampling.prompt_logprobs is not None:  # such prompts are computed whole
            return ()
        hashes = []
        for end in range(BLOCK_LEN, len(tokens), BLOCK_LEN):
            digest = hash((digest, tokens[end - BLOCK_LEN : end]))
            hashes.append(digest)
        return hashes

    def ranked(self, num_requests: Mapping[Target, int], blocks: Sequence[int]) -> list[Target]:
        """Targets, the best first. ``num_requests``: under way at each."""
        known = {target: self._known.setdefault(target, _Known()) for target in num_requests}
        saved = {target: BLOCK_LEN * _num_cached(one.blocks, blocks) for target, one in known.items()}
        if not any(saved.values()):
            return sorted(num_requests, key=lambda target: (num_requests[target], known[target].work))
        most = MAX_SHARE * sum(num_requests.values()) / len(num_requests) + SPARE

        def price(target: Target) -> tuple[bool, float]:
            num = num_requests[target]
            return num >= most, LEFT * num * self._work.value + WORK_PRICE * known[target].work - saved[target]

        return sorted(num_requests, key=price)

    def num_known(self, target: Target, blocks: Sequence[int]) -> int:
        """The first blocks of a prompt that a target is believed to have."""
        known = self._known.get(target)
        return 0 if known is None else _num_cached(known.blocks, blocks)

    def computed(self, target: Target, blocks: Sequence[int], num_cached: int, num_known: int) -> None:
        """A target computed a prompt, ``num_cached`` tokens of which it had. If it lacks blocks that it once had, it has
        evicted all that it used before these. ``num_known``: when the request was sent."""
        known = self._known.setdefault(target, _Known()).blocks
        num_found = num_cached // BLOCK_LEN
        if num_found + MISSED_BLOCKS <= num_known:
            while blocks[num_found] in known:
                known.popitem(last=False)
        if any(block not in known for block in blocks):
            self._recent.append((target, blocks))
            self._num_recent += len(blocks)
            while self._num_recent > MAX_RECENT:
                self._num_recent -= len(self._recent.popleft()[1])
        self._note(known, blocks)

    def recent(self) -> Sequence[tuple[Target, Sequence[int]]]:
        """The blocks of prompts since the call before the last one, each with the target that computed it. So a gateway that
        misses one exchange learns them with the next."""
        before, self._last = self._last, tuple(self._recent)
        self._recent.clear()
        self._num_recent = 0
        return before + self._last

    def learn(self, target: Target, blocks: Sequence[int]) -> None:
        """The blocks of a prompt that a target computed for another gateway."""
        self._note(self._known.setdefault(target, _Known()).blocks, blocks)

    @staticmethod
    def _note(known: OrderedDict[int, None], blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # so that a prefix is forgotten after what follows it
            known[block] = None
            known.move_to_end(block)
        while len(known) > MAX_BLOCKS:
            known.popitem(last=False)

    def ended(self, target: Target, num_computed: int) -> None:
        """A request ended, for which a target computed so many tokens of prompt and output."""
        self._work.add(num_computed)
        for one in self._known.values():
            one.work *= KEPT
        self._known.setdefault(target, _Known()).work += num_computed

    def forget(self, target: Target) -> None:
        """It has left."""
        self._known.pop(target, None)


def _num_cached(known: Mapping[int, None], blocks: Sequence[int]) -> int:
    return next((number for number, block in enumerate(blocks) if block not in known), len(blocks))
