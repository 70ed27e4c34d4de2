"""How fast answers come with a drafter, and without: the whole engine, the real round, at a constant batch."""

from collections.abc import Sequence

from cluster.types import Request, RoutingTable
from deploy.bench.stable import Stable
from deploy.embedded import Completion, EmbeddedCluster, PoolEntry
from drafters.protocol import Drafter
from router.planner import StepPlanner

DRAFT_LEN = 7


def tokens_per_s(stable: Stable, requests: Sequence[Request], batch: int, drafter: Drafter | None) -> float:
    """Decoded tokens per second with ``batch`` requests at once. Prefill, which is the same with and without drafts, is left
    out: the clock runs from when all of a batch have their first token until the first of them ends.

    The drafter runs on the target's thread, so both have the machine to themselves in turn.
    """
    engine = stable.target if drafter is not None else stable.plain
    pool = {} if drafter is None else {"drafter": PoolEntry(drafter, DRAFT_LEN, capacity=batch, companion=True)}
    table = RoutingTable(version=0, defaults=tuple((name,) for name in pool) or ((),), max_draft_len=DRAFT_LEN)
    num_tokens, seconds = 0, 0.0
    with EmbeddedCluster(engine, stable.info, stable.cost, pool, StepPlanner(), table) as cluster:
        for start in range(0, len(requests), batch):
            window = _window(cluster.complete(requests[start : start + batch]))
            num_tokens, seconds = num_tokens + window[0], seconds + window[1]
    return num_tokens / seconds


def _window(completions: Sequence[Completion]) -> tuple[int, float]:
    """Tokens, and the seconds in which they were committed, while the whole batch was decoding."""
    start_s = max(completion.arrived_s[0] for completion in completions)
    end_s = min(completion.arrived_s[-1] for completion in completions)
    if end_s <= start_s:  # the answers are so short that one ended before the last began
        start_s, end_s = (pick(c.arrived_s[i] for c in completions) for pick, i in ((min, 0), (max, -1)))
    commits = [pair for c in completions for pair in zip(c.arrived_s, c.commits, strict=True)]
    return sum(len(commit.token_ids) for at_s, commit in commits if start_s < at_s <= end_s), end_s - start_s
