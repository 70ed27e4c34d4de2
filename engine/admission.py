"""Which requests a target takes, and which it refuses; grammars of those taken are compiled before they are planned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import InvalidField, Overloaded
from cluster.message_checks import request_fault
from cluster.types import Commit, FinishReason, Request
from engine.grammar.waiting import GrammarRefusal, PendingGrammars
from engine.sequences import LiveSequence, Sequences
from engine.slo_monitor import SloMonitor
from engine.target import AdapterHost, TargetEngine
from router.plan import Capacity

if TYPE_CHECKING:
    from engine.grammar.compiling import CompiledGrammar, Grammars

Refuse = Callable[[LiveSequence, FinishReason, str], None]  # ends a live request, with the reason


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """``grammars``: of the model; None: requests with a grammar are refused. ``sheds``: refuse requests whose first token
    would come later than their objective."""

    max_waiting: int = 1024
    grammars: "Grammars | None" = None
    sheds: bool = True


class Admission:
    """The round owns it. ``refuse``: called for a live request whose grammar is refused. ``wake``: a grammar is compiled."""

    def __init__(
        self,
        rules: AdmissionRules,
        engine: TargetEngine,
        sequences: Sequences,
        slo: SloMonitor,
        refuse: Refuse,
        wake: Callable[[], None],
    ) -> None:
        self.draining = False
        self._max_waiting, self._sheds = rules.max_waiting, rules.sheds
        self._grammars = None if rules.grammars is None else PendingGrammars(rules.grammars, wake)
        self._engine, self._sequences, self._slo, self._refuse = engine, sequences, slo, refuse

    def decide(self, request: Request, now_s: float) -> int | Commit:
        """Of a request that is taken the tokens that the prefix cache holds; else the only commit of a refused one, with the
        reason. The gateway has validated the request. This checks what only the target knows, and what would do harm."""
        capacity = self._engine.capacity()
        finish, error = self._fault(request, capacity)
        if error is None and request.adapter is not None:
            finish, error = load_adapter(request, self._sequences, self._engine)
        if error is not None:
            return Commit(request.id, request.committed_len, (), finish=finish, error=error)
        cached_len = self._engine.num_cached(request, (*request.prompt_token_ids, *request.output_token_ids))
        shed = self._slo.refusal(request, cached_len, self._sequences, capacity, now_s) if self._sheds else None
        if shed is None:
            return cached_len
        self._engine.release(request.id)
        return shed

    def compile_grammar(self, sequence: LiveSequence, now_s: float) -> None:
        """Of a request that was taken: it is planned once its grammar is compiled."""
        grammar = sequence.request.sampling.grammar
        if grammar is not None and self._grammars is not None:
            sequence.awaits_grammar = True
            known = self._grammars.start(sequence.request.id, grammar, now_s)
            if known is not None:
                self._follow(sequence, known)

    def follow_grammars(self, now_s: float) -> None:
        """Requests whose grammar is compiled may be planned; those whose grammar is refused end."""
        for request_id, result in () if self._grammars is None else self._grammars.take_finished(now_s):
            sequence = self._sequences[request_id]
            if isinstance(result, GrammarRefusal):
                self._refuse(sequence, FinishReason.OVERLOADED if result.is_busy else FinishReason.REFUSED, result.reason)
            else:
                self._follow(sequence, result)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._grammars is not None:
            self._grammars.forget(request_id)

    def _follow(self, sequence: LiveSequence, grammar: "CompiledGrammar") -> None:
        try:
            sequence.follow(grammar)
        except ValueError as error:  # the output of another target, for which its client is not to blame
            self._refuse(sequence, FinishReason.ERROR, f"it cannot be continued: {error}")

    def _fault(self, request: Request, capacity: Capacity) -> tuple[FinishReason, str | None]:
        prompt_len, max_len = len(request.prompt_token_ids), capacity.max_model_len
        num_waiting = len(self._sequences) - self._sequences.num_running
        longest, num_cached = (
            min(prompt_len + request.sampling.max_tokens, max_len),
            capacity.num_blocks * capacity.block_len,
        )
        grammar = request.sampling.grammar
        busy = None if grammar is None or self._grammars is None else self._grammars.refusal(grammar)
        error: str | None = None
        if request.id in self._sequences:
            error = f"request {request.id} is live already"
        elif self.draining and not request.was_admitted:
            return FinishReason.DRAINING, "the target drains: it takes no more requests"
        elif num_waiting >= self._max_waiting and not request.was_admitted:
            return FinishReason.OVERLOADED, f"{num_waiting} requests wait already"
        elif not 0 < prompt_len < max_len:
            room = f"at least 1 and leave room in the model's context of {max_len}"
            error = f"the prompt has {prompt_len} tokens; it must have {room}"
        elif not len(request.output_token_ids) < min(request.sampling.max_tokens, max_len - prompt_len):
            error = f"its output of {len(request.output_token_ids)} tokens is complete"
        elif longest > num_cached:
            needed = f"prompt and max_tokens need {longest} tokens of KV cache, of which there are {num_cached} in all"
            error = f"{needed}; lower max_tokens"
        elif grammar is not None and self._grammars is None:
            error = "this target has no structured output; its log says why"
        elif busy is not None:
            return FinishReason.OVERLOADED if busy.is_busy else FinishReason.REFUSED, busy.reason
        else:
            error = request_fault(request, self._sequences.model.vocab_size)
        return FinishReason.ERROR, error


def load_adapter(request: Request, sequences: Sequences, engine: TargetEngine) -> tuple[FinishReason, str | None]:
    """Loads the adapter of a request, or tells why it cannot be loaded."""
    assert request.adapter is not None
    try:
        if not isinstance(engine, AdapterHost):
            raise InvalidField("model", request.adapter.name, "is an adapter, which this engine does not serve")
        engine.load_adapter(request.adapter, {one.request.adapter for one in sequences if one.request.adapter})
    except (InvalidField, Overloaded) as error:
        return FinishReason.OVERLOADED if isinstance(error, Overloaded) else FinishReason.REFUSED, str(error)
    return FinishReason.ERROR, None
