"""The ledger against a model that writes every token into a pretended cache: what a sequence reads is what it wrote."""

import random
import resource

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from cluster.errors import OutOfBlocks
from engine.kv_blocks import BlockLedger, Checkpoint, LedgerMisuse
from engine.kv_cache import cache_zeros

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # two tokens only: many sequences begin alike


class LedgerMachine(RuleBasedStateMachine):
    """A cache with hardly any room, so that blocks are evicted and run out."""

    num_blocks = 7
    block_len = 3
    prefix_cache = True

    requests = Bundle("requests")
    checkpoints = Bundle("checkpoints")

    @initialize()
    def start(self) -> None:
        self.ledger = BlockLedger(self.num_blocks, self.block_len, self.prefix_cache)
        self.computed: dict[str, list[int]] = {}
        self.open_checkpoints: dict[str, Checkpoint] = {}
        self.cache: dict[
            tuple[int, int], tuple[int, ...]
        ] = {}  # (block, offset) -> all tokens up to the one that lies there
        self.ever_full: set[tuple[int, ...]] = set()  # beginnings that some sequence committed as full blocks
        self.num_opened = 0

    @rule(target=requests, token_ids=TOKENS)
    def open(self, token_ids: list[int]) -> str:
        request_id = f"r{self.num_opened}"
        self.num_opened += 1
        before = self.snapshot()
        expected = self.ledger.num_cached(request_id, token_ids)
        assert self.snapshot() == before
        num_cached = self.ledger.open(request_id, token_ids)
        assert num_cached == expected
        assert num_cached % self.block_len == 0
        assert num_cached < len(token_ids)
        assert num_cached <= self.longest_ever_full(token_ids)
        self.computed[request_id] = list(token_ids[:num_cached])  # the invariant checks that the blocks hold just these
        self.opened(token_ids, num_cached)
        return request_id

    def opened(self, token_ids: list[int], num_cached: int) -> None:
        """What a subclass knows more precisely."""

    @rule(target=checkpoints, spans=st.dictionaries(requests, TOKENS, min_size=1, max_size=4))
    def speculate(self, spans: dict[str, list[int]]) -> object:
        before = self.snapshot()
        if any(request_id not in self.computed or request_id in self.open_checkpoints for request_id in spans):
            with pytest.raises(LedgerMisuse, match=r"not open|open checkpoint"):
                self.ledger.speculate_all(spans)
            assert self.snapshot() == before
            return multiple()
        num_needed = {r: self.blocks_for(len(self.computed[r]) + len(t)) - self.num_held(r) for r, t in spans.items()}
        assert {r: self.ledger.num_blocks_needed(r, len(t)) for r, t in spans.items()} == num_needed
        if sum(num_needed.values()) > self.ledger.num_free_blocks:
            with pytest.raises(OutOfBlocks, match=f"{sum(num_needed.values())} blocks are needed"):
                self.ledger.speculate_all(spans)
            assert self.snapshot() == before
            return multiple()
        checkpoints = self.ledger.speculate_all(spans)
        for request_id, token_ids in spans.items():
            assert checkpoints[request_id].base_len == len(self.computed[request_id])
            self.write(request_id, token_ids)
        self.open_checkpoints.update(checkpoints)
        return multiple(*checkpoints.values())

    @rule(checkpoint=checkpoints, fraction=st.floats(0, 1))
    def commit(self, checkpoint: Checkpoint, fraction: float) -> None:
        """Also checkpoints that were committed before, or whose request is gone or was opened anew."""
        request_id = checkpoint.request_id
        num_tokens = round(fraction * len(checkpoint.token_ids))
        if self.open_checkpoints.get(request_id) != checkpoint:
            before = self.snapshot()
            with pytest.raises(LedgerMisuse, match=r"not open"):
                self.ledger.commit(checkpoint, num_tokens)
            assert self.snapshot() == before
            return
        del self.open_checkpoints[request_id]
        self.ledger.commit(checkpoint, num_tokens)
        self.computed[request_id] += checkpoint.token_ids[:num_tokens]
        num_full = len(self.computed[request_id]) // self.block_len
        self.ever_full |= {tuple(self.computed[request_id][: n * self.block_len]) for n in range(1, num_full + 1)}

    @rule(request_id=consumes(requests))
    def release(self, request_id: str) -> None:
        self.ledger.release(request_id)
        del self.computed[request_id]
        self.open_checkpoints.pop(request_id, None)
        with pytest.raises(LedgerMisuse, match="not open"):
            self.ledger.release(request_id)

    @precondition(lambda self: self.computed)
    @rule(request_id=requests)
    def open_again(self, request_id: str) -> None:
        with pytest.raises(LedgerMisuse, match="already open"):
            self.ledger.open(request_id, [0, 1])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        held = set()
        for request_id, computed in self.computed.items():
            assert request_id in self.ledger
            assert self.ledger.computed_len(request_id) == len(computed)
            table = self.ledger.block_table(request_id).tolist()
            held |= set(table)
            read = [self.cache[table[t // self.block_len], t % self.block_len] for t in range(len(computed))]
            assert read == [tuple(computed[: t + 1]) for t in range(len(computed))]
        assert self.ledger.num_free_blocks == self.num_blocks - len(held)

    def teardown(self) -> None:
        for request_id in list(self.computed):
            self.ledger.release(request_id)
        self.ledger.check_integrity()
        assert self.ledger.num_free_blocks == self.num_blocks

    def write(self, request_id: str, token_ids: list[int]) -> None:
        table = self.ledger.block_table(request_id).tolist()
        tokens = [*self.computed[request_id], *token_ids]
        for t in range(len(self.computed[request_id]), len(tokens)):
            self.cache[table[t // self.block_len], t % self.block_len] = tuple(tokens[: t + 1])

    def longest_ever_full(self, token_ids: list[int]) -> int:
        lengths = range(0, len(token_ids), self.block_len)
        return max(n for n in lengths if n == 0 or tuple(token_ids[:n]) in self.ever_full)

    def snapshot(self) -> object:
        tables = {r: (self.ledger.block_table(r).tolist(), self.ledger.computed_len(r)) for r in self.computed}
        return tables, self.ledger.num_free_blocks

    def num_held(self, request_id: str) -> int:
        return len(self.ledger.block_table(request_id))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_len)


class RoomyLedgerMachine(LedgerMachine):
    """Nothing is ever evicted, so every full block that was ever committed is found."""

    num_blocks = 5000
    block_len = 2

    def opened(self, token_ids: list[int], num_cached: int) -> None:
        assert num_cached == self.longest_ever_full(token_ids)


class UnsharedLedgerMachine(LedgerMachine):
    prefix_cache = False

    def opened(self, token_ids: list[int], num_cached: int) -> None:
        assert num_cached == 0


TestTightLedger = LedgerMachine.TestCase
TestRoomyLedger = RoomyLedgerMachine.TestCase
TestUnsharedLedger = UnsharedLedgerMachine.TestCase
for case in (TestTightLedger, TestRoomyLedger, TestUnsharedLedger):
    # As long as one request is open, most dictionaries of several that are tried hold it twice.
    unlikely = [HealthCheck.filter_too_much]
    case.settings = settings(
        max_examples=settings.default.max_examples, stateful_step_count=40, suppress_health_check=unlikely
    )


def compute(ledger: BlockLedger, request_id: str, token_ids: list[int]) -> int:
    """Open and commit all of ``token_ids``; how many were cached."""
    num_cached = ledger.open(request_id, token_ids)
    ledger.commit(ledger.speculate(request_id, token_ids[num_cached:]), len(token_ids) - num_cached)
    return num_cached


def test_a_long_random_run_keeps_its_integrity() -> None:
    """Many more steps than hypothesis takes in one run, with sequences that grow as in serving."""
    rng = random.Random(0)
    ledger = BlockLedger(60, 4)
    live: dict[str, list[int]] = {}
    num_preempted = num_cached = 0
    for step in range(4000):
        if len(live) < 6:
            prompt = [rng.randrange(3) for _ in range(4)] + [0] * rng.randrange(1, 30)
            num_cached += ledger.open(f"r{step}", prompt)
            live[f"r{step}"] = prompt
        spans = {
            r: (tokens[ledger.computed_len(r) :] + [rng.randrange(3) for _ in range(rng.randrange(5))])
            for r, tokens in live.items()
        }
        try:
            checkpoints = ledger.speculate_all(spans)
        except OutOfBlocks:
            victim = rng.choice(list(live))
            ledger.release(victim)
            del live[victim]
            num_preempted += 1
            continue
        for request_id, checkpoint in checkpoints.items():
            num_new = len(live[request_id]) - checkpoint.base_len
            num_accepted = rng.randrange(len(checkpoint.token_ids) - num_new + 1)
            ledger.commit(checkpoint, num_new + num_accepted)
            live[request_id] = [*live[request_id], *checkpoint.token_ids[num_new : num_new + num_accepted], rng.randrange(3)]
        ledger.check_integrity()
    assert num_preempted > 100
    assert num_cached > 1000


def test_a_prefix_is_shared_but_for_its_last_token() -> None:
    ledger = BlockLedger(10, 4)
    assert compute(ledger, "a", list(range(8))) == 0
    assert ledger.open("b", list(range(8))) == 4  # the last token must be computed, and its block is written for it
    assert ledger.open("c", list(range(9))) == 8
    assert ledger.block_table("c").tolist() == ledger.block_table("a").tolist()
    assert ledger.num_free_blocks == 8


def test_a_block_counts_as_the_same_only_after_the_same_tokens() -> None:
    ledger = BlockLedger(10, 2)
    compute(ledger, "a", [1, 2, 3, 4, 5])
    assert ledger.open("b", [9, 9, 3, 4, 5]) == 0


def test_draft_tokens_that_fill_a_block_are_not_shared_before_they_are_committed() -> None:
    ledger = BlockLedger(10, 4)
    compute(ledger, "a", [1, 2, 3])
    checkpoint = ledger.speculate("a", [4, 5])
    assert ledger.open("b", [1, 2, 3, 4, 5]) == 0
    ledger.commit(checkpoint, 0)
    assert ledger.open("c", [1, 2, 3, 4, 5]) == 0
    ledger.commit(ledger.speculate("a", [4, 5]), 1)
    assert ledger.open("d", [1, 2, 3, 4, 5]) == 4


def test_part_of_a_checkpoint_becomes_final_and_shared_while_the_rest_stays_reserved() -> None:
    ledger = BlockLedger(num_blocks=8, block_len=4)
    ledger.open("a", (1,))
    checkpoint = ledger.speculate("a", tuple(range(10)))
    blocks = ledger.block_table("a").tolist()
    rest = ledger.commit_some(checkpoint, 9)
    ledger.check_integrity()
    assert (rest.base_len, rest.token_ids) == (9, (9,))
    assert ledger.block_table("a").tolist() == blocks
    assert ledger.open("b", tuple(range(10))) == 8
    moved = ledger.move("a", "c")
    assert moved is not None
    assert moved.request_id == "c"
    ledger.commit(moved, 1)
    ledger.check_integrity()
    assert "a" not in ledger
    assert ledger.computed_len("c") == 10
    for misuse in (lambda: ledger.commit_some(rest, 1), lambda: ledger.move("c", "b"), lambda: ledger.move("a", "d")):
        with pytest.raises(LedgerMisuse):
            misuse()


def test_eviction_takes_the_least_recently_used_and_ends_before_beginnings() -> None:
    ledger = BlockLedger(6, 2)
    compute(ledger, "a", [1, 1, 1, 1, 1, 1])
    ledger.release("a")
    compute(ledger, "b", [2, 2, 2, 2])
    ledger.release("b")
    compute(ledger, "c", [3, 3, 3, 3])  # takes the last empty block, and the last of a's
    ledger.check_integrity()
    ledger.release("c")
    assert ledger.open("a", [1, 1, 1, 1, 1, 1, 1]) == 4
    assert ledger.open("b", [2, 2, 2, 2, 2]) == 4


def test_what_is_cached_is_known_of_a_request_that_waits() -> None:
    ledger, prompt = BlockLedger(6, 2), [1, 1, 1, 1, 1, 1, 1]
    assert ledger.num_cached("waiting", prompt) == 0
    compute(ledger, "a", prompt)
    assert ledger.num_cached("waiting", prompt) == 6
    assert ledger.num_cached("salted", prompt, "salt") == 0
    ledger.release("a")
    compute(ledger, "b", [2, 2, 2, 2, 2, 2, 2])  # takes the last of a's blocks
    assert ledger.num_cached("waiting", prompt) == 4
    assert ledger.num_cached("other", [2, 2, 2, 2, 1]) == 4
    ledger.forget("other")
    assert ledger.num_cached("other", [1, 1, 2, 2, 1]) == 2
    assert ledger.open("waiting", prompt) == 4


def test_reuse_counts_as_use() -> None:
    ledger = BlockLedger(4, 2)
    compute(ledger, "a", [1, 1])
    ledger.release("a")
    compute(ledger, "b", [2, 2])
    ledger.release("b")
    assert ledger.open("a", [1, 1, 1]) == 2
    ledger.release("a")
    compute(ledger, "c", [3, 3, 3, 3, 3, 3])  # two empty blocks, and b's
    ledger.release("c")
    assert ledger.open("a", [1, 1, 1]) == 2
    assert ledger.open("b", [2, 2, 2]) == 0


def test_a_released_request_frees_what_its_checkpoint_reserved() -> None:
    ledger = BlockLedger(3, 2)
    ledger.open("a", [1])
    checkpoint = ledger.speculate("a", [1, 2, 3, 4, 5])
    assert ledger.num_free_blocks == 0
    ledger.release("a")
    assert ledger.num_free_blocks == 3
    ledger.open("a", [1])
    ledger.speculate("a", [1])
    with pytest.raises(LedgerMisuse, match="checkpoint 0 of request 'a' is not open any more"):
        ledger.commit(checkpoint, 1)


def test_misuse_is_named() -> None:
    ledger = BlockLedger(3, 2)
    ledger.open("a", [1])
    for call in (ledger.computed_len, ledger.block_table, ledger.release):
        with pytest.raises(LedgerMisuse, match="request 'z' is not open"):
            call("z")
    with pytest.raises(LedgerMisuse, match="no tokens"):
        ledger.speculate("a", [])
    checkpoint = ledger.speculate("a", [1, 2])
    for num_tokens in (-1, 3):
        with pytest.raises(LedgerMisuse, match=f"cannot commit {num_tokens} of 2"):
            ledger.commit(checkpoint, num_tokens)
    with pytest.raises(ValueError, match="read-only"):
        ledger.block_table("a")[0] = 5
    with pytest.raises(ValueError, match="at least one block"):
        BlockLedger(0, 2)


# ---- what drafters ask of the ledger beyond speculate and commit: an open checkpoint may be revised


@given(st.lists(st.integers(1, 24), min_size=1, max_size=8), st.integers(0, 30), st.booleans())
def test_a_revised_checkpoint_keeps_the_blocks_of_its_beginning(lens: list[int], num_kept: int, prefix_cache: bool) -> None:
    ledger = BlockLedger(num_blocks=8, block_len=4, prefix_cache=prefix_cache)
    ledger.open("a", [])
    ledger.commit(ledger.speculate("a", range(6)), 6)
    checkpoint = ledger.speculate("a", [0])
    for length in lens:
        before = ledger.block_table("a").tolist()
        checkpoint = ledger.revise(checkpoint, range(length))
        after = ledger.block_table("a").tolist()
        assert len(after) == -(-(6 + length) // 4)
        assert all(mine == theirs for mine, theirs in zip(before, after, strict=False))
        assert ledger.computed_len("a") == checkpoint.base_len == 6
        ledger.check_integrity()
    kept = min(num_kept, lens[-1])
    ledger.commit(checkpoint, kept)
    assert ledger.computed_len("a") == 6 + kept
    ledger.release("a")
    assert ledger.num_free_blocks == 8
    ledger.check_integrity()


def test_a_revision_that_cannot_be_changes_nothing() -> None:
    ledger = BlockLedger(num_blocks=3, block_len=4)
    ledger.open("a", [])
    first = ledger.speculate("a", range(6))
    with pytest.raises(OutOfBlocks):
        ledger.revise(first, range(13))
    with pytest.raises(LedgerMisuse, match="no tokens"):
        ledger.revise(first, [])
    second = ledger.revise(first, range(12))
    with pytest.raises(LedgerMisuse, match="not open any more"):
        ledger.revise(first, range(2))
    ledger.commit(second, 12)
    with pytest.raises(LedgerMisuse, match="not open any more"):
        ledger.revise(second, range(2))
    ledger.check_integrity()


# ---- the memory of a KV cache


NUM_BYTES = 128 * 2**20  # 64 huge pages


def test_the_pages_of_a_new_cache_are_there_so_that_no_pass_waits_for_them() -> None:
    cache = cache_zeros((NUM_BYTES // 2,), torch.bfloat16, torch.device("cpu"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 32
