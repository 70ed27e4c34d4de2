"""Offline generation: many requests through one target on this thread, without drafters or a server."""

import itertools
import time
from collections.abc import Iterable, Iterator
from functools import partial

from cluster.errors import GenerationFailed
from cluster.messages import CommitRound, Hello, Role, SubmitRound
from cluster.transport.base import Mailbox, Received
from cluster.transport.memory import LocalNetwork
from cluster.types import FinishReason, ModelInfo, Request
from engine.admission import AdmissionRules
from engine.round import TargetLoop
from engine.target import TargetEngine
from router.cost_model import CostModel

_ADDRESS = "memory://offline"


def generate(
    engine: TargetEngine, model: ModelInfo, cost: CostModel, requests: Iterable[Request | None], max_in_flight: int = 256
) -> Iterator[tuple[Request, tuple[int, ...]]]:
    """Yields each request with its output as it finishes. ``requests`` is read only as capacity becomes free. A None means
    that no request is ready: it is polled again after the next pass. With no live request it ends generation. Raises
    GenerationFailed: the target refused a request, or failed on it."""
    network, mailbox, inbox = LocalNetwork(), Mailbox(), Mailbox(capacity=2**20)
    loop = TargetLoop(engine, model, mailbox, cost, time.monotonic, rules=AdmissionRules(max_in_flight))
    listener = network.listen(_ADDRESS, mailbox, Hello(Role.TARGET, "target", model.vocab_size, ""))
    link = network.connect(_ADDRESS, inbox, Hello(Role.GATEWAY, "offline", model.vocab_size, ""))
    pending = iter(requests)
    live: dict[str, tuple[Request, list[int]]] = {}
    try:
        while True:
            fresh = tuple(iter(partial(next, itertools.islice(pending, max_in_flight - len(live)), None), None))
            if fresh:
                live.update((request.id, (request, [])) for request in fresh)
                link.send(SubmitRound(submits=fresh))
            if not live:
                return
            loop.step(time.monotonic())
            for event in inbox.drain():
                if not (isinstance(event, Received) and isinstance(event.message, CommitRound)):
                    continue
                for commit in event.message.commits:
                    request, token_ids = live[commit.request_id]
                    token_ids.extend(commit.token_ids)
                    if commit.finish is None:
                        continue
                    if commit.finish not in (FinishReason.STOP, FinishReason.LENGTH):
                        raise GenerationFailed(f"request {request.id}: {commit.error or commit.finish}")
                    del live[commit.request_id]
                    yield request, tuple(token_ids)
    finally:
        for request_id in live:
            engine.release(request_id)
        link.close()
        listener.close()
