"""The interface between the round and the engine that computes the target's tokens."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cluster.types import Adapter, Request, record
from router.plan import Capacity, Span

if TYPE_CHECKING:  # drafters without a model import this module, and no torch
    from torch import Tensor

    from engine.grammar.compiling import Grammars


@record
class FeatureSpan:
    """Committed positions start .. stop - 1 of a request, whose hidden states are wanted."""

    request_id: str
    start: int
    stop: int


class PrefixCache(Protocol):
    """What of a request is computed already. Engines without a prefix cache answer 0."""

    def num_cached(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many tokens ``open`` would find at present. Asked when a request arrives, and in each round for those that it
        could admit, until ``open`` or ``release``."""


class TargetEngine(PrefixCache, Protocol):
    """Computes the target's tokens. Not thread-safe: the round owns it. The token at a position depends on (target, prompt,
    parameters, seed) alone (docs/architecture.md#principles): not on drafts, the batch or preemptions. An engine may
    schedule for itself, compute less than the spans ask for, or preempt: ``Span.computed_len`` tells."""

    def open(self, request: Request, token_ids: Sequence[int]) -> int:
        """Admits a request whose committed tokens are ``token_ids`` (more than the prompt after a preemption). Returns how
        many of them the prefix cache holds: at most len - 1, and none if prompt log-probabilities are requested."""

    def execute(self, spans: Sequence[Span]) -> Sequence[Span]:
        """One packed pass over these spans, which it returns with their outcome. Rolls back rejected draft tokens, and
        returns when the device has finished: callers time it. Raises OutOfBlocks: the spans need more blocks than are free;
        nothing was computed."""

    def release(self, request_id: str) -> None:
        """Frees the KV blocks of a finished, aborted or preempted request. Unknown requests are ignored."""

    def capacity(self) -> Capacity: ...

    def check_integrity(self) -> None:
        """For an idle engine. Raises AssertionError when blocks and sequences disagree; RankLost: it can compute no more."""


def compute(engine: TargetEngine, request: Request, token_ids: Sequence[int], num: int) -> int:
    """Opens a request with ``token_ids``, and computes the first ``num`` of them, sampling nothing. Returns how many are
    computed, which are more if more were cached."""
    computed_len, longest = engine.open(request, token_ids), engine.capacity().max_pass_tokens
    while computed_len < num:
        chunk = tuple(token_ids[computed_len : min(num, computed_len + longest)])
        engine.execute([Span.bound(request.id, computed_len, chunk, samples=False)])
        computed_len += len(chunk)
    return computed_len


@runtime_checkable
class AsynchronousEngine(Protocol):
    """A ``TargetEngine`` whose device may compute while the round's thread does something else."""

    # Called in each ``execute`` when the layers of the pass are launched, before anything waits for them. Where it takes
    # longer than they do, the pass takes longer.
    meanwhile: Callable[[], None] | None

    @property
    def is_asynchronous(self) -> bool:
        """Whether its device does."""


@runtime_checkable
class AdapterHost(Protocol):
    """A ``TargetEngine`` that serves LoRA adapters."""

    def has_adapter(self, adapter: Adapter) -> bool:
        """Whether it is loaded."""

    def load_adapter(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        """Between passes; nothing happens if it is loaded. Another one that is not ``in_use`` may give way to it.

        Raises InvalidField: its files do not fit the model; Overloaded: all places are in use.
        """


class FeatureSource(Protocol):
    """What drafters in the target's process read of it, from threads of their own, also while a pass runs."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states are kept, ascending; -1: the embedding's output."""

    @property
    def embedding(self) -> "Tensor":
        """[vocabulary, hidden], on the target's device and in its dtype."""

    def read_hidden_states(self, spans: Sequence[FeatureSpan]) -> "tuple[list[bool], Tensor]":
        """Hidden states after ``feature_layers``, concatenated, in one gather that waits for nothing.

        Returns which spans can be read, and the rows of these, one behind the other, [rows, len(feature_layers) * hidden] in
        the target's dtype. The first n - 1 of n committed tokens are computed, unless the request is in prefill or was
        preempted; a span beyond them, or of a request that is not held, cannot be read.
        """


class LoadedTarget(TargetEngine, AsynchronousEngine, FeatureSource, Protocol):
    """The target of a configuration file, by whichever engine."""

    @property
    def grammars(self) -> "Grammars | None":
        """Of the model; None: it takes no structured output."""

    @property
    def operators(self) -> str:
        """Name of what computes it: measured costs hold for one name."""

    def close(self) -> None:
        """Ends the processes and threads that it started, if any."""
