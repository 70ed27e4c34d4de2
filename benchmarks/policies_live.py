"""``outrider bench policies --live``: the default policies, with the shipped cascade, beside plain decoding of this machine.

Both serve the same requests in turns, with always so many running. Prompts are in the target's cache but for their last
token: plain decoding ends all requests of a batch at once, so that its prompts come when few decode, and those of requests
that end one by one come beside others. Each cluster has served other requests before, so that drafter and loop have learned
as after a server's first minute.

- ``over_plain.batch_B``: tokens per second by the default over those of plain decoding.
- ``worst_over_plain``: the least of these.
- ``identical_fraction``: answers that are the same with and without drafts. In bf16 batches of other shapes may round a
  near-tie the other way.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console

from benchmarks.fixtures import Fixtures
from benchmarks.interleaved import InterleavedServer, Served, run_interleaved
from benchmarks.pool import pool
from benchmarks.prompts import choose_prompts
from benchmarks.report import BenchOptions, BenchResult, Cell, Table
from cluster.types import Request
from engine.kv_cache import BLOCK_LEN
from engine.threads import in_own_thread

DRAFTER = "cascade"
MAX_BATCH = 64
NUM_BEFORE_PER_PLACE, LEAST_BEFORE = 2, 8  # requests that each has served before
NUM_OTHERS_PER_PLACE = 1.5  # that keep places taken until the last measured answer ends


@dataclass(frozen=True, slots=True)
class Effort:
    """Requests by batch: those served before, and those measured, for each place; at least ``least`` measured."""

    batches: tuple[int, ...]
    num_tokens: int  # of an answer, at most
    per_place: int
    least: int


QUICK = Effort((1, 4, 16, 64), 48, 3, 24)
FULL = Effort((1, 2, 4, 8, 16, 32, 64), 96, 3, 16)


@dataclass(frozen=True, slots=True)
class Measured:
    plain: float  # tokens per second
    default: float
    accepted_len: float
    num_answers: int
    num_identical: int

    @property
    def over_plain(self) -> float:
        return self.default / self.plain


def run(options: BenchOptions) -> BenchResult:
    effort = QUICK if options.quick else FULL
    console = Console(stderr=True)
    config = next(one for one in pool(options.model) if one.name == DRAFTER)
    fixtures = in_own_thread(lambda: Fixtures(options.model, [config], effort.num_tokens, MAX_BATCH))
    found = {}
    for batch in effort.batches:
        num_measured = max(effort.least, effort.per_place * batch)
        num_before, num_others = max(LEAST_BEFORE, NUM_BEFORE_PER_PLACE * batch), round(NUM_OTHERS_PER_PLACE * batch)
        prompts = choose_prompts(options.prompts or options.data_prompts, num_before + num_measured + num_others)
        requests = [of_whole_blocks(request) for request in fixtures.requests(prompts, 0.0)]
        num_measured = min(num_measured, len(requests) - num_before - num_others)
        with ExitStack() as opened:
            arms = [Served(fixtures, None, batch), Served(fixtures, config, batch)]
            for arm in arms:
                opened.callback(arm.close)
            for lane in serve(fixtures, arms, requests[:num_before], num_before):
                lane.end()
            plain, default = serve(fixtures, arms, requests[num_before:], num_measured)
            found[batch] = one = compared(plain, default, num_measured)
        told = f"{one.default:.0f} tokens/s, plain {one.plain:.0f}: {one.over_plain:.2f}"
        console.print(f"policies: batch {batch}: {told}", highlight=False)
    return result(found)


def of_whole_blocks(request: Request) -> Request:
    """Without the first tokens of the prompt, so that one token follows its last whole block, which can be cached."""
    prompt = request.prompt_token_ids
    return replace(request, prompt_token_ids=prompt[(len(prompt) - 1) % BLOCK_LEN :])


def serve(
    fixtures: Fixtures, arms: Sequence[Served], requests: Sequence[Request], num_measured: int
) -> list[InterleavedServer]:
    """Serves the requests by all arms in turn, to the end of the first ``num_measured``."""
    ordered = [replace(request, arrival_s=1e-6 * i) for i, request in enumerate(requests)]
    # Just before they begin: a cache holds the prompts of a batch, not of all requests.
    runs = [arm.begin(ordered, num_measured, partial(fixtures.cache_prompts, arm.engine)) for arm in arms]
    in_own_thread(lambda: run_interleaved(runs))
    return runs


def compared(plain: InterleavedServer, default: InterleavedServer, num_measured: int) -> Measured:
    """Raises RuntimeError: nothing was decoded while all places were taken."""
    rates = [lane.end() for lane in (plain, default)]
    if rates[0] is None or rates[1] is None:
        raise RuntimeError("the answers are too short to be measured: give longer prompts, or fewer requests")
    answers = [lane.completions[:num_measured] for lane in (plain, default)]
    commits = [commit for completion in answers[1] for commit in completion.commits]
    num_identical = sum(a.token_ids == b.token_ids for a, b in zip(*answers, strict=True))
    accepted_len = sum(len(commit.token_ids) for commit in commits) / len(commits)
    return Measured(rates[0].tokens_per_s, rates[1].tokens_per_s, accepted_len, num_measured, num_identical)


def result(found: dict[int, Measured]) -> BenchResult:
    figures = {f"over_plain.batch_{batch}": one.over_plain for batch, one in found.items()}
    figures["worst_over_plain"] = min(figures.values())
    num_answers = sum(one.num_answers for one in found.values())
    figures["identical_fraction"] = sum(one.num_identical for one in found.values()) / num_answers
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (batch, one.plain, one.default, one.over_plain, one.accepted_len, one.num_answers) for batch, one in found.items()
    )
    columns = ("batch", "plain, tokens/s", "default, tokens/s", "over plain", "accepted length", "answers")
    return BenchResult("policies", figures, (Table(f"measured: {DRAFTER} with the default policies", columns, rows),))
