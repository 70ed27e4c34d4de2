"""The process of a drafter: its DrafterLoop on a thread, and links to every target replica."""

import time
from collections.abc import Sequence
from functools import partial

from actors.worker import LoopActor, LoopThread, set_threads
from cluster.config import DrafterConfig, HiddenStateOptions, ObservabilityConfig, TlsConfig
from cluster.cpu_scheduling import run_in_foreground
from cluster.messages import Hello, Role
from cluster.spans import open_spans
from cluster.transport import listen
from cluster.types import ModelInfo
from drafters.draft_spans import DraftSpans
from drafters.loop import DrafterLoop
from drafters.sessions import SessionLimits
from engine.cpu_setup import configure_cpu
from engine.mailbox import DialingMailbox

NOT_OBSERVED = ObservabilityConfig()
# Maximum share of its time for requests of other drafters: to keep in step, and to score what it would have drafted.
SPARE_SHARE = 0.1


class DrafterActor(LoopActor):
    """Every method may be called from any thread. Processes of lookup drafters stay small: they import no torch.

    ``start`` fails when the drafter cannot be made or has another tokenizer than the target.

    Args:
        addresses: of targets that it dials.
        proposers: drafters of the pool that may draft for this one in a chain; made in this process, too.
        listens: where further targets connect to it; None: nowhere.
    """

    def __init__(
        self,
        config: DrafterConfig,
        name: str,
        target: ModelInfo,
        addresses: Sequence[str],
        token: str,
        proposers: Sequence[DrafterConfig] = (),
        tls: TlsConfig | None = None,
        observability: ObservabilityConfig = NOT_OBSERVED,
        listens: str | None = None,
    ) -> None:
        super().__init__(observability)
        run_in_foreground()
        self._observability = observability
        self._config = config
        self._proposers = tuple(proposers)
        self._name = name
        self._target = target
        self._hello = Hello(Role.DRAFTER, name, target.vocab_size, target.tokenizer_fingerprint, token)
        self._mailbox = DialingMailbox(self._hello, addresses, tls)
        self._listens, self._tls = listens, tls
        self.address: str | None = None  # where it listens, after ``start``

    def _start_loop(self) -> LoopThread:
        config = self._config
        if config.has_model:
            set_threads(config.resources.threads)
            configure_cpu()
        from drafters.registry import make_drafter
        from engine.cpu_setup import in_own_thread

        limits = SessionLimits(config.capacity, config.max_draft_len, 4 * config.capacity, max_outcomes=config.num_outcomes)
        host = calls = states = None
        if isinstance(config.options, HiddenStateOptions):
            from drafters.hidden_states.received import StateCalls, remote_host

            host, states = remote_host(config.options, config.device)
            calls = StateCalls(self._name, states, self._mailbox)
        drafter = in_own_thread(lambda: make_drafter(config, self._target, host, proposers=self._proposers))
        loop = DrafterLoop(self._name, drafter, self._mailbox, limits, spare_share=SPARE_SHARE)
        if calls is not None and states is not None:
            loop.sessions.linked, loop.take_waited_s = calls.linked, states.take_waited_s
        spans = open_spans(self._observability, self._name)
        if spans is not None:
            loop.sessions.spans = DraftSpans(spans, self._name)

        listener = None if self._listens is None else listen(self._listens, self._mailbox, self._hello, tls=self._tls)
        self.address = None if listener is None else listener.address

        def on_end() -> None:
            self._mailbox.close()
            if calls is not None:
                calls.close()
            if listener is not None:
                listener.close()
            if spans is not None:
                spans.close()

        run = partial(loop.run, clock=time.monotonic)
        return LoopThread(f"drafter {self._name}", run, self._mailbox.wake, on_end=on_end)

    def stalled_s(self) -> float:
        return self._mailbox.stalled_s()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Addresses of the targets."""
        self._mailbox.set_addresses(addresses)
