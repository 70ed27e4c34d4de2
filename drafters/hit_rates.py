"""Recent hit rates by kind of match: confidences of drafters without probabilities."""

from dataclasses import dataclass


@dataclass(slots=True)
class HitRate:
    """A decayed rate with a prior of ``weight`` trials and a half-life of about 350 trials."""

    rate: float
    weight: float = 8.0

    _LIMIT = 500.0  # trials that the rate remembers at most

    def record(self, hit: bool) -> None:
        self.weight = min(self.weight + 1.0, self._LIMIT)
        self.rate += (float(hit) - self.rate) / self.weight


class HitRates:
    """Rates by match length and position in the draft.

    The first token of a copied draft is uncertain, later ones mostly follow; beyond that the match length matters. Shared by
    all requests of a drafter.

    Args:
        match_lens: the possible match lengths, ascending.
        num_places: positions told apart; later ones share the last.
    """

    _FIRST_PRIOR = 0.3
    _LATER_PRIOR = 0.8

    def __init__(self, match_lens: range, num_places: int = 4) -> None:
        self._num_places = num_places
        self._rates = {
            (match_len, place): HitRate(self._LATER_PRIOR if place else self._FIRST_PRIOR)
            for match_len in match_lens
            for place in range(num_places)
        }

    def at(self, match_len: int, place: int) -> HitRate:
        return self._rates[match_len, min(place, self._num_places - 1)]
