"""How long drafts take where models ride ahead of models: pass by pass, as `drafters.model` runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.messages import LevelReport, Verified
from router.assignment import Chain, Positions, drafter_of
from router.drafter.chains import LearnedWindow
from simulator.agreement import SimulatedRequest
from simulator.timing import Work

PassSeconds = Callable[[str, int], float]  # of a model, by rows


@dataclass(slots=True)
class _Job:
    """Tokens that a model is to draft of a request."""

    request: SimulatedRequest
    position: int
    num_missing: int


@dataclass(slots=True)
class _Level:
    num_passes: int = 0
    num_rows: int = 0
    busy_s: float = 0.0
    verified: dict[str, Positions] = field(default_factory=dict)  # by proposer
    num_asked: dict[str, int] = field(default_factory=dict)  # tokens, all of which are proposed


class ChainTimer:
    """Each model has a device of its own, but those of one chain wait for each other.

    Requests of a batch with the same models ahead are drafted together. How far a proposer's tokens are what its verifier
    says is in the answers (`Answer.inner`), also where the verifier's own draft has left the answer: it is as likely there.

    Args:
        pass_s: of a model by its rows.
        catch_up_s: of a model, for so many committed tokens of one request.
    """

    def __init__(self, pass_s: PassSeconds, catch_up_s: Callable[[str, int], float]) -> None:
        self._pass_s = pass_s
        self._catch_up_s = catch_up_s
        self._levels: dict[str, _Level] = {}
        self._windows: dict[tuple[str, ...], LearnedWindow] = {}  # by verifier and proposer

    def seconds(self, drafter: str, batch: Sequence[Work]) -> float:
        name = drafter_of(drafter)
        total_s = sum(self._catch_up_s(name, work.num_behind) for work in batch if work.num_behind)
        by_lead: dict[Chain, list[_Job]] = {}
        for work in batch:
            by_lead.setdefault(work.lead, []).append(_Job(work.request, work.position, work.asked))
        return total_s + sum(self._draft_s((*lead, name), jobs) for lead, jobs in by_lead.items())

    def scoring_s(self, drafter: str, num_tokens: int) -> float:
        return self._pass_s(drafter_of(drafter), num_tokens)

    def take_levels(self) -> Sequence[LevelReport]:
        levels, self._levels = self._levels, {}
        return [
            LevelReport(
                name,
                level.num_passes,
                level.num_rows,
                level.busy_s,
                0,
                tuple(
                    Verified(proposer, p.num_reached, p.num_right, level.num_asked[proposer], level.num_asked[proposer])
                    for proposer, p in level.verified.items()
                ),
            )
            for name, level in levels.items()
        ]

    def _draft_s(self, chain: Chain, jobs: Sequence[_Job]) -> float:
        """Of a batch of drafts by the last of a chain, until the longest is done."""
        name = chain[-1]
        total_s = 0.0
        live = [job for job in jobs if job.num_missing > 0]
        while live:
            learned = self._windows.setdefault(chain[-2:], LearnedWindow())
            asked = [min(learned.window, job.num_missing - 1) if chain[:-1] else 0 for job in live]
            below_s = 0.0
            if any(asked):
                below = [_Job(job.request, job.position, num) for job, num in zip(live, asked, strict=True)]
                below_s = self._draft_s(chain[:-1], below)
            pass_s = self._passed_s(name, len(live) + sum(asked))
            total_s += below_s + pass_s
            right = [self._verify(chain, job, num) if num else 0 for job, num in zip(live, asked, strict=True)]
            if below_s:
                learned.learn([one for one in zip(asked, right, strict=True) if one[0]], below_s / max(asked), pass_s)
            for job, num_right in zip(live, right, strict=True):
                job.position += num_right + 1
                job.num_missing -= num_right + 1
            live = [job for job in live if job.num_missing > 0]
        return total_s

    def _passed_s(self, name: str, num_rows: int) -> float:
        seconds = self._pass_s(name, num_rows)
        level = self._levels.setdefault(name, _Level())
        level.num_passes += 1
        level.num_rows += num_rows
        level.busy_s += seconds
        return seconds

    def _verify(self, chain: Chain, job: _Job, num_asked: int) -> int:
        proposer, verifier = drafter_of(chain[-2]), chain[-1]
        right = job.request.answer.inner[proposer, verifier].right
        num_right = min(right[min(job.position, len(right) - 1)], num_asked)
        level = self._levels[verifier]
        level.verified[proposer] = level.verified.get(proposer, Positions()).plus(num_right, num_right < num_asked)
        level.num_asked[proposer] = level.num_asked.get(proposer, 0) + num_asked
        return num_right
