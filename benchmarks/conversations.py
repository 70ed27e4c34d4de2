"""Conversations of a recorded trace at two targets, chosen by prefix and by load: `outrider bench trace --multi-turn`."""

import asyncio
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from actors.gateway import LinkClient
from actors.worker import set_threads
from benchmarks.embedded import EmbeddedCluster
from benchmarks.load import BenchFailed, percentile
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from benchmarks.serve import local_config
from cluster.config import TargetConfig
from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import Request

RECORDED = Path(__file__).with_name("mooncake_conversations.jsonl.gz")
SHARED_BY_ALL = 1  # a prompt's first blocks that do not make two prompts one conversation: the service's own words
MAX_BLOCKS, BLOCK_LEN = 40, 16  # longer prompts are left out; tokens here for one of the 512 of a recorded block
NUM_QUICK, NUM_ROUNDS, NUM_UNDER_WAY = 256, 4, 4  # turns, rounds of them, requests
MAX_OUTPUT_LEN, OUTPUT_SHARE = 16, 1 / 32
KV_GB = 1.0  # of each target: enough for the turns of a quick run in both arms
TURN_DEADLINE_S = 120.0
ARMS = {"prefix": True, "least_loaded": False}


@dataclass(frozen=True, slots=True)
class Turn:
    """``blocks``: ids, equal where all before is equal, too. ``conversation``: the number of its first turn."""

    conversation: int
    blocks: tuple[int, ...]
    output_len: int


@dataclass(frozen=True, slots=True)
class Played:
    """Turns in one arm: prompt tokens, those found in the cache, computed tokens by target, and times to first token."""

    num_prompt: int
    num_cached: int
    loads: tuple[int, ...]
    ttfts_s: tuple[float, ...]

    def plus(self, other: "Played") -> "Played":
        loads = tuple(a + b for a, b in zip(self.loads, other.loads, strict=True))
        num_prompt, num_cached = self.num_prompt + other.num_prompt, self.num_cached + other.num_cached
        return Played(num_prompt, num_cached, loads, self.ttfts_s + other.ttfts_s)

    @property
    def balance(self) -> float:
        """Largest over mean load."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


def read_turns(path: Path) -> list[Turn]:
    """Turns of conversations of two turns or more, of JSON lines as Mooncake publishes, which may be gzipped.

    Raises InvalidField: it cannot be read, or has no such conversation.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows = [json.loads(line) for line in file]
        prompts = [(tuple(int(one) for one in row["hash_ids"]), int(row["output_length"])) for row in rows]
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise InvalidField("--trace", str(path), f"is no trace of Mooncake's format ({error})") from error
    owners: dict[int, int] = {}
    turns: list[Turn] = []
    for blocks, output_len in prompts:
        if len(blocks) > MAX_BLOCKS:
            continue
        own = blocks[SHARED_BY_ALL:]
        conversation = next((owners[block] for block in own if block in owners), len(turns))
        for block in own:
            owners.setdefault(block, conversation)
        turns.append(Turn(conversation, blocks, max(1, min(MAX_OUTPUT_LEN, round(OUTPUT_SHARE * output_len)))))
    num_turns = Counter(turn.conversation for turn in turns)
    found = [turn for turn in turns if num_turns[turn.conversation] > 1]
    if len(found) < 2 * NUM_ROUNDS:
        raise InvalidField("--trace", str(path), "has no conversations of two turns or more")
    return found


