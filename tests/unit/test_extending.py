"""The examples of docs/extending.md, executed: two policies and a drafter by their registries, and a draft-length rule.

All of them serve requests here, with the router's slot and the real round, and the tokens stay the target's."""

import re
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DrafterConfig, NgramOptions, PolicyConfig
from drafters.registry import FACTORIES, make_drafter
from router.assignment import PoolMember
from router.cost_model import TableCost
from router.drafter.policies import POLICIES, build_policy
from router.drafter.router import Router, SlotReport
from router.drafting.length import DraftLengths
from router.drafting.policies import VERIFICATION_POLICIES
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.linked_loops import LinkedTarget
from tests.support.requests import a_request
from tests.support.toys import MODEL, ToyTarget, plain_run
from tests.support.verification import a_pass, decoding

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"
REQUESTS = [a_request(f"r{i}", (3, 5, i), max_tokens=20, seed=i, ignore_eos=True) for i in range(4)]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page defines, registered as it says."""
    names: dict[str, Any] = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL):
        exec(block, names)
    monkeypatch.setitem(POLICIES, "alphabetical", names["Alphabetical"])
    monkeypatch.setitem(FACTORIES, "repeat", names["make_repeat"])
    return names


class Served(LinkedTarget):
    """Requests served by a toy target with the page's drafter, `ngram` and the page's policy."""

    def __init__(self, page: dict[str, Any], draft_lengths: DraftLengths | None = None) -> None:
        self.policy: Any = build_policy(PolicyConfig.model_construct(kind="alphabetical"))
        self.router = Router(self.policy, [PoolMember("ngram", 8, 0.001), PoolMember("a-repeat", 8, 0.1)])
        # Nobody drafts until the policy has decided.
        super().__init__(ToyTarget(), TableCost((1, 32), (0.02, 0.03)), lengths=draft_lengths)
        repeat = DrafterConfig.model_construct(name="a-repeat", options=page["RepeatOptions"](), device="cpu")
        ngram = DrafterConfig(name="ngram", options=NgramOptions())
        self.drafters = [self.drafter_loop(one.name, make_drafter(one, MODEL)) for one in (repeat, ngram)]
        self.num_proposed = [0]  # of each commit that verified a draft
        self.output = self._run()

    def _run(self) -> dict[str, tuple[int, ...]]:
        self.submit(*REQUESTS)
        output: dict[str, list[int]] = {request.id: [] for request in REQUESTS}
        unfinished = set(output)
        for turn in range(400):
            self.clock.now_s = turn * 0.01
            self.loop.step(self.clock.now_s)
            for loop in self.drafters:
                while loop.step(self.clock.now_s):
                    pass
            status = self.loop.status()
            report = SlotReport(
                self.loop.requests(),
                self.loop.telemetry.take_observations(),
                status.table_version,
                tuple(name for name, _ in status.followed),
            )
            newer = self.router.slot([report])
            if newer is not None:
                self.loop.publish_table(newer)
            for commit in self.commits():
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
    assert served.loop.telemetry.drafter("a-repeat").num_proposed > 20
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
