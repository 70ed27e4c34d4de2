"""The section ``drafters``, and the default pool."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, PrivateAttr, model_validator

from cluster.config.section import (
    Count,
    Device,
    DrafterDtype,
    Fraction,
    ModelDtype,
    Name,
    Replicated,
    Resources,
    Section,
    former,
)

DEFAULT_CAPACITY = 64
LOOKUP_METHODS = ("ngram", "ngram_gpu", "suffix", "medusa", "custom_class", "extract_hidden_states")  # no `VllmOptions`
DEFAULT_DRAFT_LEN = 8


@dataclass(frozen=True, slots=True)
class Traits:
    """What a kind of drafter needs and can do, known before it is loaded. Each kind of options states its own."""

    has_model: bool = False  # computes matrix products, so that it uses a GPU or threads
    can_verify: bool = False  # one pass yields its choice after each draft token, as a level of a chain needs
    can_fork: bool = False  # follows several continuations of a request at once
    reads_hidden_states: bool = False  # of the target, so it runs in the target's process


class NgramOptions(Section):
    """Prompt lookup: proposes what followed the last tokens earlier in this request."""

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
    """Proposes what followed the longest known suffix, in this request or in recent outputs of others."""

    kind: Literal["suffix"] = "suffix"
    traits: ClassVar[Traits] = Traits()
    max_shared_tokens: Count = 65_536  # kept of other requests' outputs, at most 450 bytes each: 29 MB
    removed = former("max_match_len")


class OfTarget(Section):
    """Options of a drafter that needs files of the target."""

    _target: str = PrivateAttr("auto")
    removed = former(target="it is always the served model")

    @property
    def target(self) -> str:
        """The served model, as in the section model; "auto" until the configuration is resolved."""
        return self._target

    def of_target(self, model: str) -> Self:
        found = self.model_copy()
        found._target = model
        return found


class ModelOptions(OfTarget):
    """A causal language model. With another tokenizer than the target's it drafts the tokens that both have."""

    kind: Literal["model"] = "model"
    traits: ClassVar[Traits] = Traits(has_model=True, can_verify=True, can_fork=True)
    model: str = Field(min_length=1)  # as in the section model
    num_layers: Count | None = None  # only its first layers; None: all
    dtype: ModelDtype = "auto"  # as-shipped: of a GGUF file, on a CPU; auto: beside such a target of this model, too
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.25


class LayersOptions(OfTarget):
    """A few layers of the target, trained to continue as it does, with a head over its frequent tokens (`outrider train`).

    ``dtype`` int8: on a CPU, int8 weights with 16-bit activations, about 0.7% of noise; bfloat16 elsewhere.
    """

    kind: Literal["layers"] = "layers"
    traits: ClassVar[Traits] = Traits(has_model=True, can_verify=True, can_fork=True)
    path: str = Field(min_length=1)  # the folder, or the name of a shipped drafter
    dtype: DrafterDtype = "auto"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.125
    # Drafting stops when the survival probability of the whole draft falls below this.
    min_survival: Annotated[float, Field(ge=0, lt=1)] = 0.25


MAX_LEARNED = 50_000  # contexts of a table, about 570 bytes each

HiddenStateKind = Literal["dspark", "dflash", "eagle3", "peagle"]


@dataclass(frozen=True, slots=True)
class HiddenStateForm:
    """What tells kinds of drafters on hidden states apart, beside their layouts (`drafters/hidden_states/formats.py`)."""

    what: str
    drafts_blocks: bool = False  # else token by token
    has_heads: bool = False  # a sequential and a confidence head
    is_trained: bool = True  # by `outrider train`
    is_proposed: bool = False  # by vLLM itself, where its --speculative-config names it