def run(options: BenchOptions) -> BenchResult:
    """Figures, of the same turns once with each choice of the target, which takes everything else alike:

    - ``prefix_hits_over_least_loaded``: prompt tokens found in prefix caches, over those with the fewest requests;
    - ``hit_rate.ARM``: their share of all prompt tokens; ``ttft_ms.p50.ARM``; ``ttft_over_least_loaded`` of these medians;
    - ``balance.ARM``: largest over mean number of tokens that a target computed; ``balance``: by prefix.
    """
    turns = read_turns(options.trace.file or RECORDED)[: NUM_QUICK if options.quick else None]
    console = Console(stderr=True)
    console.print("trace: starting two targets", highlight=False)
    config = local_config(options.model, TargetConfig(kv_cache_gb=KV_GB)).model_copy(update={"drafters": ()})
    set_threads(1)
    played: dict[str, Played] = {}
    with EmbeddedCluster.of(config) as one, EmbeddedCluster.of(config) as other:
        addresses, status = [one.address, other.address], one.client.status
        clients = {arm: LinkClient(arm, one.model, addresses, status, by_prefix=choice) for arm, choice in ARMS.items()}
        size = -(-len(turns) // NUM_ROUNDS)
        for number in range(NUM_ROUNDS):
            part = dict(enumerate(turns[number * size : (number + 1) * size], number * size))
            for arm in (*ARMS,) if number % 2 == 0 else (*reversed(ARMS),):  # ABBA
                console.print(f"trace: round {number + 1} of {NUM_ROUNDS}, {arm}", highlight=False)
                new = asyncio.run(_play(clients[arm], (one, other), part, arm))
                played[arm] = played[arm].plus(new) if arm in played else new
        for client in clients.values():
            asyncio.run(client.close())
    return result_of(played)


async def _play(client: LinkClient, targets: Sequence[EmbeddedCluster], turns: Mapping[int, Turn], arm: str) -> Played:
    """In recorded order, NUM_UNDER_WAY at once, each after those of its conversation. Raises BenchFailed: one failed."""
    if not await asyncio.to_thread(client.wait_linked, TURN_DEADLINE_S, len(targets)):
        raise BenchFailed("the targets are not linked")
    vocab_size = targets[0].model.vocab_size
    before, slots = [_computed(target) for target in targets], asyncio.Semaphore(NUM_UNDER_WAY)
    orders = {turn.conversation: asyncio.Lock() for turn in turns.values()}  # fair: turns keep their order
    ttfts_s: list[float] = []
    num_prompt = num_cached = 0

    async def play(number: int, turn: Turn) -> None:
        nonlocal num_prompt, num_cached
        prompt = tuple(token for block in turn.blocks for token in _tokens(block, vocab_size))
        async with slots, orders[turn.conversation], asyncio.timeout(TURN_DEADLINE_S):
            sent_s = time.monotonic()
            sampling = SamplingParams(turn.output_len, temperature=0.0, ignore_eos=True)
            request = Request(f"{arm}-{number}", prompt, sampling, sent_s, chain=(), cache_salt=arm)
            async for commit in client.generate(request):
                if commit.prefill is not None:
                    ttfts_s.append(time.monotonic() - sent_s)
                    num_prompt += len(prompt)
                    num_cached += commit.prefill.num_cached_tokens
                if commit.error is not None:
                    raise BenchFailed(f"a turn of conversation {turn.conversation} failed: {commit.error}")

    async with asyncio.TaskGroup() as group:
        for number, turn in turns.items():
            group.create_task(play(number, turn))
    loads = tuple(_computed(target) - was for target, was in zip(targets, before, strict=True))
    return Played(num_prompt, num_cached, loads, tuple(ttfts_s))


def _tokens(block: int, vocab_size: int) -> list[int]:
    return random.Random(block).choices(range(vocab_size), k=BLOCK_LEN)


def _computed(target: EmbeddedCluster) -> int:
    """Tokens of prompts and outputs so far."""
    telemetry = target.loop.telemetry
    return telemetry.num_prompt_tokens - telemetry.num_cached_tokens + telemetry.num_committed


def result_of(played: Mapping[str, Played]) -> BenchResult:
    by_prefix, by_load = (played[arm] for arm in ARMS)
    num_turns = len(by_prefix.ttfts_s)
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {"num_turns": num_turns, "balance": by_prefix.balance}
    for arm, one in played.items():
        hit_rate, ttft_ms = one.num_cached / one.num_prompt, 1e3 * percentile(one.ttfts_s, 0.5)
        figures |= {f"hit_rate.{arm}": hit_rate, f"ttft_ms.p50.{arm}": ttft_ms, f"balance.{arm}": one.balance}
        rows.append((arm, hit_rate, ttft_ms, one.balance))
    figures["prefix_hits_over_least_loaded"] = by_prefix.num_cached / max(1, by_load.num_cached)
    figures["ttft_over_least_loaded"] = percentile(by_prefix.ttfts_s, 0.5) / percentile(by_load.ttfts_s, 0.5)
    columns = ("target chosen by", "prefix hits", "p50 TTFT ms", "largest over mean load")
    table = Table(f"{num_turns} turns of recorded conversations, two targets in one process", columns, tuple(rows))
    return BenchResult(bench="trace", figures=figures, tables=(table,))
