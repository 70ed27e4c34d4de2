"""Which requests a target takes, and which it refuses. Of those taken grammars are compiled, and files of adapters read,
before they are planned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.errors import InvalidField, Overloaded
from cluster.message_checks import request_fault
from cluster.types import Commit, FinishReason, Request
from engine.adapter_files import PendingAdapters
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
    """The round owns it. ``refuse``: called for a live request that is refused after all. ``wake``: a grammar is compiled,
    or an adapter read."""

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
        self._adapters = PendingAdapters(wake)
        self._engine, self._sequences, self._slo, self._refuse = engine, sequences, slo, refuse

    def decide(self, request: Request, now_s: float) -> int | Commit:
        """Of a request that is taken the tokens that the prefix cache holds; else the only commit of a refused one, with the
        reason. The gateway has validated the request. This checks what only the target knows, and what would do harm."""
        capacity = self._engine.capacity()
        finish, error = self._fault(request, capacity)
        is_read = self._has_adapter(request)
        if error is None and not is_read and request.adapter is not None and self._adapters.is_full(request.adapter, now_s):
            finish, error = FinishReason.OVERLOADED, "the files of other adapters are being read"
        if error is None and is_read and request.adapter is not None:
            finish, error = load_adapter(request, self._sequences, self._engine)
        if error is not None:
            return Commit(request.id, request.committed_len, (), finish=finish, error=error)
        if not is_read:
            return 0
        cached_len = self._engine.num_cached(request, (*request.prompt_token_ids, *request.output_token_ids))
        shed = self._slo.refusal(request, cached_len, self._sequences, capacity, now_s) if self._sheds else None
        if shed is None:
            return cached_len
        self._engine.release(request.id)
        return shed

    def prepare(self, sequence: LiveSequence, now_s: float) -> None:
        """A request that was taken is planned once its grammar is compiled and its adapter loaded."""
        request, grammar = sequence.request, sequence.request.sampling.grammar
        if request.adapter is not None and not self._has_adapter(request):
            sequence.awaits_adapter = True
            self._adapters.start(request.id, request.adapter, now_s)
        if grammar is not None and self._grammars is not None:
            sequence.awaits_grammar = True
            known = self._grammars.start(sequence.request.id, grammar, now_s)
            if known is not None:
                self._follow(sequence, known)

    def follow(self, now_s: float) -> None:
        """Requests whose grammar is compiled and whose adapter is read may be planned; those that are refused end."""
        for request_id, fault in self._adapters.take_finished(now_s):
            sequence = self._sequences[request_id]
            finish, error = load_adapter(sequence.request, self._sequences, self._engine, fault)
            sequence.awaits_adapter = False
            if error is not None:
                self._refuse(sequence, finish, error)
        for request_id, result in () if self._grammars is None else self._grammars.take_finished(now_s):
            sequence = self._sequences[request_id]
            if isinstance(result, GrammarRefusal):
                self._refuse(sequence, FinishReason.OVERLOADED if result.is_busy else FinishReason.REFUSED, result.reason)
            else:
                self._follow(sequence, result)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._adapters.forget(request_id)
        if self._grammars is not None:
            self._grammars.forget(request_id)

    def _has_adapter(self, request: Request) -> bool:
        """Whether nothing must be read for it."""
        adapter, engine = request.adapter, self._engine
        return adapter is None or not isinstance(engine, AdapterHost) or engine.has_adapter(adapter)

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


def load_adapter(
    request: Request, sequences: Sequences, engine: TargetEngine, fault: InvalidField | Overloaded | None = None
) -> tuple[FinishReason, str | None]:
    """Loads the adapter of a request, or tells why it cannot be loaded. ``fault``: of its files."""
    assert request.adapter is not None
    try:
        if fault is not None:
            raise fault
        if not isinstance(engine, AdapterHost):
            raise InvalidField("model", request.adapter.name, "is an adapter, which this engine does not serve")
        engine.load_adapter(request.adapter, {one.request.adapter for one in sequences if one.request.adapter})
    except (InvalidField, Overloaded) as error:
        return FinishReason.OVERLOADED if isinstance(error, Overloaded) else FinishReason.REFUSED, str(error)
    return FinishReason.ERROR, None
