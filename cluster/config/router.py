"""The section ``router``: the policy that assigns drafters to requests."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cluster.config.section import Count, Fraction, Name, Seconds, Section


class FixedPolicy(Section):
    """Always the same chain, or without one the first drafter in the list that has capacity."""

    kind: Literal["fixed"] = "fixed"
    # Drafters, nearest to the target last; each verifies the proposals of the one before it, in the last one's process.
    # []: the target alone.
    chain: tuple[Name, ...] | None = None


class GreedyLengthPolicy(Section):
    """SPIN's baseline: shorter requests get smaller drafters."""

    kind: Literal["greedy-length"] = "greedy-length"


class EpsilonGreedyPolicy(Section):
    """SPIN's baseline: with probability epsilon a random drafter, otherwise the one with the best estimated goodput."""

    kind: Literal["epsilon-greedy"] = "epsilon-greedy"
    epsilon: Fraction = 0.05  # per request and slot
    hysteresis: Fraction = 0.1  # relative gain under which a request stays where it is
    prior_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh the pool's mean
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class LbssPolicy(Section):
    """SPIN's algorithms 1 and 2: explores in chunks of slots, then exploits for twice as long as before."""

    kind: Literal["lbss"] = "lbss"
    exploration_slots: Count = 16  # alpha: slots of an exploration phase
    chunk_slots: Count = 2  # beta: slots that a request keeps a drawn drafter
    longest_exploitation: Count | None = None  # slots; None: doubles with every epoch, as in the paper
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    @model_validator(mode="after")
    def _whole_chunks(self) -> Self:
        if self.exploration_slots % self.chunk_slots:
            slots = f"exploration_slots ({self.exploration_slots})"
            raise ValueError(f"{slots} must be a multiple of chunk_slots ({self.chunk_slots})")
        return self


class HedgePolicy(Section):
    """Full information: estimates per request and drafter, from drafts and counterfactual scores."""

    kind: Literal["hedge"] = "hedge"
    learning_rate: Annotated[float, Field(gt=0, le=1000)] = 10.0  # of the exponential weights, per token and round
    hysteresis: Fraction = 0.05  # relative gain under which a request stays where it is
    exploration: Fraction = 0.01  # share of requests, per slot, that try a drafter with little evidence
    payback_s: Seconds = 5  # within which a switch must recover its cost
    request_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh its cluster's
    cluster_rounds: Annotated[float, Field(gt=0, le=100_000)] = 50.0  # of a cluster's before they outweigh the drafter's
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    num_clusters: Annotated[int, Field(ge=1, le=64)] = 16  # of similar prompts
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


class ChainPolicy(Section):
    """SpecRouter: for each request the chain with the least expected time per token. List drafters from small to large."""

    kind: Literal["chain"] = "chain"
    max_levels: Annotated[int, Field(ge=2, le=4)] = 4  # models of a chain, the target included
    hysteresis: Fraction = 0.1  # relative gain below which a request keeps its chain
    time_weight: Annotated[float, Field(gt=0, le=1)] = 0.1  # of the newest measured pass times (SpecRouter's alpha)
    calm_slots: Count = 40  # slots without errors or eviction after which chains may grow by a level
    request_rounds: Annotated[float, Field(gt=0, le=1000)] = 8.0  # of a request's own before they outweigh its cluster's
    cluster_rounds: Annotated[float, Field(gt=0, le=100_000)] = 50.0  # of a cluster's before they outweigh the drafter's
    memory_rounds: Annotated[float, Field(ge=1, le=1_000_000)] = 1000.0  # rounds after which an observation has faded to 1/e
    num_clusters: Annotated[int, Field(ge=1, le=64)] = 16  # of like prompts


PolicyConfig = Annotated[
    FixedPolicy | GreedyLengthPolicy | EpsilonGreedyPolicy | LbssPolicy | HedgePolicy | ChainPolicy,
    Field(discriminator="kind"),
]


class CollapseConfig(Section):
    """Quarantine of drafters whose acceptance collapses."""

    remaining: Annotated[float, Field(gt=0, lt=1)] = 0.1  # acceptance that counts as collapsed, as a share of the usual
    quarantine_s: Seconds = 60  # until the first trial; doubles with each failure
    max_quarantine_s: Seconds = 600
    trial_places: Count = 2  # concurrent requests during a trial
    at_most = (("quarantine_s", "max_quarantine_s"),)


class RouterConfig(Section):
    """The assignment policy and its period."""

    policy: PolicyConfig = HedgePolicy()
    slot_ms: Annotated[float, Field(ge=10, le=10_000)] = 250
    collapse: CollapseConfig = CollapseConfig()
