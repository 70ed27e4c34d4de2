"""Prior costs of drafters by kind: they hold until a profile or serving has measured them."""

from cluster.config import DEFAULT_DRAFT_LEN, CascadeOptions, DrafterOptions

# Of one draft of DEFAULT_DRAFT_LEN tokens, in one-row steps of the target.
DRAFT_STEPS = {"ngram": 0.008, "suffix": 0.016, "table": 0.008, "vllm": 0.35, "layers": 0.35, "model": 1.0}
_ON_HIDDEN_STATES = 0.15


def prior_draft_cost(options: DrafterOptions) -> float:
    """Of one draft, in one-row steps of the target; a cascade counts as its most expensive member."""
    if isinstance(options, CascadeOptions):
        return max(map(prior_draft_cost, options.members))
    return DRAFT_STEPS.get(options.kind, _ON_HIDDEN_STATES)


def prior_token_cost(options: DrafterOptions) -> float:
    """Of one draft token, as of ``PoolMember.cost``."""
    return prior_draft_cost(options) / DEFAULT_DRAFT_LEN


def prior_member_cost(options: DrafterOptions) -> float:
    """Of one draft of a cascade's member; 0 for lookups, which are queried every time."""
    return prior_draft_cost(options) if options.traits.has_model else 0.0
