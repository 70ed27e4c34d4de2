"""The target's hidden states for drafters in other processes: what each follows is sent over a tensor link, before the
message of the control link that it belongs to."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Protocol

from cluster.errors import LinkClosed
from cluster.messages import DraftRound
from cluster.transport.base import Link
from cluster.transport.tensors import Frame, Part, TensorEnd, TensorLink
from engine.target import FeatureSource, FeatureSpan
from router.assignment import drafter_of

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_MAX_ROWS = 2048  # of a frame, which the link has room for; long contexts come in several, with those of short ones first


class Feeds(Protocol):
    """Gives drafters their feeds."""

    def of(self, link: Link) -> "FeatureFeed | None":
        """None: the drafter reads no hidden states."""


class FeatureFeed:
    """Of one drafter. Owned by the round, but for ``connect``. A request whose rows find no room on the link is fed no more
    until it is opened anew: its drafter answers with empty drafts, and it is decoded plainly."""

    def __init__(self, engine: FeatureSource, columns: "Tensor | None") -> None:
        self._engine, self._columns = engine, columns
        self._link: TensorLink | None = None
        self._is_closed = False
        self._connecting = threading.Lock()
        self._sent: dict[str, int] = {}  # rows of each followed request
        self._told: dict[str, int] = {}  # rows that exist
        self._idle: set[str] = set()  # those that it does not draft for
        self._dropped: set[str] = set()
        self.num_sent = self.num_bytes = 0  # tokens whose states were sent, and their size

    def connect(self, link: TensorLink) -> None:
        """From any thread. What is fed before goes with the next message. After ``close`` it closes the link."""
        with self._connecting:
            self._link = link
            is_closed = self._is_closed
        if is_closed:
            link.close()

    def close(self) -> None:
        with self._connecting:
            self._is_closed = True
            link = self._link
        if link is not None:
            link.close()

    def feed(self, message: DraftRound) -> None:
        """Before ``message`` is sent."""
        self._note(message)
        link = self._link
        if link is None:
            return
        left = {key: told - self._sent[key] for key, told in self._told.items() if key not in self._idle}
        due = sorted((key for key, num in left.items() if num > 0), key=lambda key: left[key])
        spans = [self._span(key, min(left[key], _MAX_ROWS)) for key in due if key not in self._dropped]
        if sum([one.stop - one.start for one in spans]) > _MAX_ROWS:
            spans = self._fitting(spans)
        held, rows = self._engine.read_hidden_states(spans) if spans else ([], None)
        found = {span.request_id: span.stop for span, is_held in zip(spans, held, strict=True) if is_held}
        if rows is not None and self._columns is not None:
            rows = rows[:, self._columns]
        whole = tuple(self._part(key, found.get(key, self._sent[key])) for key in due)
        frame = Frame(whole, message.releases, rows if found else None)
        is_sent = bool(due or message.releases) and link.send(frame)
        if is_sent:
            self.num_bytes += frame.num_bytes
        elif due:
            self._dropped |= found.keys()
            found.clear()
            link.send(Frame(tuple(self._part(key, self._sent[key]) for key in due), message.releases))
        self.num_sent += sum(stop - self._sent[key] for key, stop in found.items())
        self._sent |= found

    def _span(self, key: str, num_rows: int) -> FeatureSpan:
        return FeatureSpan(key, self._sent[key], self._sent[key] + num_rows)

    def _fitting(self, spans: Sequence[FeatureSpan]) -> list[FeatureSpan]:
        """Of those whose states are computed, as many rows as a frame takes."""
        computed, _ = self._engine.read_hidden_states([replace(one, start=one.stop) for one in spans])
        found, room = [], _MAX_ROWS
        for one in compress(spans, computed):
            found.append(self._span(one.request_id, min(one.stop - one.start, room)))
            room -= found[-1].stop - found[-1].start
        return [one for one in found if one.stop > one.start]

    def _part(self, key: str, stop: int) -> Part:
        return Part(key, self._sent[key], stop, self._told[key])

    def _note(self, message: DraftRound) -> None:
        for opening in message.opens:
            self._sent[opening.request_id], self._told[opening.request_id] = 0, len(opening.token_ids) - 1
            self._dropped.discard(opening.request_id)
            self._idle.discard(opening.request_id)
        for extension in message.extends:
            if extension.request_id in self._told:
                self._told[extension.request_id] = extension.base_len + len(extension.token_ids) - 1
        for budget in message.budgets:
            (self._idle.discard if budget.terms.num_tokens else self._idle.add)(budget.request_id)
        for request_id in message.releases:
            for known in (self._sent, self._told):
                known.pop(request_id, None)
            self._idle.discard(request_id)
            self._dropped.discard(request_id)


class FeatureFeeds:
    """``Feeds`` over process groups or shared memory. ``layers``: that each drafter reads. A feed that breaks ends its
    control link, so that both begin anew."""

    def __init__(self, engine: FeatureSource, layers: Mapping[str, Sequence[int]], host: str) -> None:
        from cluster.transport.tensors.groups import Meeting

        self._engine, self._layers = engine, dict(layers)
        self._meeting = Meeting(host)
        self._links: dict[str, TensorLink] = {}  # by drafter
        self.address = self._meeting.address

    def close(self) -> None:
        for link in tuple(self._links.values()):
            link.close()

    def of(self, link: Link) -> FeatureFeed | None:
        layers = self._layers.get(drafter_of(link.peer.name))
        if layers is None:
            return None
        feed = FeatureFeed(self._engine, self._columns(layers))
        try:
            threading.Thread(target=self._connect, args=(feed, link), name=f"feed {link.peer.name}", daemon=True).start()
        except RuntimeError:  # no thread can be started now: the drafter dials again
            link.close()
        return feed

    def _connect(self, feed: FeatureFeed, link: Link) -> None:
        name = link.peer.name

        def down(reason: str) -> None:
            logger.warning("hidden states of drafter %s: %s", name, reason)
            link.close()

        try:
            tensors = self._meeting.answer(name, self._engine.embedding.device, TensorEnd(_ignore, down))
        except LinkClosed as error:
            down(str(error))
            return
        self._links[name] = tensors
        feed.connect(tensors)

    def _columns(self, layers: Sequence[int]) -> "Tensor | None":
        import torch

        kept, size = list(self._engine.feature_layers), self._engine.embedding.shape[1]
        if list(layers) == kept:
            return None
        columns = [torch.arange(size) + size * kept.index(layer) for layer in layers]
        return torch.cat(columns).to(self._engine.embedding.device)


def _ignore(_: Frame) -> None:
    """The target is sent no frames."""
