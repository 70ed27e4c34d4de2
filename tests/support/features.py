"""Hidden states of one request."""

from torch import Tensor

from drafters.hidden_states.features import Features
from engine.target import FeatureSource, FeatureSpan


def rows_of(source: FeatureSource | Features, request_id: str, start: int, stop: int) -> Tensor:
    """[stop - start, width]. Raises LookupError: they cannot be read."""
    (held,), rows = source.read_hidden_states([FeatureSpan(request_id, start, stop)])
    if not held:
        raise LookupError(request_id)
    return rows
