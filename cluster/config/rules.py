"""Rules that are chosen by name in the sections ``router`` and ``planner``, those of papers among them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from cluster.config.section import Name, Section, former
from cluster.strict_yaml import KeyProblem, unknown_key


class Parameter(NamedTuple):
    """A number of a rule and its bounds. It is whole if its default is."""

    default: float
    least: float
    most: float


class Rule(Section):
    """The name of a rule, and beside it that rule's parameters, which ``table`` lists."""

    model_config = ConfigDict(extra="allow")
    kind: str
    table: ClassVar[Mapping[str, Mapping[str, Parameter]]] = {}  # of the rules that have any

    @property
    def parameters(self) -> dict[str, Any]:
        """All of the rule's, as its class takes them."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _complete(self) -> Self:
        known, given = self.table.get(self.kind, {}), self.model_extra
        assert given is not None, "extra keys are allowed"
        for name in given.keys() - known.keys():
            raise KeyProblem(name, unknown_key(name, known, self.removed))
        for name, (default, least, most) in known.items():
            value = given.get(name, default)
            if isinstance(value, bool) or not isinstance(value, int if isinstance(default, int) else int | float):
                raise KeyProblem(name, f"must be {'an integer' if isinstance(default, int) else 'a number'}, got {value!r}")
            if not least <= value <= most:
                raise KeyProblem(name, f"must be between {least} and {most}, got {value}")
            given.setdefault(name, default)
        return self


class PolicyConfig(Rule):
    """The policy that assigns drafters to requests: of `router/drafter/`, or one of `router/papers/`."""

    kind: Literal["fixed", "greedy-length", "epsilon-greedy", "lbss", "hedge", "chain"] = "epsilon-greedy"
    # fixed: drafters, nearest to the target last; each verifies the proposals of the one before it, in the last one's
    # process. []: the target alone; None: the first drafter of the list that has capacity.
    chain: tuple[Name, ...] | None = None
    table: ClassVar = {
        "epsilon-greedy": {"epsilon": Parameter(0.02, 0.0, 1.0)},  # share of requests, per slot, with a random drafter
        "lbss": {  # alpha: slots of an exploration phase; beta: slots that a request keeps a drawn drafter
            "exploration_slots": Parameter(16, 1, 2**31 - 1),
            "chunk_slots": Parameter(2, 1, 2**31 - 1),
        },
        "chain": {  # models of a chain, the target included; SpecRouter's alpha: weight of the newest measured pass times
            "max_levels": Parameter(4, 2, 4),
            "time_weight": Parameter(0.1, 1e-6, 1.0),
        },
    }
    removed = former(
        *("hysteresis", "exploration", "learning_rate", "payback_s", "longest_exploitation", "calm_slots", "seed"),
        *("prior_rounds", "request_rounds", "cluster_rounds", "memory_rounds", "num_clusters"),
    )

    if TYPE_CHECKING:  # the parameters

        def __init__(self, **fields: Any) -> None: ...

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.chain is not None and self.kind != "fixed":
            raise ValueError(f"chain must be left out for the policy {self.kind}, got {list(self.chain)}")
        slots, chunk = (self.parameters.get(name, 1) for name in ("exploration_slots", "chunk_slots"))
        if slots % chunk:
            raise ValueError(f"exploration_slots ({slots}) must be a multiple of chunk_slots ({chunk})")
        return self


class DraftLengthConfig(Rule):
    """The rule that decides how far to draft: ours and two simple ones in `router/drafting/`, others in `router/papers/`."""

    kind: Literal["outrider", "fixed", "threshold", "adaspec", "faser", "turbospec"] = "outrider"
    table: ClassVar = {
        "fixed": {"num_tokens": Parameter(4, 1, 64)},  # at most max_draft_len of the drafter
        "threshold": {"min_confidence": Parameter(0.4, 0.0, 1.0)},  # a draft ends with the first token of less
        "faser": {"window": Parameter(32, 1, 2**31 - 1)},  # rounds of a request that count
    }

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...


class PlannerConfig(Section):
    """Drafting, and verification in a pass of the target."""

    draft_length: DraftLengthConfig = DraftLengthConfig()
    verify: Literal["outrider", "all", "goodput", "adaspec", "dspark", "dspark-async"] = "outrider"
    # barrier: all proposals are awaited; micro-batch: one is verified while others are drafted for; frontier: drafters go on
    # from their own guess; gain: whichever is fastest by measured times.
    overlap: Literal["gain", "barrier", "micro-batch", "frontier"] = "gain"
    max_hold_ms: Annotated[float, Field(ge=0, le=10_000)] = 50  # maximum wait for a proposal; 0: no wait


class RouterConfig(Section):
    """The assignment of drafters to requests."""

    policy: PolicyConfig = PolicyConfig()
    removed = former("collapse", "slot_ms")
