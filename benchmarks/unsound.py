"""Invalid messages of every type, drawn by a seeded generator.

Many pass the first checks: known ids, small tokens, equal lengths.
"""

import random
from math import inf, nan

from cluster.messages import (
    Budget,
    CommitRound,
    DraftRound,
    DraftScore,
    Extend,
    LevelReport,
    Message,
    Open,
    ProposalRound,
    SubmitRound,
    Verified,
)
from cluster.sampling_params import SamplingParams
from cluster.types import Commit, DraftTerms, FinishReason, Proposal, Request, Slo, TokenLogprobs

LARGE = (2**31 - 1, 2**32 - 1, 2**20, 10**6)


class Unsound:
    """Draws messages about ``request_ids``, which may grow, in the name of ``drafter``."""

    def __init__(self, seed: int, request_ids: list[str], drafter: str, vocab_size: int) -> None:
        self._rng = random.Random(seed)
        self._request_ids = request_ids
        self._drafter = drafter
        self._vocab_size = vocab_size

    def proposal_round(self) -> ProposalRound:
        return ProposalRound(
            self._rng.choice((0, 1, 2**64 - 1)),
            self._some(self._proposal),
            self._some(lambda: DraftScore(self._id(), self._int(), self._int(), self._int())),
            self._some(self._id),
            self._some(self._level),
        )

    def draft_round(self) -> DraftRound:
        return DraftRound(
            self._rng.choice((0, 1, 2**64 - 1)),
            self._some(self._open),
            self._some(lambda: Extend(self._id(), self._int(), self._tokens())),
            self._some(lambda: Budget(self._id(), DraftTerms(self._int(), self._float()))),
            self._some(self._id),
        )

    def submit_round(self) -> SubmitRound:
        return SubmitRound(self._some(self._request), self._some(self._id))

    def commit_round(self) -> CommitRound:
        return CommitRound(self._some(self._commit))

    def any_round(self) -> Message:
        return self._rng.choice((self.proposal_round, self.draft_round, self.submit_round, self.commit_round))()

    def _some(self, draw: object) -> tuple:  # type: ignore[type-arg]
        parts = [draw() for _ in range(self._rng.choice((0, 0, 1, 1, 2, 5)))]  # type: ignore[operator]
        return tuple(parts + parts[:1] if self._rng.random() < 0.2 else parts)  # the same twice

    def _int(self) -> int:
        return self._rng.choice((0, 1, 2, 3, 5, 8, 13, 40, self._rng.choice(LARGE)))

    def _float(self) -> float:
        return self._rng.choice((0.0, 0.5, 1.0, self._rng.random(), -1.0, 1e300, nan, inf, -inf))

    def _id(self) -> str:
        known = self._request_ids or ["nobody's"]
        return self._rng.choice((*known, *known, *known, "nobody's", "", "x" * 10_000, "\0"))

    def _name(self) -> str:
        return self._rng.choice((self._drafter, self._drafter, "stranger", "", "y" * 10_000))

    def _tokens(self) -> tuple[int, ...]:
        num = self._rng.choice((0, 1, 1, 2, 4, 8, 200))
        low = 0 if self._rng.random() < 0.8 else self._vocab_size
        high = self._vocab_size - 1 if self._rng.random() < 0.8 else 2**32 - 1
        return tuple(self._rng.randint(low, max(low, high)) for _ in range(num))

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            max_tokens=rng.choice((1, 4, 16, 2**31 - 1)),
            temperature=rng.choice((0.0, 0.7)),
            logit_bias=rng.choice(((), ((3, 5.0),), ((2**32 - 1, 5.0),))),
            stop_token_ids=rng.choice(((), (1,), (2**32 - 1, 1), (self._vocab_size,))),
            seed=rng.choice((0, 2**64 - 1)),
            top_logprobs=rng.choice((None, 0, 20)),
        )

    def _proposal(self) -> Proposal:
        tokens = self._tokens()
        num = len(tokens) if self._rng.random() < 0.8 else self._int() % 100
        confidences = tuple(self._rng.random() if self._rng.random() < 0.9 else self._float() for _ in range(num))
        return Proposal(self._id(), self._int(), tokens, confidences, self._name(), self._rng.random() < 0.5)

    def _level(self) -> LevelReport:
        verified = self._some(
            lambda: Verified(
                self._name(),
                tuple(self._int() for _ in range(self._rng.choice((0, 1, 4, 4, 100)))),
                tuple(self._int() for _ in range(self._rng.choice((0, 1, 4, 4, 100)))),
                self._int(),
                self._int(),
                self._int(),
                self._float(),
            )
        )
        return LevelReport(self._name(), self._int(), self._int(), self._float(), self._int(), verified)

    def _open(self) -> Open:
        return Open(self._id(), self._tokens(), self._int(), self._sampling(), self._some(self._name))

    def _request(self) -> Request:
        ttft_s, tpot_s = (self._rng.choice((None, self._float())) for _ in range(2))
        slo = Slo(ttft_s, tpot_s, self._rng.choice((None, self._name())))
        chain = self._rng.choice((None, (), (self._drafter,), ("stranger",) * 9, ("",)))
        output = self._rng.choice(((), self._tokens()))
        return Request(self._id(), self._tokens(), self._sampling(), self._float(), slo, chain, output)

    def _commit(self) -> Commit:
        tokens = self._tokens()
        num = self._rng.choice((0, 0, len(tokens), 3))
        logprobs = tuple(TokenLogprobs(self._float(), ((self._int(), self._float()),)) for _ in range(num))
        return Commit(
            self._id(),
            self._int(),
            tokens,
            self._int(),
            self._int(),
            self._rng.choice((None, self._name())),
            logprobs,
            self._rng.choice((None, None, *FinishReason)),
            self._rng.choice((None, "a reason")),
        )
