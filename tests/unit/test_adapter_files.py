"""Requests whose LoRA adapter is not loaded: its files are read beside the rounds, which go on."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from cluster.errors import InvalidField
from cluster.messages import SubmitRound
from cluster.sampling_params import SamplingParams
from cluster.types import Adapter, FinishReason, Request
from engine import adapter_files
from engine.adapter_files import MAX_HUNG, MAX_READS, READ_S, read_adapter
from router.cost_model import TableCost
from tests.support.linked_loops import LinkedTarget
from tests.support.toys import ToyTarget
from tests.support.waiting import eventually, no_more_threads

SQL = Adapter("sql", "/adapters/sql", "k")
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


class Host(ToyTarget):
    """Takes any adapter."""

    loaded: Collection[Adapter] = ()

    def has_adapter(self, adapter: Adapter) -> bool:
        return adapter in self.loaded

    def load_adapter(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        self.loaded = {*self.loaded, adapter}


class Served(LinkedTarget):
    """A target, a gateway, and reads of files that end when ``ends`` is set, by ``fault``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.ends = Host(), threading.Event()
        self.fault: Exception | None = None
        self.finishes: dict[str, tuple[FinishReason, str | None]] = {}
        monkeypatch.setattr(adapter_files, "read_adapter", self._read)
        super().__init__(self.engine, TableCost((1, 32), (0.1, 0.2)))

    def ask(self, name: str, adapter: Adapter | None) -> None:
        self.submit(Request(name, (1, 2, 3), SAMPLING, 0.0, adapter=adapter))

    def step(self) -> None:
        self.loop.step(self.clock.now_s)
        for commit in self.commits():
            if commit.finish is not None:
                self.finishes[commit.request_id] = commit.finish, commit.error

    def ended(self, name: str) -> bool:
        self.step()
        return name in self.finishes

    def _read(self, adapter: Adapter) -> None:
        (threading.Event() if adapter.path.startswith("/hung") else self.ends).wait()
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def test_a_disk_that_hangs_delays_requests_of_its_adapter_alone(served: Served) -> None:
    served.ask("late", SQL)
    served.ask("plain", None)
    with no_more_threads():  # the files are read when one can be started
        served.step()
    for _ in range(8):
        served.step()
    assert served.finishes == {"plain": (FinishReason.LENGTH, None)}
    served.clock.now_s += READ_S
    served.step()
    assert served.finishes["late"][0] is FinishReason.OVERLOADED
    served.ask("again", SQL)
    served.step()
    served.ends.set()
    eventually(lambda: served.ended("again"))
    assert served.finishes["again"] == (FinishReason.LENGTH, None)
    served.ends.clear()
    served.ask("loaded", SQL)
    for _ in range(8):
        served.step()
    assert served.finishes["loaded"] == (FinishReason.LENGTH, None), "nothing is read for one that is loaded"


@pytest.mark.parametrize("fault", [InvalidField("lora_path", "x", "cannot be read"), RuntimeError("a defect")])
def test_files_that_cannot_be_read_are_refused(served: Served, fault: Exception) -> None:
    served.fault = fault
    served.ask("bad", SQL)
    served.step()
    served.ends.set()
    eventually(lambda: served.ended("bad"))
    finish, error = served.finishes["bad"]
    assert finish is FinishReason.REFUSED
    assert error is not None
    assert "cannot be read" in error
    assert not served.engine.loaded


@pytest.mark.parametrize(
    "end", [lambda served: served.gateway.send(SubmitRound((), ("gone",))), lambda served: served.gateway.close()]
)
def test_a_request_that_ends_meanwhile_is_not_taken_up(served: Served, end: Callable[[Served], None]) -> None:
    served.ask("gone", SQL)
    served.step()
    end(served)
    served.step()
    served.ends.set()
    eventually(lambda: not served.loop._admission._adapters._reads or bool(served.step()))
    assert not served.loop.telemetry.num_committed


def test_hung_reads_give_their_turn_to_others(served: Served) -> None:
    for i in range(MAX_READS):
        served.ask(f"hung{i}", Adapter("a", f"/hung{i}", "k"))
    served.ask("next", SQL)
    served.ends.set()
    for _ in range(8):
        served.step()
    assert not served.finishes, "the next one waits for its turn"
    served.clock.now_s += READ_S - 1e-3
    served.ask("later", SQL)
    served.step()
    served.clock.now_s += 1e-3
    eventually(lambda: served.ended("later"))
    assert served.finishes.pop("later") == (FinishReason.LENGTH, None)
    assert {finish for finish, _ in served.finishes.values()} == {FinishReason.OVERLOADED}


def test_reads_that_hang_are_bounded(served: Served) -> None:
    for i in range(MAX_HUNG):
        served.ask(str(i), Adapter("a", f"/{i}", "k"))
        served.step()
        if i % MAX_READS == MAX_READS - 1:
            served.clock.now_s += READ_S
            served.step()
    assert len(served.finishes) == MAX_HUNG
    served.ask("more", SQL)
    served.step()
    assert served.finishes["more"] == (FinishReason.OVERLOADED, "the files of other adapters are being read")
    served.ends.set()


def test_what_is_no_folder_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    read_adapter(Adapter("a", str(tmp_path), "k"))
    for path in (tmp_path / "absent", tmp_path / "adapter_config.json"):
        with pytest.raises(InvalidField, match="cannot be read"):
            read_adapter(Adapter("a", str(path), "k"))
