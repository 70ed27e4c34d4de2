"""A drafter elsewhere that drafts for an unchanged vLLM server: on a virtual clock, and over gRPC."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from actors.drafter import DrafterActor
from cluster.config import Config, DrafterConfig, HiddenStateOptions, SuffixOptions
from cluster.errors import InvalidField
from cluster.messages import Hello, Role
from cluster.sampling_params import SamplingParams
from cluster.transport.base import Link, LinkDown, Mailbox
from cluster.transport.memory import LocalNetwork
from cluster.types import ModelInfo
from deploy.drafter import serve_drafter
from drafters.loop import DrafterLoop, StepWork
from drafters.protocol import Capabilities, Demand, Draft
from drafters.vllm_plugin import PoolProposer
from drafters.vllm_plugin import proposer as proposers
from drafters.vllm_plugin.elsewhere import URL_SETTING, DraftersElsewhere, dialled
from drafters.vllm_plugin.proposer import SETTING
from tests.support.certificates import Authority
from tests.support.vllm_batch import MAX_MODEL_LEN, PASS_S, VOCAB, Batch, next_token, vllm_config
from tests.support.waiting import eventually

HOLD_S = 0.05  # the longest
TARGET = ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, (), "")
PROMPTS = {name: [ord(name) % VOCAB, *range(2, 30)] for name in "abc"}
POOR_LOOKUP = '{"kind": "ngram", "min_match_len": 20, "max_match_len": 20}'


class Oracle:
    """Drafts what the target would choose."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        self.texts[request_id] = list(token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id] += token_ids

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [self._draft(demand) for demand in demands]

    def release(self, request_id: str) -> None:
        del self.texts[request_id]

    def check_integrity(self) -> None: ...

    def _draft(self, demand: Demand) -> Draft:
        text = [*self.texts[demand.request_id], *demand.ahead]
        for _ in range(demand.num_tokens):
            text.append(next_token(text))
        return Draft(demand.request_id, tuple(text[len(text) - demand.num_tokens :]), (0.9,) * demand.num_tokens)


class Elsewhere:
    """A drafter whose every batch takes ``draft_s``, on the clock of the server's passes. ``hangs``: it does nothing."""

    def __init__(self, draft_s: float) -> None:
        self.now_s, self.draft_s, self.hangs = 0.0, draft_s, False
        self.server = _ServerMailbox(self)
        self._mailbox, self._network = Mailbox(), LocalNetwork()
        self._loop = DrafterLoop("oracle", Oracle(), self._mailbox)
        self._network.listen("memory://oracle", self._mailbox, Hello(Role.DRAFTER, "oracle", VOCAB, ""))
        self._work: tuple[StepWork, float, float] | None = None  # with when it began and ends
        self.link()

    def link(self) -> None:
        self._end: Link = self._network.connect("memory://oracle", self.server, Hello(Role.TARGET, "vllm", VOCAB, ""))

    def die(self) -> None:
        self._end.close()
        self.server.put(LinkDown(self._end, "it died"))

    def work_until(self, end_s: float, stops: Callable[[], bool] = lambda: False) -> None:
        """Moves the clock to ``end_s``, or to when ``stops`` becomes true."""
        while not self.hangs:
            if self._work is None:
                kind = self._loop.begin(self.now_s)
                if kind == "nothing":
                    break
                self._work = kind, self.now_s, self.now_s + (self.draft_s if kind.startswith("drafted") else 0.0)
            kind, began_s, due_s = self._work
            if due_s > end_s:
                break
            self.now_s, self._work = max(self.now_s, due_s), None
            self._loop.finish(kind, began_s, self.now_s)
            if stops():
                return
        self.now_s = end_s


class _ServerMailbox(Mailbox):
    def __init__(self, elsewhere: Elsewhere) -> None:
        super().__init__()
        self._elsewhere, self.waited_s = elsewhere, 0.0

    def wait(self, timeout_s: float) -> bool:
        began_s = self._elsewhere.now_s
        self._elsewhere.work_until(began_s + timeout_s, lambda: super(_ServerMailbox, self).wait(0.0))
        self.waited_s += self._elsewhere.now_s - began_s
        return super().wait(0.0)