HIDDEN_STATE_FORMS: dict[HiddenStateKind, HiddenStateForm] = {
    "dspark": HiddenStateForm("a block drafter on the target's hidden states (DSpark)", True, True),
    "dflash": HiddenStateForm(
        "a block drafter on the target's hidden states without a sequential head (DFlash)", True, is_proposed=True
    ),
    "eagle3": HiddenStateForm("an autoregressive head on the target's hidden states (EAGLE-3)", is_proposed=True),
    "peagle": HiddenStateForm("EAGLE-3 at several positions at once (P-EAGLE)", is_trained=False),
}
TRAINED_KINDS = (*(kind for kind, form in HIDDEN_STATE_FORMS.items() if form.is_trained), "layers", "table")


class HiddenStateOptions(OfTarget):
    """A drafter on the target's hidden states: of `outrider train`, in vLLM's speculators format, or as its authors release
    it."""

    kind: HiddenStateKind = "dspark"
    traits: ClassVar[Traits] = Traits(has_model=True, reads_hidden_states=True)
    path: str = Field(min_length=1)  # the folder, or the name of a shipped drafter
    dtype: DrafterDtype = "auto"
    kv_cache_gb: Annotated[float, Field(gt=0, le=4096)] = 0.125
    # A draft ends before a token whose survival probability is below this: drafting it costs as much as it gains.
    min_survival: Fraction = 0.015
    removed = former(adapter="no file makes a drafter a specialist any more", **OfTarget.removed)


class VllmOptions(Section):
    """A proposer of vLLM itself, in the process of a target of ``engine: vllm``: EAGLE-3 or MTP heads, DFlash, a draft
    model, as vLLM loads it. A pool has one at most."""

    kind: Literal["vllm"] = "vllm"
    traits: ClassVar[Traits] = Traits(has_model=True, reads_hidden_states=True)
    speculative: dict[str, JsonValue]  # as vLLM's --speculative-config; max_draft_len stands for num_speculative_tokens

    @model_validator(mode="after")
    def _is_a_proposer(self) -> Self:
        method = self.speculative.get("method")
        if method is None or method in LOOKUP_METHODS:
            raise ValueError(f"speculative: must name a method of vLLM with a model, got {method!r}")
        if "num_speculative_tokens" in self.speculative:
            raise ValueError("speculative: num_speculative_tokens is the drafter's max_draft_len")
        return self


class TableOptions(Section):
    """The target's continuations of the last few tokens: counted in advance, and updated while it serves."""

    kind: Literal["table"] = "table"
    traits: ClassVar[Traits] = Traits()
    path: str | None = None  # a counted table, its folder, or the name of a shipped one; None: learned only
    removed = former("min_confidence", "max_learned")


class CascadeOptions(Section):
    """Selects the most promising of several drafters per request and round, and queries expensive ones only if it pays."""

    kind: Literal["cascade"] = "cascade"
    members: Annotated[tuple["DrafterOptions", ...], Field(min_length=1, max_length=16)]  # cheapest first
    _costs: tuple[float, ...] | None = PrivateAttr(None)
    removed = former(costs="they are measured by `outrider profile`")

    @property
    def costs(self) -> tuple[float, ...] | None:
        """Of each member's draft, in one-row steps of the target; 0: it is always queried. None: they were not measured."""
        return self._costs

    def costing(self, costs: Sequence[float]) -> Self:
        found = self.model_copy()
        found._costs = tuple(accumulate(costs, max))
        return found

    @property
    def traits(self) -> Traits:
        return Traits(
            has_model=any(member.traits.has_model for member in self.members),
            reads_hidden_states=any(member.traits.reads_hidden_states for member in self.members),
        )


DrafterOptions = Annotated[
    NgramOptions
    | SuffixOptions
    | TableOptions
    | ModelOptions
    | LayersOptions
    | HiddenStateOptions
    | VllmOptions
    | CascadeOptions,
    Field(discriminator="kind"),
]
CascadeOptions.model_rebuild()


def parts_of(options: DrafterOptions) -> Iterator[DrafterOptions]:
    """A drafter and all its members, recursively."""
    yield options
    if isinstance(options, CascadeOptions):
        for member in options.members:
            yield from parts_of(member)


