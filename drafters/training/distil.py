"""The training loop: one student, the readings of one frozen target, a schedule, and checkpoints to go on from exactly."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.training.batches import BatchPlan, assemble, epoch
from drafters.training.corpus import Answer
from drafters.training.distributed import World
from drafters.training.hidden_states import HiddenStateReader
from drafters.training.losses import Losses

_FORMAT = 1
_BETAS = (0.9, 0.95)
_MAX_NORM = 1.0
_EMA_DECAY = 0.998


@dataclass(frozen=True, slots=True)
class Schedule:
    """``max_seconds`` ends it earlier, and stretches or shortens the schedule to the time there is; None: all epochs."""

    num_epochs: int
    learning_rate: float
    warmup_share: float = 0.03
    weight_decay: float = 0.01
    max_seconds: float | None = None
    checkpoint_s: float = 120.0
    log_steps: int = 10
    bf16: bool = False


@dataclass(slots=True)
class Point:
    """A point of the curves: training losses are means since the last point."""

    step: int
    elapsed_s: float
    num_tokens: int
    loss: float
    cross_entropy: float
    match: float
    confidence: float
    acceptance: float  # expected, of the first draft token
    heldout_accepted_len: float | None = None


@dataclass(slots=True)
class Progress:
    step: int = 0
    elapsed_s: float = 0.0  # of training, over all runs
    num_tokens: int = 0  # read
    points: list[Point] = field(default_factory=list)
    done: bool = False


class Average:
    """The exponential moving average of a module's trained parameters, fp32. Young averages forget faster."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.values = {name: parameter.detach().clone().float() for name, parameter in parameters.items()}

    def update(self, parameters: dict[str, nn.Parameter], step: int) -> None:
        decay = min(_EMA_DECAY, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in self.values.items():
                value.lerp_(parameters[name].detach().float(), 1.0 - decay)


class Distillation:
    """Trains ``student``, a module whose forward takes (batch, progress) and returns ``Losses``.

    Args:
        evaluate: of the averaged student, on held-out answers; called at every checkpoint. Returns the accepted length.
    """

    def __init__(
        self,
        student: nn.Module,
        answers: Sequence[Answer],
        readings: HiddenStateReader,
        plan: BatchPlan,
        schedule: Schedule,
        world: World,
        path: Path,
        seed: int,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        self._student = student
        self._answers, self._readings, self._plan = answers, readings, plan
        self._schedule, self._world, self._path, self._seed = schedule, world, path, seed
        self._evaluate = evaluate
        self._parameters = {name: p for name, p in student.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters.values() if p.dim() > 1], "weight_decay": schedule.weight_decay},
                {"params": [p for p in self._parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=schedule.learning_rate,
            betas=_BETAS,
            fused=True,
        )
        self._average = Average(self._parameters)
        self.progress = Progress()
        self._num_steps = sum(1 for number in range(schedule.num_epochs) for _ in self._epoch(number))

    @property
    def num_steps(self) -> int:
        """If time does not end it before."""
        return self._num_steps

    def restore(self) -> bool:
        """Go on from the checkpoint. Returns whether there is one, and of this version."""
        if not self._path.exists():
            return False
        state: dict[str, Any] = torch.load(self._path, map_location=self._world.device, weights_only=True)
        if state.get("format") != _FORMAT:
            return False
        self._load(state["parameters"])
        self._average.values = {name: value.float() for name, value in state["average"].items()}
        self._optimizer.load_state_dict(state["optimizer"])
        raw = state["progress"]
        self.progress = Progress(**{**raw, "points": [Point(**point) for point in raw["points"]]})
        return True

    def restart(self) -> None:
        """The student was given other parameters: the average begins with them."""
        self._average = Average(self._parameters)

    def run(self, tell: Callable[[Progress, float], None]) -> None:
        """To the end of the schedule. ``tell`` hears after each step how far training is, 0 to 1."""
        module = self._world.wrap(self._student)
        schedule = self._schedule
        began_s = time.monotonic() - self.progress.elapsed_s
        saved_s = time.monotonic()
        sums = _Sums()
        for answers, seed in self._remaining():
            share = self._share(time.monotonic() - began_s)
            if self._world.agree(share >= 1.0):
                break
            for group in self._optimizer.param_groups:
                group["lr"] = schedule.learning_rate * _rate(share, schedule.warmup_share)
            batch = assemble(answers, self._readings, self._plan, seed, self._world.device)
            with torch.autocast(self._world.device.type, torch.bfloat16, enabled=schedule.bf16):
                losses: Losses = module(batch, share)
            losses.total.backward()
            nn.utils.clip_grad_norm_(list(self._parameters.values()), _MAX_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            progress = self.progress
            self._average.update(self._parameters, progress.step)
            progress.step += 1
            progress.num_tokens += len(batch.token_ids) * self._world.size
            progress.elapsed_s = self._world.from_first(time.monotonic() - began_s)
            sums.add(losses)
            if progress.step % schedule.log_steps == 0:
                progress.points.append(sums.point(progress))
                sums = _Sums()
            tell(progress, self._share(progress.elapsed_s))
            if time.monotonic() - saved_s > schedule.checkpoint_s:
                self._note_heldout()
                self.save()
                saved_s = time.monotonic()
        if sums.num:
            self.progress.points.append(sums.point(self.progress))
        self.progress.done = True
        self.save()

    def save(self) -> None:
        if not self._world.is_first:
            return
        partial = self._path.with_suffix(".partial")
        state = {
            "format": _FORMAT,
            "parameters": {name: p.detach() for name, p in self._parameters.items()},
            "average": self._average.values,
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        torch.save(state, partial)
        partial.replace(self._path)

    def use_average(self) -> dict[str, Tensor]:
        """Puts the averaged parameters in; returns those that were trained, to be put back with ``put_back``."""
        before = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._load(self._average.values)
        return before

    def put_back(self, parameters: dict[str, Tensor]) -> None:
        self._load(parameters)

    def _load(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def _note_heldout(self) -> None:
        if self._evaluate is not None and self.progress.points:
            before = self.use_average()
            self.progress.points[-1].heldout_accepted_len = self._evaluate()
            self.put_back(before)

    def _epoch(self, number: int) -> Iterator[tuple[list[Answer], int]]:
        """This process's batches; every process has as many."""
        batches = list(epoch(self._answers, self._plan, self._seed, number))
        num_whole = len(batches) // self._world.size * self._world.size
        if not num_whole:  # fewer batches than processes: all do the same
            return iter(batches)
        return iter(batches[self._world.rank : num_whole : self._world.size])

    def _remaining(self) -> Iterator[tuple[list[Answer], int]]:
        num_skipped = self.progress.step
        for number in range(self._schedule.num_epochs):
            for item in self._epoch(number):
                if num_skipped:
                    num_skipped -= 1
                else:
                    yield item

    def _share(self, elapsed_s: float) -> float:
        """How far the schedule is, 0 to 1: by time where time is what ends it."""
        by_steps = self.progress.step / self._num_steps
        if self._schedule.max_seconds is None:
            return by_steps
        return self._world.from_first(max(by_steps, elapsed_s / self._schedule.max_seconds))


class _Sums:
    def __init__(self) -> None:
        self.num = 0
        self._values = [0.0] * 5

    def add(self, losses: Losses) -> None:
        first = losses.acceptance[..., 0] if losses.acceptance.dim() == 2 else losses.acceptance
        parts = (losses.total.detach(), losses.cross_entropy, losses.match, losses.confidence, first.nanmean())
        self._values = [a + float(b) for a, b in zip(self._values, parts, strict=True)]
        self.num += 1

    def point(self, progress: Progress) -> Point:
        return Point(progress.step, progress.elapsed_s, progress.num_tokens, *(v / self.num for v in self._values))


def _rate(share: float, warmup_share: float) -> float:
    """Warm-up, then a cosine to a twentieth."""
    if share < warmup_share:
        return max(share / warmup_share, 0.01)
    through = (share - warmup_share) / (1.0 - warmup_share)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, through)))
