"""What docs/extending.md says is enough: a policy and a drafter of somebody else's, each a file and a line in a registry.

Both serve requests here, through the registries, the router's slot and the real round, and the tokens stay the target's.
"""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest
from pydantic import JsonValue

from cluster.config import DrafterConfig, NgramOptions, Section
from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.transport.base import Mailbox, Received
from cluster.transport.memory import LocalNetwork
from cluster.types import Request, RoutingTable, SamplingParams
from drafters import registry
from drafters.loop import DrafterLoop
from drafters.protocol import Capabilities, Demand, Draft, Drafter
from drafters.registry import Site, make_drafter
from engine.round import TargetLoop
from router.assignment import TARGET_ONLY, Chain, Observation, PoolMember, RequestView, ScoreCounts
from router.cost_model import TableCost
from router.policies import POLICIES, build_policy
from router.policies.free_capacity import FreeCapacity
from router.slot import Router, SlotReport
from tests.support.toys import MODEL, VOCAB_SIZE, ToyTarget, choose, plain_run

TARGET = "memory://target"
DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


# ---- a policy: its options, and a class with four methods


class AlphabeticalPolicy(Section):
    """The options of a policy."""

    kind: Literal["alphabetical"] = "alphabetical"


class Alphabetical:
    """The drafter whose name comes first."""

    def __init__(self, config: AlphabeticalPolicy) -> None:
        self.num_seen = 0

    def observe(self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = ()) -> None:
        self.num_seen += sum(seen.num_accepted for seen in observations)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        room = FreeCapacity(sorted(pool, key=lambda member: member.name))
        return {
            request.request_id: next(
                (seat for drafter in room.drafters if (seat := room.seat(drafter, request.chain)) is not None), TARGET_ONLY
            )
            for request in requests
        }

    def snapshot(self) -> JsonValue:
        return None

    def restore(self, snapshot: JsonValue) -> None:
        """There is nothing to restore."""


# ---- a drafter: its options, a class with five methods, and what makes one


class OracleOptions(Section):
    """The options of a drafter."""

    kind: Literal["oracle"] = "oracle"


class Oracle:
    """Knows the toy target's rule."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self._followed: dict[str, tuple[list[int], SamplingParams]] = {}

    def open(self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._followed[request_id] = (list(token_ids), sampling)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._followed[request_id][0].extend(token_ids)

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def check_integrity(self) -> None:
        assert all(token_ids for token_ids, _ in self._followed.values())

    def _draft(self, demand: Demand) -> Draft:
        token_ids, sampling = self._followed[demand.request_id]
        known = [*token_ids, *demand.ahead]
        drafts: list[int] = []
        for _ in range(demand.num_tokens):
            drafts.append(choose([*known, *drafts], sampling))
        return Draft(demand.request_id, tuple(drafts), (1.0,) * len(drafts))


def make_oracle(options: OracleOptions, site: Site) -> Drafter:
    return Oracle()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two lines."""
    monkeypatch.setitem(POLICIES, "alphabetical", Alphabetical)
    monkeypatch.setitem(registry.FACTORIES, "oracle", make_oracle)  # type: ignore[arg-type]


def test_a_policy_and_a_drafter_of_somebody_elses_serve(registered: None) -> None:
    policy = build_policy(AlphabeticalPolicy())  # type: ignore[arg-type]
    assert isinstance(policy, Alphabetical)
    pool = [PoolMember("ngram", 8, 0.001), PoolMember("a-oracle", 8, 0.1)]
    router = Router(policy, pool)
    network, mailbox, gateway_mailbox = LocalNetwork(), Mailbox(), Mailbox()
    hello = Hello(Role.TARGET, "target", VOCAB_SIZE, MODEL.tokenizer_fingerprint)
    network.listen(TARGET, mailbox, hello)
    table = RoutingTable(version=0, defaults=((),))  # nobody drafts until the policy has spoken
    target = TargetLoop(ToyTarget(), MODEL, mailbox, TableCost((1, 32), (0.02, 0.03)), time.monotonic, table=table)

    def linked(name: str, drafter: Drafter) -> DrafterLoop:
        own = Mailbox()
        network.connect(TARGET, own, Hello(Role.DRAFTER, name, VOCAB_SIZE, MODEL.tokenizer_fingerprint))
        return DrafterLoop(name, drafter, own)

    oracle = make_drafter(DrafterConfig.model_construct(name="a-oracle", options=OracleOptions(), device="cpu"), MODEL)
    drafters = [
        linked("a-oracle", oracle),
        linked("ngram", make_drafter(DrafterConfig(name="ngram", options=NgramOptions()), MODEL)),
    ]
    gateway = network.connect(TARGET, gateway_mailbox, Hello(Role.GATEWAY, "api", VOCAB_SIZE, MODEL.tokenizer_fingerprint))
    requests = [Request(f"r{i}", (3, 5, i), SamplingParams(max_tokens=20, seed=i, ignore_eos=True), 0.0) for i in range(4)]
    gateway.send(SubmitRound(submits=tuple(requests)))
    output: dict[str, list[int]] = {request.id: [] for request in requests}
    unfinished = set(output)
    for turn in range(400):
        now_s = turn * 0.01
        target.step(now_s)
        for loop in drafters:
            while loop.step(now_s):
                pass
        status = target.status()
        linked_names = tuple(name for name, _ in status.followed)
        newer = router.slot([SlotReport(target.requests(), target.take_observations(), status.table_version, linked_names)])
        if newer is not None:
            target.publish_table(newer)
        for event in gateway_mailbox.drain():
            if isinstance(event, Received) and isinstance(event.message, CommitRound):
                for commit in event.message.commits:
                    output[commit.request_id].extend(commit.token_ids)
                    if commit.finish is not None:
                        unfinished.discard(commit.request_id)
        if not unfinished:
            break
    assert not unfinished
    assert {request.id: tuple(output[request.id]) for request in requests} == {r.id: plain_run(r) for r in requests}
    assert policy.num_seen > 20  # of its own choice, and of what that choice drafted
    assert target.telemetry.drafter("a-oracle").num_accepted == target.telemetry.drafter("a-oracle").num_proposed > 20


def test_the_document_names_files_that_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", text)) - {"router/policies/NAME.py", "drafters/NAME.py"}
    assert {"router/policies/__init__.py", "drafters/registry.py", "tests/unit/test_extending.py"} <= named
    missing = [name for name in named if not (DOCUMENT.parents[1] / name).exists()]
    assert missing == []
