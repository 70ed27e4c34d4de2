"""``outrider status``: tables of targets and drafters, live on a terminal. Laid out for 80 columns."""

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import httpx
from pydantic import TypeAdapter, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.client import ChainStatus, ClusterStatus, DrafterStatus, ScaleEvent, TargetStatus
from cluster.counts import summed
from deploy.chat_client import ServerFailed, connect, get

PATH = "/v1/outrider/status"  # returns dataclasses.asdict(ClusterStatus)
DEADLINE_S = 5.0
STATE_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "down": "red",
    "quarantined": "red",
    "unloaded": "dim",
}
UNKNOWN = "-"
NUM_CHANGES = 4  # of numbers of replicas that are shown

_STATUS = TypeAdapter(ClusterStatus)


def watch(url: str, api_key: str | None, *, once: bool, json: bool, interval_s: float, console: Console) -> None:
    """Shows the status of the server at ``url`` every ``interval_s`` until Ctrl-C: tables, or one JSON object per line.

    Tables are updated in place, or printed once if ``console`` cannot move its cursor; they wait for a server that is gone.

    Raises ServerFailed: the server does not answer at the start, or with ``json`` at any time.
    """
    with suppress(KeyboardInterrupt), connect(url, api_key, DEADLINE_S) as client:
        first = fetch(client)
        if json:
            _print_lines(client, first, once, interval_s, console)
        elif once or not console.is_terminal or console.is_dumb_terminal:
            console.print(render(first))
        else:
            with Live(render(first), console=console, auto_refresh=False) as live:
                for table in _updates(client, first, interval_s):
                    live.update(table, refresh=True)


def fetch(client: httpx.Client) -> ClusterStatus:
    """The server's status. Raises ServerFailed."""
    response = get(client, PATH)
    try:
        return _STATUS.validate_json(response.content)
    except ValidationError as error:
        raise ServerFailed(f"{response.url}: the server is not Outrider of this version") from error


def _print_lines(client: httpx.Client, first: ClusterStatus, once: bool, interval_s: float, console: Console) -> None:
    print(_STATUS.dump_json(first).decode(), file=console.file, flush=True)
    while not once:
        time.sleep(interval_s)
        print(_STATUS.dump_json(fetch(client)).decode(), file=console.file, flush=True)


def _updates(client: httpx.Client, first: ClusterStatus, interval_s: float) -> Iterator[RenderableType]:
    before = first
    while True:
        time.sleep(interval_s)
        try:
            status = fetch(client)
        except ServerFailed as error:
            yield Group(render(before), Text(str(error), style="red"))
        else:
            yield render(status, before)
            before = status


def render(status: ClusterStatus, before: ClusterStatus | None = None) -> RenderableType:
    """The status as tables; with the previous one also the acceptance since then."""
    title = Text.assemble((status.model, "bold"), f", routed by {status.policy} (table {status.table_version})")
    blank = Text("")
    return Group(
        title,
        *([Text("planned by " + ", ".join(status.planned_by), style="dim")] if status.planned_by else ()),
        *([Text(_chains(status.chains), style="dim")] if status.chains else ()),
        Text(_acceptance(status.drafters) + _prefix_hits(status.targets)),
        blank,
        _targets(status.targets),
        blank,
        *_objectives(status.targets),
        _drafters(status.drafters, before.drafters if before else ()),
        *(Text(_outcomes(d)) for d in status.drafters if d.counts.outcomes.num_commits),
        *(Text(_fed(d)) for d in status.drafters if d.counts.num_fed),
        blank,
        _processes(status.drafters),
        *(Text(_change(event), style="dim") for event in status.scale_events[-NUM_CHANGES:]),
        *(Text(note, style="red") for note in status.notes),
        *(Text(f"{d.name} is {d.state}: {d.reason}", style="red") for d in status.drafters if d.reason is not None),
    )


def _chains(chains: tuple[ChainStatus, ...]) -> str:
    scores = {pair: score for one in chains for pair, score in zip(pairwise(one.chain), one.scores, strict=False) if score}
    fastest = [f"{' > '.join((*one.chain, 'target'))} {one.per_token_ms:.1f} ms" for one in chains]
    similar = [f"; SimScore of {lower} and {upper} {score:.2f}" for (lower, upper), score in scores.items()]
    return "chains by predicted time per token: " + ", ".join(fastest) + "".join(similar)


def _change(event: ScaleEvent) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.at_s))
    return f"{at} {event.name}: {event.num_before} to {event.num_after} replicas: {event.reason}"


