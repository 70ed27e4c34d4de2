"""Hidden states that came over tensor links: the target of a drafter in a process of its own."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cluster.config import HiddenStateOptions
from cluster.errors import LinkClosed
from cluster.transport.base import Link, LinkDown, Mailbox
from cluster.transport.tensors import Frame, Part, TensorEnd
from drafters.hidden_states.formats import read_config
from drafters.hidden_states.host import Host
from drafters.session import key_of
from drafters.shipped import find_drafter
from engine.device import require
from engine.dtypes import choose_dtype
from engine.factory import DTYPES
from engine.models.config import load_config
from engine.models.prepare import ensure_model
from engine.models.weights import open_weights
from engine.target import FeatureSpan

if TYPE_CHECKING:
    from cluster.transport.tensors.groups import TensorReceiver

logger = logging.getLogger(__name__)

MAX_BYTES = 2**30  # of rows; the requests that were read least recently lose theirs
KEPT = 2  # of the rows that were read of such a request: the next draft reads them again
WAIT_S = 0.25  # for rows that the target has announced by a message of the control link


class _Rows:
    """Of one request from ``first`` to ``num``, in a tensor that doubles. ``told_len``: rows that exist at the target.
    ``read_len``: those that were read."""

    def __init__(self, width: int, like: Tensor) -> None:
        self._held = torch.empty(0, width, dtype=like.dtype, device=like.device)
        self.first = self.num = self.told_len = self.read_len = 0

    def append(self, rows: Tensor) -> None:
        before, num = len(self), len(self) + len(rows)
        if num > len(self._held):
            grown = self._held.new_empty(max(num, 2 * len(self._held)), self._held.shape[1])
            grown[:before] = self._held[:before]
            self._held = grown
        self._held[before:num] = rows
        self.num += len(rows)

    def drop(self, first: int) -> None:
        """Those before ``first``."""
        self._held = self._held[first - self.first : len(self)].clone()
        self.first, self.num = first, max(first, self.num)

    def __len__(self) -> int:
        return self.num - self.first

    def __getitem__(self, part: slice) -> Tensor:
        return self._held[part.start - self.first : part.stop - self.first]

    @property
    def num_bytes(self) -> int:
        return self._held.numel() * self._held.element_size()


class ReceivedStates:
    """``FeatureSource`` of the rows that ``receive`` is given, on any thread. Requests are named by ``key_of``. ``layers``:
    whose states they are."""

    def __init__(self, layers: Sequence[int], embedding: Tensor, max_bytes: int = MAX_BYTES, wait_s: float = WAIT_S) -> None:
        self._layers, self._embedding = tuple(layers), embedding
        self._max_bytes, self._wait_s = max_bytes, wait_s
        self._rows: OrderedDict[str, _Rows] = OrderedDict()  # read least recently first
        self._arrived = threading.Condition()
        self._is_late = False  # the last wait was in vain, and nothing has come since
        self._waited_s = 0.0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._layers

    @property
    def embedding(self) -> Tensor:
        return self._embedding

    def receive(self, link_number: int, frame: Frame) -> None:
        """Raises ValueError: rows of another width."""
        with self._arrived:
            begin = 0
            for part in frame.parts:
                end = begin + part.stop - part.start
                self._add(key_of(link_number, part.request_id), part, None if frame.rows is None else frame.rows[begin:end])
                begin = end
            for request_id in frame.ended:
                self._rows.pop(key_of(link_number, request_id), None)
            self._evict()
            self._is_late = False
            self._arrived.notify_all()

    def forget(self, link_number: int) -> None:
        """All requests of a link that has ended."""
        with self._arrived:
            for key in [key for key in self._rows if key.startswith(key_of(link_number, ""))]:
                del self._rows[key]

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> tuple[list[bool], Tensor]:
        """As of ``FeatureSource``; waits WAIT_S at most for what is under way."""
        with self._arrived:
            began_s = time.monotonic()
            end_s = began_s + (0.0 if self._is_late else self._wait_s)
            while not all(map(self._is_told, spans)) and not self._is_late:
                self._is_late = not self._arrived.wait(max(0.0, end_s - time.monotonic()))
            self._waited_s += time.monotonic() - began_s
            held = [self._holds(span) for span in spans]
            found = [span for span, is_held in zip(spans, held, strict=True) if is_held]
            for span in found:
                self._rows.move_to_end(span.request_id)
                self._rows[span.request_id].read_len = span.stop
            parts = [self._rows[span.request_id][span.start : span.stop] for span in found]
            width = len(self._layers) * self._embedding.shape[1]
            return held, torch.cat(parts) if parts else self._embedding.new_empty(0, width)

    def take_waited_s(self) -> float:
        """What was waited for rows since the last call. On the thread that reads them."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _is_told(self, span: FeatureSpan) -> bool:
        rows = self._rows.get(span.request_id)
        return rows is not None and (rows.told_len >= span.stop or rows.first > span.start)

    def _holds(self, span: FeatureSpan) -> bool:
        rows = self._rows.get(span.request_id)
        return rows is not None and rows.first <= span.start <= span.stop <= rows.num

    def _add(self, key: str, part: Part, given: Tensor | None) -> None:
        width = len(self._layers) * self._embedding.shape[1]
        rows = self._rows.get(key)
        if rows is None or part.start == 0:  # opened, or opened anew
            rows = self._rows[key] = _Rows(width, self._embedding)
        rows.told_len = part.told_len
        if given is None or not len(given):
            return
        if given.shape[1] != width:
            raise ValueError(f"hidden states of width {given.shape[1]}, not {width}")
        if part.start > rows.num:
            rows.drop(part.start)
        if part.start == rows.num:
            rows.append(given.to(self._embedding))

    def _evict(self) -> None:
        total = sum(rows.num_bytes for rows in self._rows.values())
        for request_id, rows in self._rows.items():
            if total <= self._max_bytes:
                return
            if (first := (rows.read_len or rows.num) - KEPT) <= rows.first:
                continue
            if not rows.first:
                logger.warning("the hidden states of %s are dropped, as all exceed %d bytes", request_id, self._max_bytes)
            total -= rows.num_bytes
            rows.drop(first)


