"""The section ``drafters``: what may propose, and the pool of a file that names none."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from cluster.config.section import Count, Device, DrafterDtype, Dtype, Fraction, Name, Resources, Section

# Of a drafter that nobody configured otherwise.
DEFAULT_CAPACITY = 64
DEFAULT_DRAFT_LEN = 8


@dataclass(frozen=True, slots=True)
class Traits:
    """What a kind of drafter needs and can do, known before it is loaded. Each kind of options states its own."""

    has_model: bool = False  # multiplies matrices: worth a GPU, and threads
    can_verify: bool = False  # one pass yields its choice behind each token of another's draft
    reads_hidden_states: bool = False  # of the target, so it runs in the target's process


class NgramOptions(Section):
    """Prompt lookup: what followed the last tokens when they stood in this request before."""

    kind: Literal["ngram"] = "ngram"
    traits: ClassVar[Traits] = Traits()
    max_match_len: Count = 4
    min_match_len: Count = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match_len > self.max_match_len:
            raise ValueError(f"min_match_len ({self.min_match_len}) must be at most max_match_len ({self.max_match_len})")
        return self


class SuffixOptions(Section):
    """What followed the longest known suffix in this request, or in recent outputs of others."""

    kind: Literal["suffix"] = "suffix"
    traits: ClassVar[Traits] = Traits()
    max_match_len: Count = 16
    max_shared_tokens: Count = 65_536  # of other requests' outputs that are remembered, at most 450 bytes each: 29 MB


class ModelOptions(Section):
    """A causal language model with the target's vocabulary."""

    kind: Literal["model"] = "model"
    traits: ClassVar[Traits] = Traits(has_model=True, can_verify=True)
    model: str = Field(min_length=1)  # as in the section model
    num_layers: Count | None = None  # only its first layers; None: all
    dtype: Dtype = "auto"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.25


class LayersOptions(Section):
    """A few layers of the target, trained to go on as it does, with a head over the tokens that it really says.

    A folder of `outrider train`: config.json, and model.safetensors with the layers, the final norm and the ids of the
    tokens that the head knows. Embedding and head are the target's own rows, read from the target's folder.

    ``dtype`` int8: on a CPU, products of int8 weights with activations of 16 bits, which read half of the bytes and add
    about 0.7% of noise; elsewhere it is bfloat16. It does not depend on how the folder stores them.
    """

    kind: Literal["layers"] = "layers"
    traits: ClassVar[Traits] = Traits(has_model=True, can_verify=True)
    path: str = Field(min_length=1)  # the folder, or the name of a shipped drafter
    target: str = Field(default="auto", min_length=1)  # its model, as in the section model; auto: the served one
    dtype: DrafterDtype = "auto"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.125
    # Drafting stops when the whole draft is less likely than this to be right: two layers with a head of 16 thousand tokens
    # cost 0.13 one-row steps of SmolLM2-135M a token, in which it decodes about 0.25 tokens by itself.
    min_survival: Annotated[float, Field(ge=0, lt=1)] = 0.25


class DSparkOptions(Section):
    """A block drafter on the target's own hidden states (DSpark): it runs in the target's process, on its device.

    A folder of `outrider train`, or a released DeepSpec checkpoint. ``dtype`` as of ``LayersOptions``.
    """

    kind: Literal["dspark"] = "dspark"
    traits: ClassVar[Traits] = Traits(has_model=True, reads_hidden_states=True)
    path: str = Field(min_length=1)  # the folder, or the name of a shipped drafter
    dtype: DrafterDtype = "auto"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.125
    # A draft ends before a token that is less likely than this to be accepted: its step costs about as much of the
    # target's as it may bring.
    min_survival: Fraction = 0.02


class TableOptions(Section):
    """What the target tends to say after the last few tokens: counted from its outputs, and learned while it serves."""

    kind: Literal["table"] = "table"
    traits: ClassVar[Traits] = Traits()
    path: str | None = None  # of a counted table or its folder, or the name of a shipped one; None: only what is learned
    max_learned: Annotated[int, Field(ge=0, le=2**31 - 1)] = 50_000  # contexts, about 570 bytes each
    min_confidence: Fraction = 0.1  # a draft ends before a token less probable than this


