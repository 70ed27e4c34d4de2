"""``outrider status``: what it shows, and what it says when there is nothing to show."""

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.client import ChainStatus, ClusterStatus, DrafterStatus, ScaleEvent, TargetStatus
from cluster.counts import NO_DRAFTS, Histogram
from cluster.errors import LinkClosed
from cluster.messages import OutcomeReport
from deploy import status as status_module
from deploy.chat_client import ServerFailed
from deploy.cli import app
from deploy.status import PATH, fetch, render, watch
from tests.support.api import app_of, listening, model_info, saying
from tests.support.scripted import ScriptedClient
from tests.support.terminal import COLUMNS, on_terminal

STATUS = ClusterStatus(
    model="smollm2-135m",
    policy="epsilon-greedy",
    table_version=12,
    targets=(TargetStatus("target-0", "ready", 3, 1, 2000, 1500, 123.4, 25.04),),
    drafters=(
        DrafterStatus("ngram", "ngram", "ready", 2, 1000, 400, 0.61, 0),
        DrafterStatus("small", "model", "down", 0, 0, 0, None, 4),
    ),
)


def shown(*pictures: object, width: int = 120) -> str:
    said = io.StringIO()
    console = Console(file=said, width=width)
    for picture in pictures:
        console.print(picture)
    return said.getvalue()


def test_chains_are_shown_with_their_predicted_time_per_token() -> None:
    chains = (
        ChainStatus(("ngram", "small"), 12.04, (None,)),
        ChainStatus(("small",), 14.0),
        ChainStatus(("tiny", "small"), 15.0, (0.7,)),
    )
    said = shown(render(dataclasses.replace(STATUS, chains=chains)))
    assert "chains by predicted time per token: ngram > small > target 12.0 ms, small > target 14.0 ms" in said
    assert "tiny > small > target 15.0 ms; SimScore of tiny and small 0.70" in " ".join(said.split())


def rows(text: str, of: str = "accepted") -> dict[str, list[str]]:
    """Of the table whose header names the column ``of``: cells by the first."""
    table = next(part for part in text.split("\n\n")[1:] if of in part.splitlines()[0])
    return {line.split()[0]: line.split()[1:] for line in table.splitlines()}


@contextmanager
def server(cluster: ScriptedClient) -> Iterator[str]:
    with listening(app_of(cluster)) as url:
        yield url


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Client:
    return httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))


def test_the_table_says_all_of_the_status() -> None:
    text = shown(render(STATUS))
    assert text.startswith(
        "smollm2-135m, routed by epsilon-greedy (table 12)\n40% of 1,000 verified draft tokens accepted\n"
    )
    target = dataclasses.replace(STATUS.targets[0], num_prompt_tokens=5000, num_cached_tokens=3000)
    assert "\n60% of 10,000 prompt tokens found" in shown(render(dataclasses.replace(STATUS, targets=(target, target))))
    assert rows(text, "KV cache")["target-0"] == ["ready", "3", "1", "25%", "of", "2,000", "123", "25.0"]
    found = rows(text)
    assert found["ngram"] == ["ready", "2", "1,000", "40%", "-", "0.6"]
    assert found["small"] == ["down", "0", "0", "-", "-", "-"]
    processes = rows(text, "kind")
    assert processes["ngram"] == ["ngram", "0", "-", "-", "-"]
    assert processes["small"] == ["model", "4", "-", "-", "-"]