@pytest.fixture(autouse=True)
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposers, "_fingerprint_of", lambda tokenizer: "")


@pytest.fixture
def repetitive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups draft well, too."""
    monkeypatch.setattr("tests.support.vllm_batch.next_token", lambda token_ids: token_ids[-7])


class Server:
    """vLLM's, with requests that end when they are told to. ``elsewhere`` None: without the drafter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, elsewhere: Elsewhere | None, lookup: str = POOR_LOOKUP) -> None:
        monkeypatch.setenv(SETTING, lookup)
        if elsewhere is not None:
            monkeypatch.setenv(URL_SETTING, "grpc://elsewhere:1")
            monkeypatch.setattr(proposers, "dialled", lambda url, target: elsewhere.server)
        self._clock = elsewhere or Elsewhere(0.0)
        self.proposer = PoolProposer(vllm_config(), lambda: self._clock.now_s)
        self.batch = Batch(self._propose)
        for name, prompt in PROMPTS.items():
            self.batch.add(name, prompt)

    @property
    def drafts(self) -> DraftersElsewhere:
        drafter = self.proposer._drafter
        assert isinstance(drafter, DraftersElsewhere)
        return drafter

    def run(self, num_passes: int) -> int:
        """Returns the draft tokens that were accepted. The requests start anew where they would become too long."""
        before = self.batch.num_accepted
        for _ in range(num_passes):
            self.batch.run()
            self.proposer.check_integrity()
            for name in list(self.batch.rows):
                if len(self.batch.texts[name]) > MAX_MODEL_LEN - 20:
                    self.batch.remove(name)
                    self.batch.texts[name] = list(PROMPTS[name])
                    self.batch.add(name)
        return self.batch.num_accepted - before

    def _propose(self, *arguments: Any) -> list[list[int]]:
        self._clock.work_until(self._clock.now_s + PASS_S)
        return self.proposer.propose(*arguments)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> int:
    """Draft tokens that the lookup here gets accepted in 100 passes."""
    return Server(monkeypatch, None).run(100)


