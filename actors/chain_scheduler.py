"""The router of the policy `chain`, in a process of its own: it hears what happens within chains, and publishes those."""

from actors.router import RouterActor


class ModelChainScheduler(RouterActor):
    """Runs a `router.slot.ChainScheduler` against the targets. Like a router it may die at any time: the last table serves
    on."""
