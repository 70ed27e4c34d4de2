"""Spans of the traced requests of a target."""

from dataclasses import dataclass, field

from cluster.spans import MAX_EVENTS, Attributes, FinishedSpan, SpanEvent, SpanSink
from cluster.types import Commit
from engine.sequences import LiveSequence


@dataclass(slots=True)
class _Rounds:
    """Of one request, those that committed tokens."""

    first_s: float
    last_s: float
    num: int = 0
    num_tokens: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    drafters: set[str] = field(default_factory=set)
    events: list[SpanEvent] = field(default_factory=list)


class RequestSpans:
    """``target prefill``, from the first pass to the first token, and ``target decode``, with an event for each of the first
    MAX_EVENTS rounds. The round owns it."""

    def __init__(self, sink: SpanSink, target: str) -> None:
        self._sink, self._target = sink, target
        self._rounds: dict[str, _Rounds] = {}  # of live traced requests

    def note(self, sequence: LiveSequence, commit: Commit, now_s: float) -> None:
        """A round has committed tokens."""
        if not sequence.request.trace or not commit.token_ids:
            return
        rounds = self._rounds.get(commit.request_id)
        if rounds is None:
            rounds = self._rounds[commit.request_id] = _Rounds(now_s, now_s)
        rounds.last_s = now_s
        rounds.num += 1
        rounds.num_tokens += len(commit.token_ids)
        rounds.num_verified += commit.num_proposed
        rounds.num_accepted += commit.num_accepted
        attributes: dict[str, str | int] = {
            "outrider.verified_tokens": commit.num_proposed,
            "outrider.accepted_tokens": commit.num_accepted,
        }
        if commit.drafter is not None:
            rounds.drafters.add(commit.drafter)
            attributes["outrider.drafter"] = commit.drafter
        if len(rounds.events) < MAX_EVENTS:
            rounds.events.append(SpanEvent("round", now_s, attributes))

    def end(self, sequence: LiveSequence, now_s: float) -> None:
        """The request has ended here, with or without tokens."""
        request, admitted_s = sequence.request, sequence.admitted_s
        rounds = self._rounds.pop(request.id, None)
        if not request.trace or admitted_s is None:
            return
        own = {"outrider.target": self._target, "outrider.request_id": request.id}
        prefill: Attributes = {
            **own,
            "outrider.prompt_tokens": sequence.prompt_len,
            "outrider.cached_tokens": sequence.num_cached_tokens,
            "outrider.target_queue_s": admitted_s - sequence.arrived_s,
        }
        first_s = now_s if rounds is None else rounds.first_s
        self._sink.add(FinishedSpan("target prefill", request.trace, admitted_s, first_s, prefill))
        if rounds is not None:
            decode: Attributes = {
                **own,
                "outrider.rounds": rounds.num,
                "outrider.output_tokens": rounds.num_tokens,
                "outrider.verified_tokens": rounds.num_verified,
                "outrider.accepted_tokens": rounds.num_accepted,
                "outrider.drafters": sorted(rounds.drafters),
                "outrider.finish_reason": "abort" if sequence.finish is None else sequence.finish.value,
            }
            times = rounds.first_s, rounds.last_s
            self._sink.add(FinishedSpan("target decode", request.trace, *times, decode, tuple(rounds.events)))