def remote_host(options: HiddenStateOptions, device: str) -> tuple[Host, ReceivedStates]:
    """The target as a drafter sees it from a process of its own. Raises ModelUnavailable; InvalidField: ``device`` is
    a GPU, and there is none."""
    require(device)
    folder = ensure_model(options.target)
    config = load_config(folder)
    with open_weights(folder, config, DTYPES[choose_dtype(options.dtype, device, allows_int8=True)]) as weights:
        embedding = weights.embedding().to(device, copy=True)
    states = ReceivedStates(
        sorted(set(read_config(find_drafter(options.path), config.num_layers).target_layer_ids)), embedding
    )
    return Host(states, folder, name_of=str), states


class StateCalls:
    """Calls each target that the drafter ``name`` is linked to, on a thread. A link without hidden states is ended, so that
    it is dialled anew."""

    def __init__(self, name: str, states: ReceivedStates, mailbox: Mailbox) -> None:
        self._name, self._states, self._mailbox = name, states, mailbox
        self._ends: dict[str, TensorReceiver] = {}  # by target

    def close(self) -> None:
        for end in tuple(self._ends.values()):
            end.close()

    def linked(self, link: Link, number: int) -> None:
        """``number``: of the link, as in ``key_of``."""
        threading.Thread(target=self._call, args=(link, number), name=f"call {link.peer.name}", daemon=True).start()

    def _call(self, link: Link, number: int) -> None:
        from cluster.transport.tensors.groups import call

        def down(reason: str) -> None:
            self._states.forget(number)
            link.close()
            self._mailbox.put(LinkDown(link, f"its hidden states: {reason}"))

        try:
            end = TensorEnd(partial(self._states.receive, number), down)
            former = self._ends.get(link.peer.name)
            self._ends[link.peer.name] = call(link.peer.tensors, self._name, self._states.embedding.device, end)
            if former is not None:
                former.close()
        except LinkClosed as error:
            down(str(error))
