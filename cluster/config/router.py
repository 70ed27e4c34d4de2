"""The section ``router``: who decides which drafter a request gets, and how."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.config.section import Count, Fraction, Name, Seconds, Section


class FixedPolicy(Section):
    """Always the same chain, or without one the first drafter of the list that has room."""

    kind: Literal["fixed"] = "fixed"
    # Drafters, nearest to the target last: each verifies what the one before it proposes, in the process of the last. []:
    # the target alone.
    chain: tuple[Name, ...] | None = None


class GreedyLengthPolicy(Section):
    """SPIN's baseline: the shorter a request, the smaller its drafter."""

    kind: Literal["greedy-length"] = "greedy-length"


class EpsilonGreedyPolicy(Section):
    """SPIN's baseline: with probability epsilon any drafter, else the one with the best estimated goodput."""

    kind: Literal["epsilon-greedy"] = "epsilon-greedy"
    epsilon: Fraction = 0.05  # per request and slot
    hysteresis: Fraction = 0.1  # relative gain under which a request stays where it is
    prior_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh the pool's mean
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class LbssPolicy(Section):
    """SPIN's algorithms 1 and 2: explores by chunks of slots, then exploits for twice as long as the last time."""

    kind: Literal["lbss"] = "lbss"
    exploration_slots: Count = 16  # alpha: slots of each exploration
    chunk_slots: Count = 2  # beta: slots that a request stays where it was drawn to
    longest_exploitation: Count | None = None  # slots; None: twice as many with every epoch, for ever, as in the paper
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    @model_validator(mode="after")
    def _whole_chunks(self) -> Self:
        if self.exploration_slots % self.chunk_slots:
            raise ValueError(
                f"exploration_slots ({self.exploration_slots}) must be a multiple of chunk_slots ({self.chunk_slots})"
            )
        return self


class HedgePolicy(Section):
    """Full information: estimates for every request and drafter, from what was drafted and what would have been."""

    kind: Literal["hedge"] = "hedge"
    learning_rate: Annotated[float, Field(gt=0, le=1000)] = 1.0  # of the exponential weights, per token and round
    hysteresis: Fraction = 0.05  # relative gain under which a request stays where it is
    exploration: Fraction = 0.01  # of requests, per slot, that try a drafter of which they have seen next to nothing
    payback_s: Seconds = 5  # within which a switch must have gained what it costs
    request_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh its cluster's
    cluster_rounds: Annotated[float, Field(gt=0, le=100_000)] = 50.0  # of a cluster's before they outweigh the drafter's
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    num_clusters: Annotated[int, Field(ge=1, le=64)] = 16  # of like prompts
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class ChainPolicy(Section):
    """SpecRouter: for each request the chain of models with the least expected time per token.

    The drafters of the file stand from small to large. In the process of each that can verify, all before it are made, too.
    """

    kind: Literal["chain"] = "chain"
    max_levels: Annotated[int, Field(ge=2, le=4)] = 4  # models of a chain, the target included
    hysteresis: Fraction = 0.1  # share of the time per token under which a request stays where it is
    time_weight: Annotated[float, Field(gt=0, le=1)] = 0.1  # of the newest measured pass times (SpecRouter's alpha)
    calm_slots: Count = 40  # without an error or want of memory, after which a chain may be a level longer again
    request_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh its cluster's
    cluster_rounds: Annotated[float, Field(gt=0, le=100_000)] = 50.0  # of a cluster's before they outweigh the drafter's
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    num_clusters: Annotated[int, Field(ge=1, le=64)] = 16  # of like prompts


PolicyConfig = Annotated[
    FixedPolicy | GreedyLengthPolicy | EpsilonGreedyPolicy | LbssPolicy | HedgePolicy | ChainPolicy,
    Field(discriminator="kind"),
]


class CollapseConfig(Section):
    """When what a drafter drafts counts as worthless, and how it comes back."""

    remaining: Annotated[float, Field(gt=0, lt=1)] = 0.1  # of what is usual for it to be right: the collapse to find
    quarantine_s: Seconds = 60  # until it is tried again, twice as long each time that it fails
    max_quarantine_s: Seconds = 600
    trial_places: Count = 2  # requests that may be with it then

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_quarantine_s < self.quarantine_s:
            raise ValueError(
                f"max_quarantine_s ({self.max_quarantine_s}) must be at least quarantine_s ({self.quarantine_s})"
            )
        return self


class RouterConfig(Section):
    """Who rides ahead of whom, and how often that is decided."""

    policy: PolicyConfig = HedgePolicy()
    slot_ms: Annotated[float, Field(ge=10, le=10_000)] = 250
    collapse: CollapseConfig = CollapseConfig()
