"""The router actor of the policy `chain`: its routers also learn what happens within chains."""

from actors.router import RouterActor


class ModelChainScheduler(RouterActor):
    """Runs a `router.slot.Router` with the policy `chain`. If it dies, the last table keeps serving."""
