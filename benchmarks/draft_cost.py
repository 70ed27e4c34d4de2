"""Cost of a draft, timed in turn with steps of the target."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.fixtures import Fixtures
from benchmarks.prompts import spread
from cluster.config import DrafterConfig
from cluster.sampling_params import SamplingParams
from cluster.types import Request
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.replay import Recording, replay
from router.plan import Span

NUM_COST_ANSWERS = 12  # answers whose drafts are timed


class _Timed:
    """A drafter whose drafts are timed, each beside a one-row step of the target."""

    capabilities = Capabilities()

    def __init__(self, drafter: Drafter, step: Callable[[], None]) -> None:
        self._drafter, self._step = drafter, step
        self.open, self.extend, self.release = drafter.open, drafter.extend, drafter.release
        self.check_integrity = drafter.check_integrity
        self.draft_s: list[float] = []
        self.step_s: list[float] = []

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        start_s = time.perf_counter()
        drafts = self._drafter.propose(demands)
        middle_s = time.perf_counter()
        self._step()
        self.draft_s.append(middle_s - start_s)
        self.step_s.append(time.perf_counter() - middle_s)
        return drafts


def draft_cost(
    fixtures: Fixtures, config: DrafterConfig, recordings: Sequence[Recording], draft_len: int, num_rounds: int
) -> float:
    """Time of a draft for one request over the time of a one-row target step."""
    request = Request("step", (0,), SamplingParams(max_tokens=1, temperature=0.0), arrival_s=0.0)
    fixtures.plain.open(request, request.prompt_token_ids)
    lens = itertools.count()

    def step() -> None:
        fixtures.plain.execute([Span.bound(request.id, next(lens), (0,))])

    timed = _Timed(fixtures.make(config), step)
    chosen = sample(recordings, NUM_COST_ANSWERS)
    with fixtures.holding(chosen):
        for recording in chosen:
            for _ in itertools.islice(replay(timed, [recording], draft_len), -(-num_rounds // len(chosen))):
                pass
            timed.release(recording.name)  # not finished
    fixtures.plain.release(request.id)
    return _typical_s(timed.draft_s) / _typical_s(timed.step_s)


def sample(recordings: Sequence[Recording], num: int) -> list[Recording]:
    """At most ``num`` answers, drawn equally from all domains."""
    usable = [recording for recording in recordings if len(recording.output_token_ids) > 2] or list(recordings)
    return spread(random.Random(0).sample(usable, len(usable)), num)


def _typical_s(times_s: Sequence[float]) -> float:
    """Trimmed mean without the outer tenths. A cascade's drafts have two modes, of which a median would show one."""
    ordered = sorted(times_s)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut])