class CascadeOptions(Section):
    """Of several drafters the one that promises most, per request and round; the dear ones only when it pays to ask them.

    Lookups are asked every time, go on where another stops, and are scored by what came true whether they were used or
    not. What asking a model is worth is learned over all requests and for each.
    """

    kind: Literal["cascade"] = "cascade"
    members: Annotated[tuple["DrafterOptions", ...], Field(min_length=1, max_length=16)]  # cheapest first
    # Of one draft of each member, in one-row steps of the target, until the cascade has measured it; one that costs 0 is
    # always asked. None: 0 for lookups, 0.15 for dspark, 0.35 for layers, 1 for other models.
    costs: tuple[Annotated[float, Field(ge=0, le=100)], ...] | None = None

    @property
    def traits(self) -> Traits:
        return Traits(
            has_model=any(member.traits.has_model for member in self.members),
            reads_hidden_states=any(member.traits.reads_hidden_states for member in self.members),
        )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.costs is not None and len(self.costs) != len(self.members):
            raise ValueError(
                f"costs must hold one number for each of the {len(self.members)} members, got {len(self.costs)}"
            )
        if self.costs is not None and list(self.costs) != sorted(self.costs):
            raise ValueError(f"costs must ascend: the cheapest member comes first, got {list(self.costs)}")
        return self


DrafterOptions = Annotated[
    NgramOptions | SuffixOptions | TableOptions | ModelOptions | LayersOptions | DSparkOptions | CascadeOptions,
    Field(discriminator="kind"),
]
CascadeOptions.model_rebuild()


def parts_of(options: DrafterOptions) -> Iterator[DrafterOptions]:
    """A drafter and all that it is made of."""
    yield options
    if isinstance(options, CascadeOptions):
        for member in options.members:
            yield from parts_of(member)


class DrafterConfig(Section):
    """One member of the pool."""

    name: Name
    options: DrafterOptions
    capacity: Count = DEFAULT_CAPACITY  # requests that one replica follows at once
    max_draft_len: Annotated[int, Field(ge=1, le=64)] = DEFAULT_DRAFT_LEN  # tokens of one proposal
    ahead_len: Annotated[int, Field(ge=0, le=64)] = 0  # tokens drafted on top of a proposal that is not verified yet
    # Most of its time that goes into keeping in step with requests that others draft for, so that it can take them up at
    # once, and telling the router what it would have drafted for them; 0: none.
    spare_share: Fraction = 0.1
    replicas: Count = 1
    device: Device = "auto"
    # When it is in memory: from the start on, if there is room, until others are wanted more; not before it is wanted; or
    # from the start on, for ever.
    load: Literal["start", "lazy", "pinned"] = "start"
    resources: Resources = Resources()

    @property
    def has_model(self) -> bool:
        """Whether it multiplies matrices: worth a GPU, and threads."""
        return self.options.traits.has_model

    @property
    def is_companion(self) -> bool:
        """Whether it reads the target's hidden states, and so runs in the process of each target replica."""
        return self.options.traits.reads_hidden_states

    @model_validator(mode="after")
    def _device_fits(self) -> Self:
        if self.device == "cuda" and not self.has_model:
            raise ValueError(f"device must be cpu or auto for a drafter of kind {self.options.kind}, got 'cuda'")
        if (self.device == "cpu" or not self.has_model) and self.resources.gpus not in ("auto", 0):
            raise ValueError(f"resources.gpus must be 0 for a drafter on a CPU, got {self.resources.gpus}")
        if self.device == "cuda" and self.resources.gpus == 0:
            raise ValueError("resources.gpus must be greater than 0 on device cuda, got 0: leave it out for one GPU")
        if self.is_companion and self.load == "lazy":
            raise ValueError("load must not be lazy for a drafter in the target's process: it is made with the target")
        if self.is_companion and self.replicas != 1:
            raise ValueError(
                f"replicas must be 1 for a drafter that runs in the target's process (kind dspark, or one with such a "
                f"member), got {self.replicas}: each target replica has its own"
            )
        return self


def default_pool(table: TableOptions | None = None, *models: DrafterOptions) -> tuple[DrafterConfig, ...]:
    """The drafters of a file that names none: per request and round the best of lookups, a table and ``models``.

    Beside it two lookups in processes of their own, for what they copy is drafted while the target computes, and requests
    have somewhere to go when the cascade is gone. More members would cost memory and processor time for what the cascade
    asks anyway.
    """
    cascade = CascadeOptions(members=(NgramOptions(), SuffixOptions(), table or TableOptions(), *models))
    return (
        DrafterConfig(name="cascade", options=cascade),
        DrafterConfig(name="ngram", options=NgramOptions()),
        DrafterConfig(name="suffix", options=SuffixOptions()),
    )


DEFAULT_DRAFTERS = default_pool()
