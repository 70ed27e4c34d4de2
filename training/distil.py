"""The training loop: a student, the target's hidden states, a schedule, and checkpoints to resume from exactly."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.weights import write_atomically
from training.batches import BatchPlan, assemble, epoch
from training.corpus import TargetAnswer
from training.distributed import World
from training.hidden_states import HiddenStateReader
from training.losses import Losses

logger = logging.getLogger(__name__)

_FORMAT = 1
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_WARMUP_SHARE = 0.03
_MAX_NORM = 1.0
_EMA_DECAY = 0.998
_LOG_STEPS = 10


@dataclass(frozen=True, slots=True)
class Schedule:
    num_epochs: int
    learning_rate: float
    max_seconds: float | None = None  # scales the schedule, and may end it before all epochs
    checkpoint_s: float = 120.0
    bf16: bool = False


@dataclass(slots=True)
class CurvePoint:
    """Training losses are means since the previous point."""

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
class TrainingProgress:
    step: int = 0
    elapsed_s: float = 0.0  # of training, over all runs
    num_tokens: int = 0  # read
    points: list[CurvePoint] = field(default_factory=list)
    done: bool = False


class Distillation:
    """Trains ``student``, whose forward takes (batch, progress) and returns ``Losses``, with a checkpoint at ``path``.

    ``evaluate``: accepted length of the averaged student on held-out answers; called before every checkpoint.
    """

    def __init__(
        self,
        student: nn.Module,
        answers: Sequence[TargetAnswer],
        reader: HiddenStateReader,
        plan: BatchPlan,
        schedule: Schedule,
        world: World,
        path: Path,
        seed: int,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        self._student = student
        self._answers, self._reader, self._plan = answers, reader, plan
        self._schedule, self._world, self._path, self._seed = schedule, world, path, seed
        self._evaluate = evaluate
        self._parameters = {name: p for name, p in student.named_parameters() if p.requires_grad}
        parameters = self._parameters.values()
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": _WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=_BETAS, fused=True)
        self._average: dict[str, Tensor] = {}  # exponential moving average of the parameters, fp32
        self.progress = TrainingProgress()
        self.num_steps = sum(1 for number in range(schedule.num_epochs) for _ in self._epoch(number))

    def restore(self) -> bool:
        """Loads the checkpoint, if there is a readable one of this format; returns whether."""
        if not self._path.exists():
            return False
        try:
            # A device that is full of another program's tensors must not read as a damaged file: hence on the CPU.
            state: dict[str, Any] = torch.load(self._path, map_location="cpu", weights_only=True)
        except Exception:  # whatever a damaged file leads to
            logger.exception("%s cannot be read: this step begins anew", self._path)
            return False
        if state.get("format") != _FORMAT:
            return False
        self._load(state["parameters"])
        device = self._world.device
        self._average = {name: value.to(device, torch.float32) for name, value in state["average"].items()}
        self._optimizer.load_state_dict(state["optimizer"])
        raw = state["progress"]
        self.progress = TrainingProgress(**{**raw, "points": [CurvePoint(**point) for point in raw["points"]]})
        return True

    def run(self, tell: Callable[[float], None]) -> None:
        """Trains to the end of the schedule. ``tell`` is called after each step with the share done, 0 to 1."""
        module = self._world.wrap(self._student)
        schedule, progress = self._schedule, self.progress
        began_s = time.monotonic() - progress.elapsed_s
        saved_s = time.monotonic()
        if not self._average:
            self._average = {name: p.detach().clone().float() for name, p in self._parameters.items()}
        recent: list[list[float]] = []
        for answers, seed in self._remaining():
            share = self._share(time.monotonic() - began_s)
            if self._world.any(share >= 1.0):
                break
            for group in self._optimizer.param_groups:
                group["lr"] = schedule.learning_rate * _rate(share)
            batch = assemble(answers, self._reader, self._plan, seed, self._world.device)
            with torch.autocast(self._world.device.type, torch.bfloat16, enabled=schedule.bf16):
                losses: Losses = module(batch, share)
            losses.total.backward()
            nn.utils.clip_grad_norm_(list(self._parameters.values()), _MAX_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._update_average()
            progress.step += 1
            progress.num_tokens += len(batch.token_ids) * self._world.size
            progress.elapsed_s = self._world.from_first(time.monotonic() - began_s)
            recent.append(_figures(losses))
            if progress.step % _LOG_STEPS == 0:
                self._add_point(recent)
                recent = []
            tell(self._share(progress.elapsed_s))
            if time.monotonic() - saved_s > schedule.checkpoint_s:
                self._note_heldout()
                self.save()
                saved_s = time.monotonic()
        if recent:
            self._add_point(recent)
        progress.done = True
        self.save()

    def save(self) -> None:
        if not self._world.is_first:
            return
        state = {
            "format": _FORMAT,
            "parameters": {name: p.detach() for name, p in self._parameters.items()},
            "average": self._average,
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self.progress),
        }
        write_atomically(self._path, lambda path: torch.save(state, path))

    def use_average(self) -> None:
        self._load(self._average)

    def _load(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def _update_average(self) -> None:
        """The decay grows with the number of steps."""
        step = self.progress.step
        decay = min(_EMA_DECAY, (1 + step) / (10 + step))
        for name, value in self._average.items():
            value.lerp_(self._parameters[name].detach().float(), 1.0 - decay)

    def _add_point(self, recent: list[list[float]]) -> None:
        p = self.progress
        means = [sum(values) / len(recent) for values in zip(*recent, strict=True)]
        p.points.append(CurvePoint(p.step, p.elapsed_s, p.num_tokens, *means))

    def _note_heldout(self) -> None:
        if self._evaluate is not None and self.progress.points:
            before = {name: p.detach().clone() for name, p in self._parameters.items()}
            self.use_average()
            self.progress.points[-1].heldout_accepted_len = self._evaluate()
            self._load(before)

    def _epoch(self, number: int) -> list[tuple[list[TargetAnswer], int]]:
        """This process's batches; every process has equally many."""
        batches = list(epoch(self._answers, self._plan, self._seed, number))
        num_whole = len(batches) // self._world.size * self._world.size
        # With fewer batches than processes all train on the same ones.
        return batches[self._world.rank : num_whole : self._world.size] if num_whole else batches

    def _remaining(self) -> Iterator[tuple[list[TargetAnswer], int]]:
        num_skipped = self.progress.step
        for number in range(self._schedule.num_epochs):
            batches = self._epoch(number)
            yield from batches[num_skipped:]
            num_skipped = max(0, num_skipped - len(batches))

    def _share(self, elapsed_s: float) -> float:
        """The share of the schedule that is done, 0 to 1: the larger of those in steps and in time."""
        by_steps = self.progress.step / self.num_steps
        if self._schedule.max_seconds is None:
            return by_steps
        return self._world.from_first(max(by_steps, elapsed_s / self._schedule.max_seconds))


def _figures(losses: Losses) -> list[float]:
    first = losses.acceptance[..., 0] if losses.acceptance.dim() == 2 else losses.acceptance
    means = (losses.total, losses.cross_entropy, losses.match, losses.confidence, first.nanmean())
    return [float(mean.detach()) for mean in means]


def _rate(share: float) -> float:
    """Warm-up, then a cosine to a twentieth."""
    if share < _WARMUP_SHARE:
        return max(share / _WARMUP_SHARE, 0.01)
    through = (share - _WARMUP_SHARE) / (1.0 - _WARMUP_SHARE)
    return 0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, through)))
