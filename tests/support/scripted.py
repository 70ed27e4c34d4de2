"""An in-memory ``EngineClient`` for tests: answers from a script and records its requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from cluster.client import ClusterStatus, DrafterStatus, TargetStatus
from cluster.types import Commit, ModelInfo, Request

# A commit, an event to wait for, or an error.
Step = Commit | asyncio.Event | Exception


class ScriptedClient:
    """Answers each request with ``script(request)``. ``requests``: all received; ``aborted``: ids of those closed early."""

    def __init__(
        self, info: ModelInfo, script: Callable[[Request], Iterable[Step]], *, drafters: tuple[str, ...] = ("ngram",)
    ) -> None:
        self.info = info
        self.script = script
        self.target_state = "ready"
        self.failure: Exception | None = None  # raised instead of any answer
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.num_open = 0
        self.is_linked = True
        self._drafters = drafters
        self._arrivals = asyncio.Condition()

    async def model(self) -> ModelInfo:
        if self.failure is not None:
            raise self.failure
        return self.info

    async def generate(self, request: Request) -> AsyncIterator[Commit]:
        async with self._arrivals:
            self.requests.append(request)
            self._arrivals.notify_all()
        self.num_open += 1
        finished = False
        try:
            for step in self.script(request):
                match step:
                    case Commit():
                        finished = step.finish is not None
                        yield step
                    case asyncio.Event():
                        await step.wait()
                    case Exception():
                        finished = True
                        raise step
        finally:
            self.num_open -= 1
            if not finished:
                self.aborted.append(request.id)

    async def status(self) -> ClusterStatus:
        if self.failure is not None:
            raise self.failure
        return ClusterStatus(
            model=self.info.name,
            policy="scripted",
            table_version=1,
            targets=(TargetStatus("target-0", self.target_state, self.num_open, 0, 64, 64, 0.0, 1.0),),
            drafters=tuple(DrafterStatus(name, name, "ready", 0, 8, 5, 1.5) for name in self._drafters),
        )

    async def asked(self, num_requests: int) -> None:
        """Waits until so many requests have arrived."""
        async with self._arrivals:
            await self._arrivals.wait_for(lambda: len(self.requests) >= num_requests)

    async def close(self) -> None:
        return None


def spell(request: Request, token_ids: Iterable[int], *, num_per_round: int = 1, drafter: str | None = None) -> list[Commit]:
    """Commits of ``token_ids``, so many per round; with a drafter all but the last token of a round are its drafts."""
    tokens = tuple(token_ids)
    base = len(request.prompt_token_ids)
    commits = []
    for start in range(0, len(tokens), num_per_round):
        piece = tokens[start : start + num_per_round]
        num_drafts = len(piece) - 1 if drafter is not None else 0
        commits.append(Commit(request.id, base + start, piece, num_drafts, num_drafts, drafter if num_drafts else None))
    return commits
