"""Reads the files of LoRA adapters beside the passes: a round that then loads one waits for no disk and no hub."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import InvalidField, ModelUnavailable, Overloaded
from cluster.model_name import HubName
from cluster.types import Adapter
from engine.models import hub

logger = logging.getLogger(__name__)

READ_S = 60.0  # that a request waits; the read goes on for later ones
MAX_READS = 4  # at once; others wait for their turn
MAX_HUNG = 16  # reads that took longer than READ_S; nothing can end them, and they count no more among those at once
_BLOCK_BYTES = 2**22
RETRY_AFTER_S = 1.0


def adapter_folder(path: str, *, fetches: bool = False) -> Path:
    """The folder of `cluster.types.Adapter.path`; of a hub's adapter in its cache. ``fetches``: downloads what it lacks.
    Raises ModelUnavailable."""
    name = HubName.parse(path)
    if name is None:
        return Path(path)
    return hub.fetch(name, hub.no_progress) if fetches else hub.find(name)


def read_adapter(adapter: Adapter) -> None:
    """Raises InvalidField: it cannot be read."""
    try:
        folder = adapter_folder(adapter.path, fetches=True)
        buffer = bytearray(_BLOCK_BYTES)
        for path in folder.iterdir():
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
    except (OSError, ModelUnavailable) as error:
        raise InvalidField("lora_path", adapter.path, f"cannot be read: {error}") from error


@dataclass(slots=True)
class _Read:
    """``done``: holds why the files cannot be used; None: they are read. ``waiting``: until when, by request.
    ``began_s``: None until its turn."""

    done: Future[InvalidField | None] = field(default_factory=Future)
    waiting: dict[str, float] = field(default_factory=dict)
    began_s: float | None = None

    def is_hung(self, now_s: float) -> bool:
        return self.began_s is not None and now_s - self.began_s >= READ_S


@dataclass(slots=True)
class PendingAdapters:
    """Requests wait for the files of their adapter. The methods are the round's. ``wake``: called when files are read."""

    wake: Callable[[], None]
    _reads: dict[Adapter, _Read] = field(default_factory=dict)

    def is_full(self, adapter: Adapter, now_s: float) -> bool:
        """Whether a request for this adapter cannot wait now."""
        return adapter not in self._reads and sum(read.is_hung(now_s) for read in self._reads.values()) >= MAX_HUNG

    def start(self, request_id: str, adapter: Adapter, now_s: float) -> None:
        """``take_finished`` has the request later."""
        self._reads.setdefault(adapter, _Read()).waiting[request_id] = now_s + READ_S
        self._begin_reads(now_s)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        for adapter, read in tuple(self._reads.items()):
            read.waiting.pop(request_id, None)
            if not read.waiting and read.began_s is None:
                del self._reads[adapter]

    def take_finished(self, now_s: float) -> list[tuple[str, InvalidField | Overloaded | None]]:
        """The requests whose wait is over, and why the files cannot be used; None: they are read."""
        finished: list[tuple[str, InvalidField | Overloaded | None]] = []
        for adapter, read in tuple(self._reads.items()):
            is_done = read.done.done()
            fault = read.done.result() if is_done else Overloaded("the adapter's files are not read yet", RETRY_AFTER_S)
            over = [request_id for request_id, until_s in read.waiting.items() if is_done or now_s >= until_s]
            finished += [(request_id, fault) for request_id in over]
            for request_id in over:
                del read.waiting[request_id]
            if is_done or (not read.waiting and read.began_s is None):
                del self._reads[adapter]
        self._begin_reads(now_s)
        return finished

    def _begin_reads(self, now_s: float) -> None:
        hung = sum(read.is_hung(now_s) for read in self._reads.values())
        free = MAX_READS + hung - sum(read.began_s is not None for read in self._reads.values())
        if hung >= MAX_HUNG or free <= 0:
            return
        waiting = [item for item in self._reads.items() if item[1].began_s is None]
        for adapter, read in waiting[:free]:
            with suppress(RuntimeError):  # no thread can be started now
                threading.Thread(target=self._run, args=(adapter, read.done), name="adapter", daemon=True).start()
                read.began_s = now_s

    def _run(self, adapter: Adapter, done: "Future[InvalidField | None]") -> None:
        fault = None
        try:
            read_adapter(adapter)
        except InvalidField as error:
            fault = error
        except Exception as error:  # a defect ends the requests of this adapter alone
            logger.exception("the adapter in %s could not be read", adapter.path)
            fault = InvalidField("lora_path", adapter.path, f"cannot be read: {type(error).__name__}: {error}")
        done.set_result(fault)
        self.wake()