def _acceptance(drafters: tuple[DrafterStatus, ...]) -> str:
    num_proposed, num_accepted = sum(d.num_proposed for d in drafters), sum(d.num_accepted for d in drafters)
    if not num_proposed:
        return "no draft tokens verified yet"
    return f"{_share(num_accepted, num_proposed)} of {num_proposed:,} verified draft tokens accepted"


def _prefix_hits(targets: tuple[TargetStatus, ...]) -> str:
    num_cached, num_tokens = sum(t.num_cached_tokens for t in targets), sum(t.num_prompt_tokens for t in targets)
    return f"\n{_share(num_cached, num_tokens)} of {num_tokens:,} prompt tokens found in prefix caches" if num_tokens else ""


def _targets(targets: tuple[TargetStatus, ...]) -> Table:
    table = _table("target", "state", "running", "waiting", "KV cache", "tokens/s", "pass ms")
    for target in targets:
        table.add_row(
            Text(target.name),
            _state(target.state),
            f"{target.num_running}",
            f"{target.num_waiting}",
            f"{_share(target.num_blocks - target.num_free_blocks, target.num_blocks)} of {target.num_blocks:,}",
            f"{target.tokens_per_s:,.0f}",
            f"{target.step_ms:.1f}",
        )
    return table


def _objectives(targets: tuple[TargetStatus, ...]) -> tuple[RenderableType, ...]:
    """Attainment by class over all targets; nothing without objectives."""
    counts = summed(tuple(one for target in targets for one in target.slo))
    if not counts:
        return ()
    table = _table("class", "answers", "met", "TTFT met", "TPOT met", "refused")
    for one in counts:
        table.add_row(
            Text(one.name),
            f"{one.num_answers:,}",
            _share(one.num_met, one.num_answers),
            _share(one.num_ttft_met, one.num_ttft_met + one.num_ttft_missed),
            _share(one.num_tpot_met, one.num_tpot_met + one.num_tpot_missed),
            f"{one.num_refused:,}",
        )
    return table, Text("")


def _drafters(drafters: tuple[DrafterStatus, ...], before: tuple[DrafterStatus, ...]) -> Table:
    """Requests and acceptance."""
    table = _table("drafter", "state", "requests", "verified", "accepted", "recently", "reply ms")
    earlier = {drafter.name: drafter for drafter in before}
    for drafter in drafters:
        table.add_row(
            Text(drafter.name),
            _state(drafter.state),
            f"{drafter.num_requests}",
            f"{drafter.num_proposed:,}",
            _share(drafter.num_accepted, drafter.num_proposed),
            _recent_acceptance(drafter, earlier.get(drafter.name)),
            UNKNOWN if drafter.reply_ms is None else f"{drafter.reply_ms:.1f}",
        )
    return table


def _outcomes(drafter: DrafterStatus) -> str:
    """Of a drafter that prepares outcomes of verifications."""
    counts = drafter.counts.outcomes
    own, hits = (_share(num, counts.num_commits) for num in (counts.num_own, counts.num_hits))
    return f"{drafter.name}: of {counts.num_commits:,} verifications {own} as guessed, {hits} another prepared outcome"


def _fed(drafter: DrafterStatus) -> str:
    """Of one that a tensor link brings hidden states."""
    counts = drafter.counts
    wait_ms = 1e3 * counts.link_s.total / max(1, sum(counts.link_s.counts))
    each = f"{counts.fed_bytes / counts.num_fed / 1e3:,.1f} KB each"
    return f"{drafter.name}: hidden states of {counts.num_fed:,} tokens, {each}; a batch of drafts waits {wait_ms:.2f} ms"


def _processes(drafters: tuple[DrafterStatus, ...]) -> Table:
    """Kind, restarts, loads and memory."""
    table = _table("drafter", "kind", "restarts", "loads", "memory", "device")
    for drafter in drafters:
        loads = UNKNOWN if drafter.num_bytes is None else f"{drafter.num_loads}"
        memory = device = UNKNOWN
        if drafter.device and drafter.num_bytes:
            memory, device = f"{drafter.num_bytes / 2**30:.2f} GB", drafter.device.rpartition("/")[2]
        table.add_row(Text(drafter.name), drafter.kind, f"{drafter.num_restarts}", loads, memory, device)
    return table


def _recent_acceptance(drafter: DrafterStatus, before: DrafterStatus | None) -> str:
    """Acceptance since the previous status; unknown if a restarted process has reset its counters."""
    if before is None or before.num_proposed > drafter.num_proposed:
        return UNKNOWN
    return _share(drafter.num_accepted - before.num_accepted, drafter.num_proposed - before.num_proposed)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else UNKNOWN


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, ""))


def _table(*columns: str) -> Table:
    """The first column takes the remaining width and folds long names; numbers are never cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=i > 0, overflow="fold")
    return table
