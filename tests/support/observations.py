"""Synthetic observations of rounds."""

from router.assignment import Positions


def right_at(num_rounds: int, num_right: int) -> Positions:
    """A number of accepted tokens, in drafts whose lengths differ by one token at most and that then fail."""
    most, rest = divmod(num_right, num_rounds)
    return Positions((num_rounds,) * (most + 1) + (rest,) * bool(rest), (num_rounds,) * most + (rest,) + (0,) * bool(rest))
