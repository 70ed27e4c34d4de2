"""Drives a `TargetEngine` as the round does, with drafts and holds that a test chooses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.sampling_params import SamplingParams
from cluster.types import Adapter, Request, TokenLogprobs
from drafters.protocol import Demand, Drafter
from engine.target import TargetEngine
from router.plan import Span

Drafts = Callable[[str, int], Sequence[int]]  # request and committed length -> draft tokens
Holds = Callable[[str, int], bool]  # request and pass -> whether it sits out


def nothing(request_id: str, length: int) -> Sequence[int]:
    return ()


@dataclass(slots=True)
class Played:
    """What came of it."""

    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    num_cached: dict[str, int] = field(default_factory=dict)  # prompt tokens found in the prefix cache
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def play(
    engine: TargetEngine,
    prompts: Mapping[str, Sequence[int]],
    sampling: Mapping[str, SamplingParams],
    drafts: Drafts = nothing,
    holds: Holds = lambda request_id, number: False,
    preempts: Callable[[str, int], bool] = lambda request_id, number: False,
    chunk_len: int = 32,
    max_passes: int = 2000,
    on_tokens: Callable[[str, Sequence[int]], None] = lambda request_id, token_ids: None,
    salt: str = "",
    adapters: Mapping[str, Adapter] | None = None,
) -> Played:
    """Serves all requests at once to their ``max_tokens`` and releases them.

    Args:
        preempts: request and pass -> whether its blocks are given up before the pass, to be computed again.
        on_tokens: hears of the tokens of every pass.
        adapters: by request, loaded.
    """
    played = Played()
    tokens = {name: list(prompt) for name, prompt in prompts.items()}
    computed: dict[str, int] = {}
    live = list(prompts)
    while live:
        assert played.num_passes < max_passes, f"{live} do not end"
        spans = []
        for name in live:
            if name in computed and preempts(name, played.num_passes):
                engine.release(name)
                del computed[name]
            is_new = name not in computed
            if is_new:
                adapter = (adapters or {}).get(name)
                request = Request(name, tuple(prompts[name]), sampling[name], 0.0, cache_salt=salt, adapter=adapter)
                expected = engine.num_cached(request, tokens[name])
                computed[name] = engine.open(request, tokens[name])
                assert computed[name] == expected, f"{name}: {computed[name]} tokens are cached, not {expected}"
                played.num_cached.setdefault(name, computed[name])
            elif holds(name, played.num_passes):
                continue
            found = nothing if is_new else drafts  # a round has no proposal for a request that it admits
            spans.append(_span(name, tokens[name], computed[name], len(prompts[name]), sampling[name], found, chunk_len))
        outcomes = engine.execute(spans)
        played.num_passes += 1
        for span, outcome in zip(spans, outcomes, strict=True):
            _take(span, outcome, tokens[span.request_id], computed, played)
            known = played.prompt_logprobs.setdefault(span.request_id, [])
            known += outcome.prompt_logprobs[len(known) + 1 - outcome.scored_from :]
            on_tokens(span.request_id, outcome.chosen)
        for name in [name for name in live if len(tokens[name]) >= len(prompts[name]) + sampling[name].max_tokens]:
            engine.release(name)
            live.remove(name)
            played.outputs[name] = tuple(tokens[name][len(prompts[name]) :][: sampling[name].max_tokens])
    engine.check_integrity()
    return played


def _span(
    name: str,
    tokens: Sequence[int],
    computed_len: int,
    prompt_len: int,
    sampling: SamplingParams,
    drafts: Drafts,
    chunk_len: int,
) -> Span:
    left = tokens[computed_len:]
    if len(left) > chunk_len:
        return Span.bound(name, computed_len, tuple(left[:chunk_len]), samples=False)
    room = prompt_len + sampling.max_tokens - len(tokens) - 1
    drafted = tuple(drafts(name, len(tokens)))[:room] if len(left) == 1 else ()
    return Span.bound(name, computed_len, (*left, *drafted), len(drafted))


def _take(span: Span, outcome: Span, tokens: list[int], computed: dict[str, int], played: Played) -> None:
    assert outcome.error is None, outcome.error
    name = span.request_id
    if not outcome.chosen:
        computed[name] = span.base_len + len(span.token_ids) if outcome.computed_len is None else outcome.computed_len
        return
    tokens.extend(outcome.chosen)
    computed[name] = len(tokens) - 1
    played.num_drafted += span.num_drafts
    played.num_accepted += outcome.num_accepted
    played.logprobs.setdefault(name, []).extend(outcome.logprobs)


def play_with_drafter(
    engine: TargetEngine, drafter: Drafter, asked: Mapping[str, Request], max_draft_len: int = 5
) -> tuple[list[object], dict[tuple[str, int], tuple[int, ...]]]:
    """Serves ``asked`` with a drafter in this process: (outputs, accepted and drafted tokens), all proposals."""
    proposals = {}

    def drafts(name: str, committed_len: int) -> Sequence[int]:
        (draft,) = drafter.propose([Demand(f"1/{name}", max_draft_len)])
        proposals[name, committed_len] = draft.token_ids
        return tuple(draft.token_ids)

    for name, one in asked.items():
        drafter.open(f"1/{name}", one.prompt_token_ids, len(one.prompt_token_ids), one.sampling)
    played = play(
        engine,
        {name: one.prompt_token_ids for name, one in asked.items()},
        {name: one.sampling for name, one in asked.items()},
        drafts,
        on_tokens=lambda name, token_ids: drafter.extend(f"1/{name}", token_ids),
    )
    return [played.outputs, played.num_accepted, played.num_drafted], proposals