class DrafterConfig(Replicated):
    """One drafter of the pool."""

    name: Name
    options: DrafterOptions
    capacity: Count = DEFAULT_CAPACITY  # concurrent requests of one replica
    max_draft_len: Annotated[int, Field(ge=1, le=64)] = DEFAULT_DRAFT_LEN  # tokens of one proposal
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1  # at start
    min_replicas: Annotated[int, Field(ge=0, le=1024)] | None = None  # None: as replicas
    max_replicas: Count | None = None
    device: Device = "auto"
    # start: loaded at start if there is room, and evictable; lazy: loaded on demand; pinned: loaded at start, never evicted.
    load: Literal["start", "lazy", "pinned"] = "start"
    resources: Resources = Resources()
    remote: bool = False  # one that reads hidden states: in a process of its own, to which a tensor link brings them
    removed = former("ahead_len", "max_outcomes", "spare_share")

    @property
    def has_model(self) -> bool:
        """Whether it computes matrix products, so that it uses a GPU or threads."""
        return self.options.traits.has_model

    @property
    def fits_gpu(self) -> bool:
        """Whether it computes matrix products, none of them by weights as they are shipped."""
        parts = parts_of(self.options)
        return self.has_model and all(getattr(part, "dtype", None) != "as-shipped" for part in parts)

    @property
    def num_outcomes(self) -> int:
        """Outcomes of a verification that it prepares for a request while it waits; none on a CPU, whose cores the target
        may need."""
        return 4 if self.device == "cuda" and self.options.traits.can_fork else 0

    @property
    def is_colocated(self) -> bool:
        """Whether it reads the target's hidden states in each target replica's process."""
        return self.options.traits.reads_hidden_states and not self.remote

    @model_validator(mode="after")
    def _device_fits(self) -> Self:
        if self.device == "cuda" and not self.has_model:
            raise ValueError(f"device must be cpu or auto for a drafter of kind {self.options.kind}, got 'cuda'")
        if self.has_model and not self.fits_gpu and (self.device == "cuda" or self.resources.gpus not in ("auto", 0)):
            raise ValueError("dtype as-shipped needs a device of auto or cpu, and no GPUs")
        self.resources.check_device(self.device if self.has_model else "cpu")
        if self.remote and not isinstance(self.options, HiddenStateOptions):
            raise ValueError(f"remote must be false for a drafter of kind {self.options.kind}, got true")
        if self.is_colocated and self.load == "lazy":
            raise ValueError("load must not be lazy for a drafter in the target's process: it is made with the target")
        if self.is_colocated and self.replicas != 1:
            raise ValueError(f"replicas must be 1 for a drafter in the target's process, got {self.replicas}")
        if self.most == 0:
            raise ValueError("max_replicas must be set for a drafter with replicas: 0, or it would never start")
        if self.scales and (self.is_colocated or self.load == "lazy"):
            raise ValueError(
                "min_replicas and max_replicas must be equal for a drafter that is lazy or in the target's process"
            )
        return self


def lookups_in_pool(drafter: DrafterConfig, pool: Iterable[DrafterConfig]) -> tuple[str, ...]:
    """Names of the lookups of ``pool`` that ``drafter`` combines, with the same options."""
    _, *parts = parts_of(drafter.options)
    return tuple(one.name for one in pool if one.options in parts and not one.has_model)


def default_pool(table: TableOptions | None = None, *models: DrafterOptions) -> tuple[DrafterConfig, ...]:
    """A cascade of lookups, a table and ``models``, and two lookups that draft while the target computes."""
    cascade = CascadeOptions(members=(NgramOptions(), SuffixOptions(), table or TableOptions(), *models))
    return (
        DrafterConfig(name="cascade", options=cascade),
        DrafterConfig(name="ngram", options=NgramOptions()),
        DrafterConfig(name="suffix", options=SuffixOptions()),
    )


DEFAULT_DRAFTERS = default_pool()
