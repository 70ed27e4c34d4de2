"""Two drafters with equal input must draft equal tokens with bitwise equal confidences."""

from random import Random

from cluster.sampling_params import SamplingParams
from cluster.types import DraftTerms
from drafters.protocol import Demand, Drafter

_REQUESTS = "abcd"
_TEMPERATURES = (0.0, 0.0, 0.3, 1.0, 2.0)
_SALTS = ("", "", "x", "y")
_ROW_PRICES = (0.0, 0.0, 0.05, 0.3, 1.0, 2.0)


class IdenticalDrafters:
    """Runs random requests on both: opened, reopened, drafted for, also ahead, extended, released."""

    def __init__(self, first: Drafter, second: Drafter, rng: Random, vocab_size: int) -> None:
        self._both, self._rng, self._vocab_size = (first, second), rng, vocab_size
        self._drafted: dict[str, list[int]] = {}  # of each followed request, since tokens were committed

    def play(self, num_events: int) -> int:
        """Returns how many tokens were drafted."""
        num_drafted = 0
        for _ in range(num_events):
            draw = self._rng.random()
            if draw < 0.08 or not self._drafted:
                self._open()
            elif draw < 0.11:
                self._release()
            elif draw < 0.5:
                self._extend()
            else:
                num_drafted += self._propose()
        for drafter in self._both:
            drafter.check_integrity()
        return num_drafted

    def _tokens(self, least: int, most: int) -> list[int]:
        """Random tokens, some of them repeated."""
        num = self._rng.randint(least, most)
        period = self._rng.choice((1, 2, 3, 5, num + 1))
        cycle = [self._rng.randrange(self._vocab_size) for _ in range(min(period, max(num, 1)))]
        return [cycle[i % len(cycle)] for i in range(num)]

    def _open(self) -> None:
        request_id, token_ids = self._rng.choice(_REQUESTS), self._tokens(1, 40)
        sampling = SamplingParams(9, temperature=self._rng.choice(_TEMPERATURES), seed=self._rng.getrandbits(64))
        salt = self._rng.choice(_SALTS)
        for drafter in self._both:
            drafter.open(request_id, token_ids, len(token_ids), sampling, salt)
        self._drafted[request_id] = []

    def _release(self) -> None:
        request_id = self._rng.choice(_REQUESTS)
        for drafter in self._both:
            drafter.release(request_id)
        self._drafted.pop(request_id, None)

    def _extend(self) -> None:
        """By a prefix of the draft, and the target's next token."""
        request_id = self._rng.choice(sorted(self._drafted))
        drafted = self._drafted[request_id]
        token_ids = drafted[: self._rng.randint(0, len(drafted))] + self._tokens(0, self._rng.choice((1, 12)))
        for drafter in self._both:
            drafter.extend(request_id, token_ids)
        drafted.clear()

    def _propose(self) -> int:
        demands = []
        for request_id in self._rng.choices(sorted(self._drafted), k=self._rng.randint(0, 4)):
            ahead = self._rng.choice(((), self._tokens(0, 8), self._drafted[request_id], self._drafted[request_id]))
            terms = DraftTerms(row_price=self._rng.choice(_ROW_PRICES))
            demands.append(Demand(request_id, self._rng.randint(0, 9), tuple(ahead), terms))
        wanted, found = (drafter.propose(demands) for drafter in self._both)
        assert found == wanted
        for demand, draft in zip(demands, wanted, strict=True):
            self._drafted[demand.request_id] = [*demand.ahead, *draft.token_ids]
        return sum(len(draft.token_ids) for draft in wanted)
