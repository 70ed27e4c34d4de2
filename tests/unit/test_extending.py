"""The examples of docs/extending.md, executed: two policies and a drafter by their registries, and a draft-length rule.

All of them serve requests here, with the router's slot and the real round, and the tokens stay the target's.
"""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DrafterConfig, NgramOptions, PolicyConfig
from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.transport.base import Mailbox, Received
from cluster.transport.memory import LocalNetwork
from cluster.types import Request, RoutingTable
from drafters.loop import DrafterLoop
from drafters.protocol import Drafter
from drafters.registry import FACTORIES, make_drafter
from engine.round import DrafterPool, Policies, TargetLoop
from router.assignment import PoolMember
from router.cost_model import TableCost
from router.drafter.policies import POLICIES, build_policy
from router.drafter.router import Router, SlotReport
from router.drafting.length import DraftLengths
from router.drafting.policies import VERIFICATION_POLICIES
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.toys import MODEL, VOCAB_SIZE, ToyTarget, plain_run
from tests.support.verification import a_pass, decoding

TARGET = "memory://target"
DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"
REQUESTS = [Request(f"r{i}", (3, 5, i), SamplingParams(max_tokens=20, seed=i, ignore_eos=True), 0.0) for i in range(4)]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page defines, registered as it says."""
    names: dict[str, Any] = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL):
        exec(block, names)
    monkeypatch.setitem(POLICIES, "alphabetical", names["Alphabetical"])
    monkeypatch.setitem(FACTORIES, "repeat", names["make_repeat"])
    return names


class Served:
    """Requests served by a toy target with the page's drafter, `ngram` and the page's policy."""

    def __init__(self, page: dict[str, Any], draft_lengths: DraftLengths | None = None) -> None:
        self.policy: Any = build_policy(PolicyConfig.model_construct(kind="alphabetical"))
        self.router = Router(self.policy, [PoolMember("ngram", 8, 0.001), PoolMember("a-repeat", 8, 0.1)])
        self.network, self.mailbox = LocalNetwork(), Mailbox()
        self.network.listen(TARGET, self.mailbox, self._hello(Role.TARGET, "target"))
        table = RoutingTable(version=0, defaults=((),))  # nobody drafts until the policy has decided
        cost = TableCost((1, 32), (0.02, 0.03))
        self.target = TargetLoop(
            ToyTarget(),
            MODEL,
            self.mailbox,
            cost,
            time.monotonic,
            Policies(draft_lengths=draft_lengths or DraftLengths()),
            DrafterPool(table),
        )
        repeat = DrafterConfig.model_construct(name="a-repeat", options=page["RepeatOptions"](), device="cpu")
        self.drafters = [
            self._linked("a-repeat", make_drafter(repeat, MODEL)),
            self._linked("ngram", make_drafter(DrafterConfig(name="ngram", options=NgramOptions()), MODEL)),
        ]
        self.num_proposed = [0]  # of each commit that verified a draft
        self.output = self._run()

    def _hello(self, role: Role, name: str) -> Hello:
        return Hello(role, name, VOCAB_SIZE, MODEL.tokenizer_fingerprint)

    def _linked(self, name: str, drafter: Drafter) -> DrafterLoop:
        own = Mailbox()
        self.network.connect(TARGET, own, self._hello(Role.DRAFTER, name))
        return DrafterLoop(name, drafter, own)

    def _run(self) -> dict[str, tuple[int, ...]]:
        mailbox = Mailbox()
        self.network.connect(TARGET, mailbox, self._hello(Role.GATEWAY, "api")).send(SubmitRound(submits=tuple(REQUESTS)))
        output: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
        unfinished = set(output)
        for turn in range(400):
            self.target.step(turn * 0.01)
            for loop in self.drafters:
                while loop.step(turn * 0.01):
                    pass
            status = self.target.status()
            report = SlotReport(
                self.target.requests(),
                self.target.telemetry.take_observations(),
                status.table_version,
                tuple(name for name, _ in status.followed),
            )
            newer = self.router.slot([report])
            if newer is not None:
                self.target.publish_table(newer)
            for event in mailbox.drain():
                if isinstance(event, Received) and isinstance(event.message, CommitRound):
                    for commit in event.message.commits:
                        output[commit.request_id].extend(commit.token_ids)
                        self.num_proposed.append(commit.num_proposed)
                        if commit.finish is not None:
                            unfinished.discard(commit.request_id)
            if not unfinished:
                return {name: tuple(token_ids) for name, token_ids in output.items()}
        raise AssertionError(f"{unfinished} did not finish")


def test_the_policy_and_the_drafter_of_the_page_serve(page: dict[str, Any]) -> None:
    served = Served(page)
    assert served.output == {request.id: plain_run(request) for request in REQUESTS}
    assert served.policy.num_rounds > 20
    assert served.target.telemetry.drafter("a-repeat").num_proposed > 20
    assert max(served.num_proposed) > 2


def test_the_draft_length_rule_of_the_page_is_kept(page: dict[str, Any]) -> None:
    served = Served(page, page["AtMostTwo"]())
    assert served.output == {request.id: plain_run(request) for request in REQUESTS}
    assert max(served.num_proposed) == 2


def test_the_verification_policy_of_the_page_decides(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFICATION_POLICIES, "at-most-three", page["AtMostThree"])
    batch, context = [decoding("a", (0.9, 0.8, 0.7, 0.6, 0.5))], a_pass(TableCost((1, 32), (0.02, 0.03)))

    def num_verified(policy: str) -> int:
        planner = StepPlanner(PlannerSettings(policy))
        plan = planner.plan(batch, context)
        return plan.spans[0].num_drafts

    assert [num_verified(policy) for policy in ("outrider", "at-most-three")] == [5, 3]
