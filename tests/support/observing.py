"""Observations of made-up rounds."""

from router.assignment import Positions


def right_at(num_rounds: int, num_right: int) -> Positions:
    """So many tokens right in all, in drafts that differ by one token at the most and then fail."""
    most, rest = divmod(num_right, num_rounds)
    return Positions((num_rounds,) * (most + 1) + (rest,) * bool(rest), (num_rounds,) * most + (rest,) + (0,) * bool(rest))
