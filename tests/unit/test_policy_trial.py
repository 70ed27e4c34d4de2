"""Another routing policy for a limited time: the router's part, and who may ask for it."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.router import RouterActor
from cluster.config import Config, DrafterConfig, NgramOptions, PolicyConfig, RouterConfig
from cluster.errors import LinkClosed
from cluster.types import RoutingTable
from router.assignment import RequestView
from router.drafter.policies import build_policy, build_pool
from router.drafter.router import Router, SlotReport
from tests.support.api import app_of, client_of, model_info, saying
from tests.support.scripted import ScriptedClient

PATH = "/v1/outrider/policy"
OPERATOR = {"authorization": "Bearer sk-operator"}


class OneTarget:
    """A target with one request, which notes the tables that it gets, and what the router said of itself then."""

    def __init__(self, actor_of: Any, names: tuple[str, ...]) -> None:
        self.tables: list[tuple[RoutingTable, str]] = []
        self._actor_of, self._names = actor_of, names

    def reports(self, deadline_s: float) -> list[SlotReport]:
        version = self.tables[-1][0].version if self.tables else 0
        return [SlotReport((RequestView("a", 4, 9, ()),), (), version, self._names)]

    def publish(self, table: RoutingTable) -> None:
        self.tables.append((table, self._actor_of().report().policy))

    def set_names(self, names: Sequence[str]) -> None: ...


def test_the_configured_policy_returns_when_the_trial_is_over() -> None:
    config = Config(
        drafters=(DrafterConfig(name="ngram", options=NgramOptions()),),
        router=RouterConfig(policy=PolicyConfig(kind="fixed", chain=("ngram",))),
    )
    target = OneTarget(lambda: actor, ("ngram",))
    actor = RouterActor(config, Router(build_policy(config.router.policy), build_pool(config)), target, slot_s=0.01)
    now_s = 0.0
    stop = threading.Event()
    off = PolicyConfig(kind="fixed", chain=())
    steps: dict[int, tuple[PolicyConfig | None, float]] = {
        2: (off, 3.0),
        8: (PolicyConfig(kind="hedge"), 1e6),
        9: (None, 0.0),
    }

    def clock() -> float:
        """Of the slots: a second each time that a slot begins and ends."""
        nonlocal now_s
        now_s += 0.5
        if now_s == int(now_s):
            if asked := steps.get(int(now_s)):
                assert actor.try_policy(*asked)
            if now_s >= 12:
                stop.set()
        return now_s

    actor.run(stop, clock)
    chains = [table.chains["a"] for table, _ in target.tables]
    assert chains[:3] == [("ngram",), (), ("ngram",)], "the file's policy, the trial, the file's again"
    assert chains[-1] == ("ngram",)
    assert target.tables[-1][1] == "fixed"
    report = actor.report()
    assert report.trial_left_s is None


async def _ask(cluster: Any, body: dict[str, object] | None, headers: dict[str, str], folder: Path, **given: Any) -> Any:
    (folder / "keys").write_text("sk-user\n")
    (folder / "operators").write_text("sk-operator\n")
    files = {"api_keys_file": folder / "keys", "operator_keys_file": folder / "operators"} | given.pop("files", {})
    client = ScriptedClient(model_info(), saying("the answer"))
    app = app_of(client, try_policy=cluster, **files)
    async with client_of(app) as http:
        if body is None:
            return await http.get("/v1/outrider/status", headers=headers)
        return await http.post(PATH, json=body, headers=headers)


async def test_only_operators_switch_and_only_what_they_saw(tmp_path: Path) -> None:
    asked: list[tuple[PolicyConfig | None, float]] = []

    async def cluster(policy: PolicyConfig | None, for_s: float) -> bool:
        asked.append((policy, for_s))
        return True

    body: dict[str, object] = {"policy": "off", "instead_of": "scripted", "for_s": 60.0}
    for headers, status in (({}, 401), ({"authorization": "Bearer sk-user"}, 401), (OPERATOR, 200)):
        response = await _ask(cluster, body, headers, tmp_path)
        assert response.status_code == status
    assert asked == [(PolicyConfig(kind="fixed", chain=()), 60.0)]
    assert (await _ask(cluster, None, OPERATOR, tmp_path)).status_code == 200, "an operator may read, too"
    refused = await _ask(cluster, {**body, "instead_of": "hedge"}, OPERATOR, tmp_path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "policy_changed")
    for wrong in ({"for_s": 1.0}, {"for_s": 1e9}, {"policy": "chain"}, {"policy": ["off"]}):
        refused = await _ask(cluster, {**body, **wrong}, OPERATOR, tmp_path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert len(asked) == 1
    await _ask(cluster, {"policy": None, "instead_of": "scripted"}, OPERATOR, tmp_path)
    assert asked[-1][0] is None


async def test_without_operators_nobody_switches(tmp_path: Path) -> None:
    async def cluster(policy: PolicyConfig | None, for_s: float) -> bool:
        pytest.fail("nobody may")

    body: dict[str, object] = {"policy": "off", "instead_of": "scripted"}
    for headers in ({}, OPERATOR):
        response = await _ask(cluster, body, headers, tmp_path, files={"operator_keys_file": None, "api_keys_file": None})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "no_operators")


async def test_a_router_that_is_away_is_a_503(tmp_path: Path) -> None:
    async def away(policy: PolicyConfig | None, for_s: float) -> bool:
        return False

    async def gone(policy: PolicyConfig | None, for_s: float) -> bool:
        raise LinkClosed("the supervisor does not answer")

    for cluster in (away, gone):
        response = await _ask(cluster, {"policy": "hedge", "instead_of": "scripted"}, OPERATOR, tmp_path)
        assert response.status_code == 503