def test_its_drafts_are_verified_and_waited_for(plain: int, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(0.2 * PASS_S)
    server = Server(monkeypatch, elsewhere)
    assert server.run(100) > 10 * plain + 1000
    waited_s = elsewhere.server.waited_s
    assert 10 * 0.2 * PASS_S < waited_s < 101 * 0.2 * PASS_S
    stats = server.drafts.telemetry.drafter("oracle")
    assert stats.num_late == 0
    assert stats.view.acceptance > 0.95


def test_a_slow_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(1.5 * HOLD_S)
    server = Server(monkeypatch, elsewhere)
    server.run(100)
    assert elsewhere.server.waited_s < HOLD_S, "all passes together"


@pytest.mark.parametrize("fails", [Elsewhere.die, lambda elsewhere: setattr(elsewhere, "hangs", True)])
def test_one_that_fails_costs_its_drafts_alone(fails: Callable[[Elsewhere], None], monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(0.2 * PASS_S)
    server = Server(monkeypatch, elsewhere)
    server.run(50)
    waited_s = elsewhere.server.waited_s
    fails(elsewhere)
    server.run(100)
    assert elsewhere.server.waited_s - waited_s < HOLD_S, "all passes together"
    elsewhere.hangs = False
    if not server.drafts._drafters.num_followed():
        elsewhere.link()
    server.run(20)
    assert server.run(100) > 1000, "it is used again"


@pytest.mark.usefixtures("repetitive")
def test_an_error_beside_its_link_leaves_the_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, Elsewhere(0.2 * PASS_S), '{"kind": "ngram"}')
    server.run(20)
    link = server.drafts._drafters
    monkeypatch.setattr(link, "flush", lambda: 1 / 0)
    server.run(1)
    assert server.run(100) > 100
    assert not link.num_followed(), "its link is closed"
    assert server.proposer._drafter is not None
    monkeypatch.setattr(server.proposer._drafter, "propose", lambda demands: 1 / 0)
    server.run(1)
    assert not server.run(20), "nothing is left that drafts, and vLLM serves on"


@pytest.mark.usefixtures("repetitive")
def test_the_better_of_two_drafts_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lookups draft as well, nobody waits."""
    elsewhere = Elsewhere(0.2 * PASS_S)
    server = Server(monkeypatch, elsewhere, '{"kind": "ngram"}')
    server.run(50)
    waited_s = elsewhere.server.waited_s
    assert server.run(100) > 1000
    assert elsewhere.server.waited_s - waited_s < 10 * 0.2 * PASS_S


@pytest.mark.parametrize("secure", [False, True])
def test_it_is_linked_over_grpc_as_any_drafter(secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Authority().issue(tmp_path) if secure else None
    (tmp_path / "token").write_text("secret\n")
    token = "secret" if secure else ""
    config = DrafterConfig(name="suffix", options=SuffixOptions())
    actor = DrafterActor(config, "suffix", TARGET, (), token, tls=files, listens="grpc://127.0.0.1:0")
    actor.start()
    try:
        fields = {"token_file": tmp_path / "token", **(files.model_dump() if files is not None else {})}
        query = "?" + urlencode(fields) if secure else ""
        monkeypatch.setenv(SETTING, POOR_LOOKUP)
        monkeypatch.setenv(URL_SETTING, f"{actor.address}{query}")
        proposer = PoolProposer(vllm_config())
        drafts, batch = proposer._drafter, Batch(proposer.propose)
        assert isinstance(drafts, DraftersElsewhere)
        batch.add("a", PROMPTS["a"])

        def is_used() -> bool:
            if len(batch.texts["a"]) > MAX_MODEL_LEN - 20:
                batch.remove("a")
                batch.texts["a"] = list(PROMPTS["a"])
                batch.add("a")
            batch.run()
            return batch.num_accepted > 20

        eventually(is_used)
        proposer.check_integrity()
        drafts.close()
    finally:
        actor.stop()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://drafter:1", "grpc://HOST:PORT"),
        ("grpc://drafter:1?secret=x", "token_file"),
        ("grpc://drafter:1?cert_file=/c", "key_file"),
        ("grpc://drafter:1?token_file=/absent", "cannot be read"),
    ],
)
def test_what_is_no_address_is_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidField, match=reason):
        dialled(url, TARGET)


def test_one_rank_of_a_server_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads the drafts of the first rank of its last pipeline stage."""
    monkeypatch.setenv(URL_SETTING, "grpc://nobody:1")
    config = vllm_config()
    config.parallel_config.rank, config.parallel_config.tensor_parallel_size = 3, 2
    proposer = PoolProposer(config)
    batch = Batch(proposer.propose)
    batch.add("a", [1, 2, 3, 4] * 8)
    for _ in range(10):
        batch.run()
    assert batch.num_accepted == 0
    assert not isinstance(proposer._drafter, DraftersElsewhere)


@pytest.mark.parametrize(
    ("name", "address", "reason"),
    [
        (None, "unix:///tmp/a", "one of the drafters"),
        ("c", "unix:///tmp/a", "one of the drafters"),
        ("reader", "unix:///tmp/a", "hidden states"),
        ("remote", "unix:///tmp/a", "hidden states"),
        ("a", "grpc://0.0.0.0:1", "token_file"),
    ],
)
def test_what_cannot_draft_elsewhere_is_refused(name: str | None, address: str, reason: str) -> None:
    pool = [DrafterConfig(name=one, options=SuffixOptions()) for one in "ab"]
    pool.append(DrafterConfig(name="reader", options=HiddenStateOptions(path="dspark")))
    pool.append(DrafterConfig(name="remote", options=HiddenStateOptions(path="dspark"), remote=True))
    with pytest.raises(InvalidField, match=reason):
        serve_drafter(Config(drafters=tuple(pool)), name, address)
    with pytest.raises(InvalidField, match="hidden states"):  # the only one, which needs no name
        serve_drafter(Config(drafters=(pool[-1],)), None, address)
