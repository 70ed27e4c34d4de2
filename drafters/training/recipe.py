"""What `outrider train` is asked for, and what follows from it for a target of a given shape."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from cluster.errors import InvalidField
from drafters.dspark.config import DSparkConfig, MarkovKind
from drafters.training.batches import BatchPlan
from drafters.training.distil import Schedule
from drafters.training.output_dir import check_apart
from engine.cpu.packed import product_dtype
from engine.models.config import ModelConfig
from engine.models.int8 import WeightsKind

DrafterKind = Literal["dspark", "layers", "table"]
KINDS: tuple[DrafterKind, ...] = ("dspark", "layers", "table")
HeadKind = Literal["markov", "gated", "rnn"]
HEADS: dict[HeadKind, MarkovKind] = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}  # as config.json names them
STORED: WeightsKind = "int8"  # matrices of a trained drafter
PERSISTENCE = 0.45  # of a block in training, see BatchPlan: somewhat above what is accepted of each position
HELD_OUT = 0.08  # of the prompts
MIN_HELD_OUT, MAX_HELD_OUT = 8, 80  # prompts; the first as far as they are a third at most
DTYPES = ("bfloat16", "float32")  # of the target: in int8 it would teach its rounding, too


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """``num_prompts``: self-written ones. ``num_tokens``: of answers. ``budget_minutes`` bounds writing and
    training together, and what is written then depends on the machine. With ``begin_with`` the shape of the drafter
    is that of the one that it goes on with (``drafters.training.warm_start``)."""

    model: str
    drafter: DrafterKind
    out: Path
    work: Path
    prompts: tuple[Path, ...] = ()
    num_prompts: int = 2000
    num_tokens: int = 1_000_000
    max_answer_tokens: int = 192
    num_epochs: int = 4
    learning_rate: float = 2.5e-4
    num_layers: int = 2
    block_size: int = 7
    vocabulary: int = 16384
    head: HeadKind = "markov"  # the sequential one, of dspark
    markov_rank: int = 128
    anchor_rank: int = 512
    budget_minutes: float | None = None
    checkpoint_minutes: float = 5.0
    quick: bool = False
    seed: int = 0
    device: str = "auto"
    dtype: str = "bfloat16"
    begin_with: Path | None = None  # a trained drafter, by its folder or by the name of a shipped one
    asked: frozenset[str] = frozenset()  # fields of the shape that were named, though they be as by default
    data_folder: Path | None = None  # whose ``prompts`` are the evaluation sets, never to be trained on

    def __post_init__(self) -> None:
        if self.drafter not in KINDS:
            raise InvalidField("drafter", self.drafter, f"must be one of {', '.join(KINDS)}")
        if self.head not in HEADS:
            raise InvalidField("head", self.head, f"must be one of {', '.join(HEADS)}")
        for field, low in (("num_tokens", 1), ("num_prompts", 0), ("num_epochs", 1), ("num_layers", 1), ("vocabulary", 2)):
            if getattr(self, field) < low:
                raise InvalidField(field, getattr(self, field), f"must be at least {low}")
        if self.dtype not in DTYPES:
            raise InvalidField("dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidField("device", self.device, "must be auto, cpu or cuda; CUDA_VISIBLE_DEVICES says which GPU")
        check_apart(self.out, self.work)
        if self.learning_rate <= 0:
            raise InvalidField("learning_rate", self.learning_rate, "must be more than 0")
        if self.begin_with is not None and self.drafter != "dspark":
            raise InvalidField("begin_with", self.begin_with.name, f"is for dspark, and cannot go on with {self.drafter}")
        if self.budget_minutes is not None and self.budget_minutes <= 0:
            raise InvalidField("budget_minutes", self.budget_minutes, "must be more than 0")
        if not self.prompts and not self.num_prompts:
            raise InvalidField("num_prompts", 0, "must be more than 0 where no other prompts are given")

    def resolved(self) -> "TrainOptions":
        """Quick: a rehearsal of every step that ends in minutes on a CPU."""
        if not self.quick:
            return self
        short = replace(
            self,
            num_prompts=min(self.num_prompts, 48),
            num_tokens=min(self.num_tokens, 6000),
            max_answer_tokens=min(self.max_answer_tokens, 64),
            num_epochs=2,
        )
        if self.begin_with is not None:
            return short
        return replace(
            short,
            num_layers=1,
            vocabulary=min(self.vocabulary, 4096),
            markov_rank=min(self.markov_rank, 64),
            anchor_rank=min(self.anchor_rank, 128),
        )


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds for each step; None: until it is done."""

    prompts_s: float | None
    answers_s: float | None
    training_s: float | None

    @classmethod
    def of(cls, budget_minutes: float | None, num_prompts: int) -> "Times":
        """Of the budget a twentieth is kept for evaluation. Prompts given need no writing."""
        if budget_minutes is None:
            return cls(None, None, None)
        total = 60.0 * budget_minutes
        prompts = 0.08 if num_prompts else 0.0
        return cls(prompts * total, (0.45 - prompts) * total, 0.5 * total)


