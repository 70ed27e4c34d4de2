"""The assignment policies by the names that the configuration knows them by, and the pool that they assign to."""

from collections.abc import Callable

from cluster.config import Config, PolicyConfig, lookups_in_pool
from router.assignment import (
    AssignmentPolicy,
    MemberCosts,
    PoolMember,
    Scored,
    everybody,
    member_name,
    nobody,
    prior_token_cost,
    without_lookups,
)
from router.cost_model import CostModel
from router.drafter.epsilon_greedy import EpsilonGreedy
from router.drafter.seats import Fixed
from router.papers.not_a_bandit import Hedge
from router.papers.specrouter import ModelChains
from router.papers.spin import GreedyLength, Lbss

# Made with the parameters of the configuration.
POLICIES: dict[str, Callable[..., AssignmentPolicy]] = {
    "fixed": Fixed,
    "greedy-length": GreedyLength,
    "epsilon-greedy": EpsilonGreedy,
    "lbss": Lbss,
    "hedge": Hedge,
    "chain": ModelChains,
}

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CATCH_UP_LEN = 513


# Those that keep drafters in step; `lbss` for its switches alone, it ignores scores.
SCORED: dict[str, Scored] = {"hedge": without_lookups, "chain": everybody, "lbss": everybody}


def scored_by(config: PolicyConfig) -> Scored:
    return SCORED.get(config.kind, nobody)


def build_policy(config: PolicyConfig) -> AssignmentPolicy:
    chain = {"chain": config.chain} if config.kind == "fixed" else {}
    return POLICIES[config.kind](**chain, **config.parameters)


def build_pool(config: Config) -> tuple[PoolMember, ...]:
    """Every replica that there may be of every drafter, all healthy, in the order of the file."""
    return tuple(
        PoolMember(
            member_name(drafter.name, replica),
            drafter.capacity,
            prior_token_cost(drafter.options),
            max_draft_len=drafter.max_draft_len,
            verifies=drafter.options.traits.can_verify,
            leads=not drafter.is_colocated,
            lookups=lookups_in_pool(drafter, config.drafters),
        )
        for drafter in config.drafters
        for replica in range(drafter.most)
    )


def member_costs(config: Config, cost: CostModel) -> dict[str, MemberCosts]:
    """What was measured of drafters, by their names in the configuration; those that were not are missing."""
    found = {}
    for drafter in config.drafters:
        draft_s = [(batch, cost.draft_s(drafter.name, batch, drafter.max_draft_len)) for batch in _BATCHES]
        measured = tuple((batch, seconds) for batch, seconds in draft_s if seconds is not None)
        one, many = (cost.catch_up_s(drafter.name, num_tokens) for num_tokens in (1, _CATCH_UP_LEN))
        if measured and one is not None and many is not None:
            per_token_s = max(0.0, many - one) / (_CATCH_UP_LEN - 1)
            found[drafter.name] = MemberCosts(measured, per_token_s, max(0.0, one - per_token_s))
    return found
