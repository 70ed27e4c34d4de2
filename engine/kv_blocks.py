"""Ownership of KV cache blocks, and the computed length of each sequence. No torch.

    0 ......................... computed_len ............ + reserved by an open checkpoint
    | committed, in the cache   | speculated: computed by the pass under way, not final |
    | full blocks: may be shared, never written again | tail block: this sequence's own |

``speculate`` reserves blocks for the tokens that a pass computes; ``commit`` keeps the first of them and frees blocks that
hold nothing else, which is the rollback.

A full committed block is registered under a 128-bit chained digest of its tokens, all before it, and its sequence's salt.
After its last holder releases it, it stays cached and counts as free. When no empty block is left, the least recently used
one is evicted, and a sequence's last blocks before its first.

Requests whose blocks do not fit together are divided into parts, and others are evicted for them.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.errors import OutOfBlocks, OutriderError

Item = TypeVar("Item")

_ROOT = b"outrider prefix"  # the parent digest of a first block


class LedgerMisuse(OutriderError, ValueError):
    """A bug of the caller: an unknown or already open request, or a checkpoint that is not open. Nothing changed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Blocks reserved for ``token_ids`` at positions base_len .. base_len + len(token_ids); committed once."""

    request_id: str
    base_len: int
    token_ids: tuple[int, ...]
    serial: int  # unique in its ledger


@dataclass(slots=True)
class _Sequence:
    computed_len: int
    blocks: NDArray[np.int32]  # the first num_blocks are held, the rest is spare capacity
    num_blocks: int
    digest: bytes  # of the full blocks
    tail: list[int] = field(default_factory=list)  # committed tokens after the full blocks
    checkpoint: Checkpoint | None = None

    def push(self, block: int) -> None:
        if self.num_blocks == len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
        self.blocks[self.num_blocks] = block
        self.num_blocks += 1

    def pop(self) -> int:
        self.num_blocks -= 1
        return int(self.blocks[self.num_blocks])


class BlockLedger:
    """The blocks of one KV cache. Not thread-safe. ``prefix_cache``: share full blocks between sequences with equal
    prefixes, and keep them after their release."""

    def __init__(self, num_blocks: int, block_len: int, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_len < 1:
            raise ValueError(f"a ledger needs at least one block of one token, got {num_blocks} of {block_len}")
        self.num_blocks = num_blocks
        self.block_len = block_len
        self._prefix_cache = prefix_cache
        self._sequences: dict[str, _Sequence] = {}
        self._num_holders = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is used first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached and unheld, in order of eviction
        self._block_of: dict[bytes, int] = {}  # digest -> the block registered under it
        self._digest_of: dict[int, bytes] = {}  # its inverse
        self._serials = count()
        self._waiting_digests: dict[str, list[bytes]] = {}  # of requests that `num_cached` was asked of

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def open(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """Registers a sequence that begins with ``token_ids``. Returns the number of its tokens in cached full blocks, which
        it now shares: at most len - 1, since the last token must be computed. Sequences with different salts share none.
        Raises LedgerMisuse: the request is open."""
        if request_id in self._sequences:
            raise LedgerMisuse(f"request {request_id!r} is already open: release it first")
        sequence = _Sequence(0, np.zeros(8, np.int32), 0, _root(salt))
        for digest in self._cached_digests(request_id, token_ids, salt):
            block = self._block_of[digest]
            self._evictable.pop(block, None)
            self._num_holders[block] += 1
            sequence.push(block)
            sequence.digest = digest
        self.forget(request_id)
        sequence.computed_len = sequence.num_blocks * self.block_len
        self._sequences[request_id] = sequence
        return sequence.computed_len

    def num_cached(self, request_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """What ``open`` would return at present. Digests are kept until ``open`` or ``forget``: ask with the same tokens."""
        return self.block_len * len(self._cached_digests(request_id, token_ids, salt))

    def forget(self, request_id: str) -> None:
        """Drops the digests that are kept of a waiting request."""
        self._waiting_digests.pop(request_id, None)

    def speculate(self, request_id: str, token_ids: Sequence[int]) -> Checkpoint:
        """Reserve blocks for ``token_ids`` at computed_len. Raises OutOfBlocks: more blocks are needed than are free;
        nothing changed; LedgerMisuse: unknown request, no tokens, or a checkpoint is open."""
        return self.speculate_all({request_id: token_ids})[request_id]

    def speculate_all(self, spans: Mapping[str, Sequence[int]]) -> dict[str, Checkpoint]:
        """``speculate`` for several requests, atomically."""
        for request_id, token_ids in spans.items():
            if self._get(request_id).checkpoint is not None:
                raise LedgerMisuse(f"request {request_id!r} has an open checkpoint: commit it first")
            if not token_ids:
                raise LedgerMisuse(f"request {request_id!r}: no tokens to speculate on")
        num_needed = {request_id: self.num_blocks_needed(request_id, len(ids)) for request_id, ids in spans.items()}
        self._check_free(sum(num_needed.values()))
        return {request_id: self._reserve(request_id, ids, num_needed[request_id]) for request_id, ids in spans.items()}

    def commit(self, checkpoint: Checkpoint, num_tokens: int) -> None:
        """Makes the first ``num_tokens`` of the checkpoint final and rolls back the rest. Raises LedgerMisuse: the
        checkpoint was committed, its request was released, or it has fewer tokens."""
        sequence = self._speculating(checkpoint)
        num_reserved = len(checkpoint.token_ids)
        if not 0 <= num_tokens <= num_reserved:
            raise LedgerMisuse(f"request {checkpoint.request_id!r}: cannot commit {num_tokens} of {num_reserved} tokens")
        sequence.checkpoint = None
        self._make_final(sequence, checkpoint.token_ids[:num_tokens])
        while sequence.num_blocks > self._blocks_for(sequence.computed_len):
            self._drop_block(sequence.pop())

    def commit_some(self, checkpoint: Checkpoint, num_tokens: int) -> Checkpoint:
        """Makes the first ``num_tokens`` of the checkpoint final; the others stay reserved, in the returned one. Raises
        LedgerMisuse: as ``commit``, or none is left."""
        sequence = self._speculating(checkpoint)
        if not 0 <= num_tokens < len(checkpoint.token_ids):
            found = f"{num_tokens} of {len(checkpoint.token_ids)} tokens"
            raise LedgerMisuse(f"request {checkpoint.request_id!r}: cannot commit {found} and keep some")
        self._make_final(sequence, checkpoint.token_ids[:num_tokens])
        return self._reserve(checkpoint.request_id, checkpoint.token_ids[num_tokens:], 0)

    def revise(self, checkpoint: Checkpoint, token_ids: Sequence[int]) -> Checkpoint:
        """Replaces the tokens of an open checkpoint. Positions keep their blocks, so the computed part of a common prefix
        stays valid. Raises OutOfBlocks, LedgerMisuse: as ``speculate``, or the checkpoint is not open; nothing changed."""
        sequence = self._speculating(checkpoint)
        request_id = checkpoint.request_id
        if not token_ids:
            raise LedgerMisuse(f"request {request_id!r}: no tokens to speculate on")
        num_needed = self.num_blocks_needed(request_id, len(token_ids))
        self._check_free(num_needed)
        while sequence.num_blocks > self._blocks_for(sequence.computed_len + len(token_ids)):
            self._drop_block(sequence.pop())
        return self._reserve(request_id, token_ids, num_needed)

    def release(self, request_id: str) -> None:
        """Releases all blocks of a request and its open checkpoint. Full blocks stay cached until evicted. Raises
        LedgerMisuse: unknown request."""
        sequence = self._get(request_id)
        del self._sequences[request_id]
        while sequence.num_blocks:  # from the end, so that a prefix is evicted after what follows it
            self._drop_block(sequence.pop())

    def move(self, request_id: str, new_id: str) -> Checkpoint | None:
        """Gives a sequence another name. Returns its open checkpoint under that name. Raises LedgerMisuse: the request is
        unknown, or the new name is in use."""
        if new_id in self._sequences:
            raise LedgerMisuse(f"request {new_id!r} is open: release it first")
        sequence = self._get(request_id)
        self._sequences[new_id] = self._sequences.pop(request_id)
        if sequence.checkpoint is not None:
            sequence.checkpoint = replace(sequence.checkpoint, request_id=new_id)
        return sequence.checkpoint

    def computed_len(self, request_id: str) -> int:
        """Committed tokens of the request that are in the cache."""
        return self._get(request_id).computed_len

    def block_table(self, request_id: str) -> NDArray[np.int32]:
        """Blocks of the request, (num_blocks,), including those of an open checkpoint; position t lies in
        block_table[t // block_len]. A read-only view, valid until the next call that changes the request."""
        sequence = self._get(request_id)
        view = sequence.blocks[: sequence.num_blocks]
        view.flags.writeable = False
        return view

    def num_blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """Free blocks that speculating on ``num_tokens`` would take."""
        sequence = self._get(request_id)
        return max(0, self._blocks_for(sequence.computed_len + num_tokens) - sequence.num_blocks)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        """Unheld blocks, cached ones included."""
        return len(self._empty) + len(self._evictable)

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks and sequences disagree."""
        opened = self._waiting_digests.keys() & self._sequences.keys()
        assert not opened, f"digests are kept of open requests {opened}"
        holders = [0] * self.num_blocks
        for request_id, sequence in self._sequences.items():
            checkpoint = sequence.checkpoint
            reserved_len = 0 if checkpoint is None else len(checkpoint.token_ids)
            num_full, tail_len = divmod(sequence.computed_len, self.block_len)
            blocks = self.block_table(request_id).tolist()
            assert len(set(blocks)) == len(blocks), f"{request_id!r} holds a block twice: {blocks}"
            assert len(blocks) == self._blocks_for(sequence.computed_len + reserved_len), f"{request_id!r} holds {blocks}"
            assert checkpoint is None or checkpoint.base_len == sequence.computed_len, f"{request_id!r}: {checkpoint}"
            assert not self._prefix_cache or len(sequence.tail) == tail_len, f"{request_id!r}: tail {sequence.tail}"
            for block in blocks[num_full:]:
                assert self._num_holders[block] == 1, f"{request_id!r} writes block {block}, which others hold"
                assert block not in self._digest_of, f"{request_id!r} writes block {block}, which is cached"
            for block in blocks:
                holders[block] += 1
        assert holders == self._num_holders, f"holders {self._num_holders}, but sequences hold {holders}"
        free = [*self._empty, *self._evictable]
        assert sorted(free) == [block for block, num in enumerate(holders) if num == 0], f"free blocks are {sorted(free)}"
        assert all(block in self._digest_of for block in self._evictable), "an evictable block is not cached"
        assert not any(block in self._digest_of for block in self._empty), "an empty block is cached"
        assert {digest: block for block, digest in self._digest_of.items()} == self._block_of, "the index is not one to one"

    def _cached_digests(self, request_id: str, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Digests of its longest cached prefix of full blocks, of which the last token is never part."""
        if not self._prefix_cache:
            return []
        known = self._waiting_digests.setdefault(request_id, [])
        num = 0
        for start in range(0, len(token_ids) - self.block_len, self.block_len):
            if num == len(known):
                known.append(_chain(known[-1] if known else _root(salt), token_ids[start : start + self.block_len]))
            if known[num] not in self._block_of:
                break
            num += 1
        return known[:num]

    def _get(self, request_id: str) -> _Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise LedgerMisuse(f"request {request_id!r} is not open")
        return sequence

    def _speculating(self, checkpoint: Checkpoint) -> _Sequence:
        sequence = self._get(checkpoint.request_id)
        if sequence.checkpoint is None or sequence.checkpoint.serial != checkpoint.serial:
            raise LedgerMisuse(f"checkpoint {checkpoint.serial} of request {checkpoint.request_id!r} is not open any more")
        return sequence

    def _check_free(self, num_needed: int) -> None:
        if num_needed > self.num_free_blocks:
            found = f"{num_needed} blocks are needed and {self.num_free_blocks} of {self.num_blocks} are free"
            raise OutOfBlocks(f"{found}: preempt a request or compute fewer tokens")

    def _reserve(self, request_id: str, token_ids: Sequence[int], num_blocks: int) -> Checkpoint:
        sequence = self._sequences[request_id]
        for _ in range(num_blocks):
            sequence.push(self._take_block())
        sequence.checkpoint = Checkpoint(request_id, sequence.computed_len, tuple(token_ids), next(self._serials))
        return sequence.checkpoint

    def _make_final(self, sequence: _Sequence, token_ids: Sequence[int]) -> None:
        tail_index = sequence.computed_len // self.block_len
        sequence.computed_len += len(token_ids)
        if self._prefix_cache:
            sequence.tail.extend(token_ids)
            self._register_full_blocks(sequence, tail_index)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_len)

    def _register_full_blocks(self, sequence: _Sequence, tail_index: int) -> None:
        num_full = len(sequence.tail) // self.block_len
        for i in range(num_full):
            sequence.digest = _chain(sequence.digest, sequence.tail[i * self.block_len : (i + 1) * self.block_len])
            if sequence.digest not in self._block_of:  # else another sequence registered an equal block first
                block = int(sequence.blocks[tail_index + i])
                self._block_of[sequence.digest] = block
                self._digest_of[block] = sequence.digest
        del sequence.tail[: num_full * self.block_len]

    def _take_block(self) -> int:
        """An empty block, or else an evicted one. The caller has checked that one is free."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._num_holders[block] = 1
        return block

    def _drop_block(self, block: int) -> None:
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            if block in self._digest_of:
                self._evictable[block] = None
            else:
                self._empty.append(block)


def _root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=16, key=_ROOT).digest() if salt else _ROOT


def _chain(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def parts_that_fit(items: Iterable[Item], length: Callable[[Item], int], ledger: BlockLedger) -> list[list[Item]]:
    """Divides requests, each of some length, into parts that the cache holds at once."""
    parts: list[list[Item]] = []
    num_left = 0
    for item in items:
        needed = -(-length(item) // ledger.block_len)
        if not parts or needed > num_left:
            parts.append([])
            num_left = ledger.num_blocks
        parts[-1].append(item)
        num_left -= needed
    return parts


def evict(ledger: BlockLedger, request_ids: Iterable[str], needed: int, kept: Set[str]) -> list[str]:
    """Releases requests that are not in ``kept``, in order, until ``needed`` blocks are free; returns them."""
    evicted = []
    for request_id in request_ids:
        if needed <= ledger.num_free_blocks:
            break
        if request_id in ledger and request_id not in kept:
            ledger.release(request_id)
            evicted.append(request_id)
    return evicted