def test_80_columns_hold_every_figure() -> None:
    """Only a long name is folded."""
    name = "a-drafter-with-a-name-of-forty-characters"
    many = DrafterStatus(name, "cascade", "quarantined", 256, 123_456_789, 98_765_432, 12345.6, 12)
    loaded = dataclasses.replace(many, device=f"{'9f' * 28}/cuda:3", num_bytes=130 * 2**30, num_loads=345)
    target = TargetStatus("target-10", "quarantined", 256, 1234, 123_456, 10, 12345.4, 12345.6)
    status = dataclasses.replace(STATUS, targets=(target,), drafters=(loaded,))
    lines = shown(render(status, status), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert "…" not in text
    assert "target-10  quarantined      256     1234  100% of 123,456    12,345  12345.6" in text
    assert "quarantined       256  123,456,789       80%         -   12345.6" in text
    assert "cascade        12    345  130.00 GB  cuda:3" in text


def test_what_drafters_take_of_memory_is_shown_where_it_is_counted() -> None:
    loaded = dataclasses.replace(STATUS.drafters[1], state="ready", device="node/cpu", num_bytes=3 * 2**29, num_loads=2)
    absent = dataclasses.replace(loaded, name="big", state="unloaded", device=None, num_bytes=0)
    text = shown(render(dataclasses.replace(STATUS, drafters=(loaded, absent))))
    found = rows(text, "memory")
    assert found["small"] == ["model", "4", "2", "1.50", "GB", "cpu"]
    assert found["big"] == ["model", "4", "2", "-", "-"]
    assert rows(text)["big"][0] == "unloaded"


def test_the_reason_of_a_drafter_that_is_not_ready_is_shown() -> None:
    refused = dataclasses.replace(STATUS.drafters[1], state="quarantined", reason="its tokenizer is not the target's")
    text = shown(render(dataclasses.replace(STATUS, drafters=(refused,))))
    assert "small is quarantined: its tokenizer is not the target's" in text


def test_the_newest_changes_of_replicas_are_shown_with_their_reasons() -> None:
    events = tuple(ScaleEvent(60.0 * n, "target", n, n + 1, f"need {n}.5") for n in range(1, 7))
    text = shown(render(dataclasses.replace(STATUS, scale_events=events)))
    assert ":00 target: 6 to 7 replicas: need 6.5" in text
    assert "need 2.5" not in text  # an older one


def test_what_a_drafter_had_prepared_and_was_sent_is_shown_where_there_is_any() -> None:
    link_s = Histogram((0.001,))
    link_s.note(0.0004)
    link_s.note(0.0012)
    outcomes = OutcomeReport(1200, 600, 240, 5000)
    counts = dataclasses.replace(NO_DRAFTS, outcomes=outcomes, link_s=link_s.snapshot(), num_fed=1000, fed_bytes=3_456_000)
    text = shown(render(dataclasses.replace(STATUS, drafters=(dataclasses.replace(STATUS.drafters[0], counts=counts),))))
    assert "ngram: of 1,200 verifications 50% as guessed, 20% another prepared outcome" in text
    assert "ngram: hidden states of 1,000 tokens, 3.5 KB each; a batch of drafts waits 0.80 ms" in text
    assert "verifications" not in shown(render(STATUS))
    assert "hidden states" not in shown(render(STATUS))


def test_recent_acceptance_is_of_the_time_between() -> None:
    later = dataclasses.replace(
        STATUS, drafters=(dataclasses.replace(STATUS.drafters[0], num_proposed=1100, num_accepted=490),)
    )
    assert rows(shown(render(later, STATUS)))["ngram"][4] == "90%"
    assert rows(shown(render(STATUS, later)))["ngram"][4] == "-"  # counters went back: the target was restarted
    assert rows(shown(render(STATUS, STATUS)))["ngram"][4] == "-"


def test_a_server_answers_with_its_status() -> None:
    with server(ScriptedClient(model_info(), saying("hello"))) as url, httpx.Client(base_url=url) as client:
        found = fetch(client)
    assert found.model == model_info().name
    assert found.targets[0].state == "ready"
    assert found.drafters[0].name == "ngram"
    assert found.drafters[0].num_accepted == 5


def test_a_cluster_that_is_away_is_a_503() -> None:
    scripted = ScriptedClient(model_info(), saying("hello"))
    scripted.failure = LinkClosed("no target is there")
    with server(scripted) as url, httpx.Client(base_url=url) as client, pytest.raises(ServerFailed, match=r"answered 503"):
        fetch(client)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (httpx.Response(401, json={"error": {"message": "bad key"}}), "the server answered 401: bad key"),
        (httpx.Response(404, text="<html>"), "the server answered 404: <html>"),
        (httpx.Response(200, text="[]"), "not Outrider of this version"),
        (httpx.Response(200, json={"model": "x"}), "not Outrider of this version"),
    ],
)
def test_an_answer_that_is_no_status_is_named(response: httpx.Response, words: str) -> None:
    with pytest.raises(ServerFailed) as caught:
        fetch(answering(lambda request: response))
    assert str(caught.value).startswith(f"http://server{PATH}: ")
    assert words in str(caught.value)


def test_a_newer_server_may_say_more() -> None:
    answer = dataclasses.asdict(STATUS) | {"news": 1}
    assert fetch(answering(lambda request: httpx.Response(200, json=answer))) == STATUS


def test_nobody_there() -> None:
    with pytest.raises(ServerFailed, match=r"Is the server running\?"):
        watch("http://127.0.0.1:9/v1", None, once=True, json=False, interval_s=1, console=Console(file=io.StringIO()))


def test_a_server_that_goes_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[ClusterStatus | BaseException] = [STATUS, ServerFailed("gone"), STATUS, KeyboardInterrupt()]

    def next_answer(client: httpx.Client) -> ClusterStatus:
        answer = answers.pop(0)
        if isinstance(answer, ClusterStatus):
            return answer
        raise answer

    monkeypatch.setattr(status_module, "fetch", next_answer)
    said = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=said, width=120, force_terminal=True)
    watch("http://server", None, once=False, json=False, interval_s=0.001, console=console)
    assert answers == []
    assert "gone" in said.getvalue()


def test_the_command_prints_json_for_programs() -> None:
    with server(ScriptedClient(model_info(), saying("hello"))) as url:
        result = CliRunner().invoke(app, ["status", "--url", url, "--once", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.output)["targets"][0]["name"] == "target-0"


def test_a_pipe_gets_one_plain_snapshot() -> None:
    with server(ScriptedClient(model_info(), saying("hello"))) as url:
        piped = subprocess.run(
            [sys.executable, "-m", "deploy.cli", "status", "--url", url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert piped.stdout.startswith(f"{model_info().name}, routed by scripted (table 1)\n")
    assert rows(piped.stdout, "KV cache")["target-0"][0] == "ready"
    assert "\x1b" not in piped.stdout


def test_a_terminal_of_80_columns_is_kept_up_to_date_until_ctrl_c() -> None:
    cluster = ScriptedClient(model_info(), saying("hello"))
    with server(cluster) as url, on_terminal("status", "--url", url, "--every", "0.1") as terminal:
        terminal.await_text("target-0  ready")
        cluster.target_state = "starting"
        terminal.await_text("target-0  starting")
        terminal.interrupt()
        assert terminal.wait_end() == 0
    assert max(map(len, terminal.text.splitlines())) <= COLUMNS


def test_a_terminal_that_cannot_move_its_cursor_gets_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an editor: a live table would show nothing there before its end."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(status_module, "fetch", lambda client: STATUS)
    said = io.StringIO()
    watch("http://server", None, once=False, json=False, interval_s=1, console=Console(file=said, force_terminal=True))
    assert "target-0" in said.getvalue()
