"""The options of `outrider train`, and what follows from them for a target."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from cluster.config import HIDDEN_STATE_FORMS, TRAINED_KINDS, HiddenStateForm, HiddenStateKind
from cluster.errors import InvalidField
from drafters.hidden_states.config import BlockConfig, EagleConfig, MarkovKind, NetworkConfig
from drafters.hidden_states.formats import read_config
from drafters.shipped import find_drafter, kind_of
from engine.models.config import DecoderConfig
from engine.models.int8 import WeightsKind
from training.batches import BatchPlan
from training.frozen import FrozenTarget
from training.work_folder import check_apart

HeadKind = Literal["markov", "gated", "rnn"]
HEADS: dict[HeadKind, MarkovKind] = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}  # names in config.json
STORED: WeightsKind = "int8"  # matrices of a trained drafter
PERSISTENCE = 0.45  # of a block in training (see BatchPlan): somewhat above the acceptance per position
HELD_OUT = 0.08  # of the prompts
MIN_HELD_OUT, MAX_HELD_OUT = 8, 80  # prompts
_CHOICES = {
    "drafter": TRAINED_KINDS,
    "head": tuple(HEADS),
    "dtype": ("bfloat16", "float32"),  # of the target; int8 would teach its rounding errors
    "device": ("auto", "cpu", "cuda"),  # CUDA_VISIBLE_DEVICES selects the GPU
}
_MINIMA = {"num_tokens": 1, "num_prompts": 0, "num_epochs": 1, "num_layers": 1, "vocabulary": 2}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    model: str
    drafter: str  # kind
    out: Path
    work: Path
    prompts: tuple[Path, ...] = ()
    num_prompts: int = 2000  # self-written
    num_tokens: int = 1_000_000  # of answers
    max_answer_tokens: int = 192
    num_epochs: int = 4
    learning_rate: float = 2.5e-4
    num_layers: int = 2
    block_size: int = 7
    vocabulary: int = 16384
    head: HeadKind = "markov"  # the sequential head of a block drafter
    markov_rank: int = 128
    anchor_rank: int = 512
    budget_minutes: float | None = None  # for writing and training together
    checkpoint_minutes: float = 5.0
    quick: bool = False
    seed: int = 0
    device: str = "auto"
    dtype: str = "bfloat16"
    begin_with: Path | None = None  # folder of a trained drafter, or name of a shipped one, whose shape is kept
    speculators: bool = False  # without the parts of a block drafter that only we have, in the speculators format
    asked: frozenset[str] = frozenset()  # fields that were given explicitly, perhaps with their default
    data_folder: Path | None = None  # its ``prompts`` are the evaluation sets, never trained on

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise InvalidField(field, getattr(self, field), f"must be one of {', '.join(choices)}")
        for field, low in _MINIMA.items():
            if getattr(self, field) < low:
                raise InvalidField(field, getattr(self, field), f"must be at least {low}")
        check_apart(self.out, self.work)
        for field in ("learning_rate", "budget_minutes"):
            if (value := getattr(self, field)) is not None and value <= 0:
                raise InvalidField(field, value, "must be more than 0")
        if self.begin_with is not None and not (self.form and self.form.has_heads):
            raise InvalidField("begin_with", self.begin_with.name, f"is for drafters with heads, not for {self.drafter}")
        if self.speculators and (self.form is None or self.begin_with is not None):
            raise InvalidField("speculators", True, "is for a new drafter on hidden states")
        if not self.prompts and not self.num_prompts:
            raise InvalidField("num_prompts", 0, "must be more than 0 if no prompts are given")

    @property
    def form(self) -> HiddenStateForm | None:
        """None: it reads no hidden states."""
        return HIDDEN_STATE_FORMS.get(cast(HiddenStateKind, self.drafter))

    def resolved(self) -> "TrainOptions":
        """With ``quick``: every step at a size that takes minutes on a CPU."""
        if not self.quick:
            return self
        limits = {"num_prompts": 48, "num_tokens": 6000, "max_answer_tokens": 64}
        if self.begin_with is None:
            limits |= {"num_layers": 1, "vocabulary": 4096, "markov_rank": 64, "anchor_rank": 128}
        smaller: dict[str, Any] = {name: min(getattr(self, name), limit) for name, limit in limits.items()}
        return replace(self, num_epochs=2, **smaller)

    def seconds(self) -> tuple[float | None, float | None, float | None]:
        """The time for prompts, answers and training; None: no limit. A twentieth of the budget is left for evaluation."""
        if self.budget_minutes is None:
            return None, None, None
        total = 60.0 * self.budget_minutes
        prompts = 0.08 if self.num_prompts else 0.0
        return prompts * total, (0.45 - prompts) * total, 0.5 * total


def batch_plan(options: TrainOptions, device: torch.device) -> BatchPlan:
    """Positions of one answer are similar, so a batch takes a few from each of many answers."""
    on_gpu = device.type == "cuda"
    if options.form is not None:
        max_rows, max_positions = (16384, 8192) if on_gpu else (4096, 900)
        return BatchPlan(max_rows, max_positions, options.block_size, PERSISTENCE)
    return BatchPlan(16384, 8192) if on_gpu else BatchPlan(1024, 512)


def held_out_share(num_prompts: int) -> float:
    return min(HELD_OUT, MAX_HELD_OUT / num_prompts)


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """The target's layers after one third, after two thirds, and the last."""
    return tuple(sorted({max(0, num_layers // 3 - 1), max(0, 2 * num_layers // 3 - 1), num_layers - 1}))


def kept_layers(num_target: int, num_own: int) -> tuple[int, ...]:
    """The target's layers that a drafter starts from: the first ones and, from three on, the last."""
    if not 1 <= num_own <= num_target:
        raise InvalidField("num_layers", num_own, f"must lie between 1 and the target's {num_target}")
    return tuple(range(num_own)) if num_own < 3 else (*range(num_own - 1), num_target - 1)


def reader_layers(options: TrainOptions, num_layers: int) -> tuple[int, ...]:
    """Those whose states training reads, ascending, with the last."""
    reads_inputs = options.speculators or (options.form is not None and not options.form.drafts_blocks)
    return eagle_layers(num_layers) if reads_inputs else feature_layers(num_layers)


def eagle_layers(num_layers: int) -> tuple[int, ...]:
    """The inputs of the target's layers that EAGLE-3 reads, as outputs, and the last, which is no feature: the speculators
    format knows it before the final norm alone."""
    inputs = {max(1, 2), max(1, num_layers // 2), max(1, num_layers - 3)}
    return tuple(sorted({min(layer, num_layers - 1) - 1 for layer in inputs} | {num_layers - 1}))


def network_config(
    options: TrainOptions, target: DecoderConfig, vocabulary: Tensor | None, fingerprint: str
) -> NetworkConfig:
    """Of a new drafter on hidden states."""
    form = options.form
    assert form is not None
    kind = cast(HiddenStateKind, options.drafter)
    if form.drafts_blocks:
        return _block_config(options, kind, form.has_heads, target, vocabulary, fingerprint)
    return EagleConfig(
        kind=kind,
        shape=replace(target.truncated(options.num_layers), tied_embeddings=False),
        target_layer_ids=eagle_layers(target.num_layers)[:-1],
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        draft_token_ids=None if vocabulary is None else tuple(vocabulary.tolist()),
        tokenizer_fingerprint=fingerprint,
        draft_len=options.block_size,
    )


def _block_config(
    options: TrainOptions,
    kind: HiddenStateKind,
    has_heads: bool,
    target: DecoderConfig,
    vocabulary: Tensor | None,
    fingerprint: str,
) -> BlockConfig:
    layers = feature_layers(target.num_layers)
    num_in = (len(layers) + 1) * target.hidden_size
    is_ours, shape = not options.speculators, target.truncated(options.num_layers)
    if not is_ours:  # whose layers are Qwen3's, whatever the target is
        shape = replace(shape, architecture="qwen3", qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=False)
    return BlockConfig(
        kind=kind,
        target_hidden_size=target.hidden_size,
        shape=shape,
        num_target_layers=target.num_layers,
        block_size=options.block_size,
        mask_token_id=0,
        target_layer_ids=layers if is_ours else eagle_layers(target.num_layers)[:-1],
        reads_whole_vocabulary=not is_ours,
        markov_rank=min(options.markov_rank, target.hidden_size) * has_heads,
        markov_kind=HEADS[options.head],
        has_confidence=has_heads,
        confidence_with_markov=has_heads,
        shares_embedding=is_ours,
        draft_token_ids=None if vocabulary is None else tuple(vocabulary.tolist()),
        fc_bias=is_ours,
        anchor_input=is_ours,
        anchor_input_rank=options.anchor_rank if is_ours and options.anchor_rank < num_in else None,
        tokenizer_fingerprint=fingerprint,
    )


def warm_start(options: TrainOptions, target: FrozenTarget) -> TrainOptions:
    """The options with the shape of the drafter to begin with. Raises InvalidField if it does not fit; ModelUnavailable."""
    folder = find_drafter(str(options.begin_with))
    if kind_of(folder) != options.drafter:
        raise InvalidField("begin_with", folder.name, f"must be the folder of a drafter of kind {options.drafter}")
    config = read_config(folder)
    assert isinstance(config, BlockConfig)
    reason = _mismatch(config, target)
    if reason is not None:
        raise InvalidField("begin_with", folder.name, reason)
    shape: dict[str, Any] = {
        "num_layers": config.shape.num_layers,
        "block_size": config.block_size,
        "vocabulary": config.num_outputs,
        "head": next(head for head, kind in HEADS.items() if kind == config.markov_kind),
        "markov_rank": config.markov_rank,
        "anchor_rank": config.anchor_input_rank or config.feature_size + config.shape.hidden_size,
    }
    defaults = {field.name: field.default for field in fields(TrainOptions)}
    for name, value in shape.items():
        asked = getattr(options, name)
        if asked != value and (asked != defaults[name] or name in options.asked):
            raise InvalidField(name, asked, f"must be left out, or {value} as the drafter in {folder.name} has it")
    return replace(options, begin_with=folder, **shape)


def _mismatch(config: BlockConfig, target: FrozenTarget) -> str | None:
    own, wanted = target.model.config, feature_layers(target.model.config.num_layers)
    if _layer_shape(config.shape) != _layer_shape(own) or config.num_target_layers != own.num_layers:
        return (
            f"must be a drafter for {target.info.name}, with {own.num_layers} layers of width {own.hidden_size} and "
            f"{own.vocab_size} tokens; it is for {config.num_target_layers} of width {config.shape.hidden_size} and "
            f"{config.shape.vocab_size} tokens"
        )
    if config.tokenizer_fingerprint not in (None, target.info.tokenizer_fingerprint):
        return f"must have been trained with the tokenizer of {target.info.name}"
    if config.target_layer_ids != wanted:
        return f"must read the layers {list(wanted)} of its target, not {list(config.target_layer_ids)}"
    if not (config.shares_embedding and config.fc_bias):
        return "must be a drafter that `outrider train` made, which shares its target's rows"
    return None


def _layer_shape(shape: DecoderConfig) -> DecoderConfig:
    """What all layers of a drafter share with those of its target."""
    return replace(shape, num_layers=1, tied_embeddings=False, eos_token_ids=())
