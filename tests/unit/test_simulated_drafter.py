"""The simulator's drafter: what it says of its drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.messages import LevelReport
from simulator.agreement import Agreement, Answer, SimulatedRequest
from simulator.drafter import News, SimulatedDrafter, SimulatedProposal
from simulator.events import Events
from simulator.timing import Jitter, Work

JITTER = Jitter(0.0, np.random.default_rng(0))  # none


@dataclass
class _Target:
    heard: list[SimulatedProposal] = field(default_factory=list)

    def hear(self, proposals: list[SimulatedProposal]) -> None:
        self.heard += proposals


class _Second:
    """What each batch of drafts takes."""

    def seconds(self, drafter: str, batch: Sequence[Work]) -> float:
        return 1.0

    def take_levels(self) -> Sequence[LevelReport]:
        return ()


def test_the_rest_of_a_draft_that_ended_of_its_own_accord_is_still_its_end() -> None:
    for num_drafted, unfinished in ((3, False), (6, True)):
        drafted = bytes([num_drafted] * 20)
        request = SimulatedRequest("a", 0.0, 10, 20, Answer(20, {"d": Agreement(drafted, drafted, flat=(0.5,) * 6)}))
        events, target = Events(), _Target()
        drafter = SimulatedDrafter(events, "d", _Second(), JITTER, capacity=1, max_draft_len=6)
        drafter.tell(target, News({"a": (request, 0)}, {}, {}, set(), 6))
        events.run(0.5)
        drafter.tell(target, News({}, {}, {"a": 1}, set(), 6))  # while it drafts
        events.run(1.5)
        assert [(p.base, p.num_tokens, p.unfinished) for p in target.heard] == [(1, num_drafted - 1, unfinished)]
