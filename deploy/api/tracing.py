"""OpenTelemetry traces of calls. Imported where an endpoint is configured only.

A call's spans are made when it ends, from times and counts that the API keeps anyway; targets and drafters make their own,
as children of the call's. Names are those of OpenTelemetry's conventions for HTTP and generative AI; ``outrider.*`` are our
own.
"""

import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from cluster.otlp import PROPAGATOR, make_provider, wall_offset_ns
from deploy.api.answer import total_counts
from deploy.api.call import Call
from deploy.api.choice import Choice
from deploy.api.draft_counts import DraftingCounts
from deploy.api.middleware import Outcome

_PROPAGATED = (b"traceparent", b"tracestate")


class Tracing:
    """As `cluster.otlp.make_provider`, of the process of the API."""

    def __init__(self, endpoint: str, sampled_share: float) -> None:
        self._provider = make_provider(endpoint, sampled_share, "api")
        self._tracer = self._provider.get_tracer("outrider")

    def begin(self, scope: Scope) -> Span:
        """The server's span of an HTTP request."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            if name in _PROPAGATED:
                headers.setdefault(name.decode(), []).append(value.decode("latin-1"))
        # The standard: a request with several traceparents starts a new trace.
        parent = {} if len(headers.get("traceparent", ())) != 1 else {name: ",".join(one) for name, one in headers.items()}
        return self._tracer.start_span(scope["method"], PROPAGATOR.extract(parent, Context()), SpanKind.SERVER)

    @staticmethod
    def parent_of(span: Span) -> str:
        """The `traceparent` for spans of other processes below this one; "": it is not sampled, and they make none."""
        carrier: dict[str, str] = {}
        if span.is_recording():
            PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        return carrier.get("traceparent", "")

    def end(self, span: Span, outcome: Outcome) -> None:
        """Ends the span, and makes those of the call's stages."""
        if not span.is_recording():
            return
        span.update_name(f"{outcome.method} {outcome.route}")
        span.set_attributes(
            {
                "http.request.method": outcome.method,
                "http.route": outcome.route,
                "http.response.status_code": outcome.status,
                "outrider.request_id": outcome.request_id,
            }
        )
        if outcome.error_type is not None:
            span.set_attribute("error.type", outcome.error_type)
        if outcome.is_server_error:
            span.set_status(Status(StatusCode.ERROR))
        if outcome.call is not None:
            span.update_name(f"{_operation(outcome)} {outcome.call.model}")
            span.set_attributes(_call_attributes(outcome, outcome.call))
            _Stages(self._tracer, span).add(outcome.call)
        span.end()

    def close(self) -> None:
        """Sends what is queued, for a bounded time. Blocks."""
        self._provider.shutdown()


class _Stages:
    """Children of a call's span. Times of the monotonic clock are shown as wall time by the clocks' present offset."""

    def __init__(self, tracer: Tracer, parent: Span) -> None:
        self._tracer = tracer
        self._context = set_span_in_context(parent, Context())
        self._offset_ns = wall_offset_ns()
        self._now_s = time.monotonic()

    def add(self, call: Call) -> None:
        admitted_s = call.choices[0].admitted_s
        self._span("queue", call.arrival_s, admitted_s or self._now_s, {})
        if admitted_s is None:
            return
        for choice in call.choices:
            index = {"outrider.choice": choice.index}
            first_s, last_s = choice.first_token_s, choice.last_token_s
            self._span("prefill", admitted_s, first_s or self._now_s, index | _prefill_attributes(choice))
            if first_s is not None and last_s is not None:
                self._span("decode", first_s, last_s, index | _draft_attributes(choice.counts))

    def _span(self, name: str, start_s: float, end_s: float, attributes: Mapping[str, AttributeValue]) -> None:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=self._wall_ns(start_s))
        span.end(self._wall_ns(end_s))

    def _wall_ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns


def _operation(outcome: Outcome) -> str:
    return "text_completion" if outcome.route == "/v1/completions" else "chat"


def _call_attributes(outcome: Outcome, call: Call) -> dict[str, AttributeValue]:
    return {
        "gen_ai.operation.name": _operation(outcome),
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "gen_ai.response.id": call.id,
        "gen_ai.request.choice.count": len(call.choices),
        "gen_ai.request.stream": call.stream,
        "gen_ai.request.max_tokens": call.choices[0].request.sampling.max_tokens,
        "gen_ai.usage.input_tokens": outcome.num_prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.num_output_tokens,
        "gen_ai.response.finish_reasons": outcome.finish_reasons,
        **_draft_attributes(total_counts(call.choices)),
    }


def _prefill_attributes(choice: Choice) -> dict[str, AttributeValue]:
    """``outrider.ttft_s`` counts from the arrival of the call; the target's times are durations by its own clock."""
    attributes: dict[str, AttributeValue] = {"outrider.prompt_tokens": len(choice.request.prompt_token_ids)}
    if choice.ttft_s is not None:
        attributes["outrider.ttft_s"] = choice.ttft_s
    if choice.prefill is not None:
        attributes["outrider.cached_tokens"] = choice.prefill.num_cached_tokens
        attributes["outrider.target_queue_s"] = choice.prefill.queue_s
        attributes["outrider.target_prefill_s"] = choice.prefill.prefill_s
    return attributes


def _draft_attributes(counts: DraftingCounts) -> dict[str, AttributeValue]:
    """``outrider.drafters`` and the two lists beside it are in the same order."""
    by_drafter = sorted(counts.by_drafter.items())
    return {
        "outrider.rounds": counts.num_rounds,
        "outrider.verified_tokens": counts.num_proposed,
        "outrider.accepted_tokens": counts.num_accepted,
        "outrider.drafters": [name for name, _ in by_drafter],
        "outrider.drafters.verified_tokens": [one.num_proposed for _, one in by_drafter],
        "outrider.drafters.accepted_tokens": [one.num_accepted for _, one in by_drafter],
    }