def batch_plan(options: TrainOptions, device: torch.device) -> BatchPlan:
    """Positions of one answer are much alike, so a batch takes a few from each of many."""
    on_gpu = device.type == "cuda"
    if options.drafter == "dspark":
        max_rows, max_positions = (16384, 8192) if on_gpu else (4096, 900)
        return BatchPlan(max_rows, max_positions, options.block_size, PERSISTENCE)
    return BatchPlan(16384, 8192) if on_gpu else BatchPlan(1024, 512)


def regression_plan(plan: BatchPlan) -> BatchPlan:
    """Positions cost little there, adding up the moments of a batch more."""
    return replace(plan, max_positions=plan.max_rows * plan.block_size, persistence=1.0)


def schedule(options: TrainOptions, device: torch.device, max_seconds: float | None) -> Schedule:
    return Schedule(
        num_epochs=options.num_epochs,
        learning_rate=options.learning_rate,
        max_seconds=max_seconds,
        checkpoint_s=60.0 * options.checkpoint_minutes,
        bf16=multiplies_bf16(device),
    )


def multiplies_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 are faster than those of float32 there: about twice, on CPUs that have them."""
    return product_dtype(torch.bfloat16, device) == torch.bfloat16


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """Of the target: after one third, after two thirds, and the last."""
    return tuple(sorted({max(0, num_layers // 3 - 1), max(0, 2 * num_layers // 3 - 1), num_layers - 1}))


def kept_layers(num_target: int, num_own: int) -> tuple[int, ...]:
    """Of the target those that a drafter of layers begins with: its first, for they read the tokens, and its last."""
    if not 1 <= num_own <= num_target:
        raise InvalidField("num_layers", num_own, f"must lie between 1 and the target's {num_target}")
    if num_own < 3:
        return tuple(range(num_own))
    return (*range(num_own - 1), num_target - 1)


def dspark_config(options: TrainOptions, target: ModelConfig, vocabulary: Tensor | None, fingerprint: str) -> DSparkConfig:
    layers = feature_layers(target.num_layers)
    num_in = (len(layers) + 1) * target.hidden_size
    return DSparkConfig(
        shape=target.truncated(options.num_layers),
        num_target_layers=target.num_layers,
        block_size=options.block_size,
        mask_token_id=0,
        target_layer_ids=layers,
        markov_rank=min(options.markov_rank, target.hidden_size),
        markov_kind=HEADS[options.head],
        has_confidence=True,
        confidence_with_markov=True,
        shares_embedding=True,
        draft_token_ids=None if vocabulary is None else tuple(vocabulary.tolist()),
        fc_bias=True,
        anchor_input=True,
        anchor_input_rank=options.anchor_rank if options.anchor_rank < num_in else None,
        tokenizer_fingerprint=fingerprint,
    )
