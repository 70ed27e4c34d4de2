"""Coding agents over the API and a scripted model, which calls their tools as a small real model cannot."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.types import Commit, Request
from tests.support.api import app_of, fast_tokenizer, finishing, listening, model_info, token_ids
from tests.support.coding_agents import CodingAgents, git_repository, program
from tests.support.scripted import ScriptedClient

MAX_MODEL_LEN = 2**18  # tokens of the scripted model are short
TITLE = "You are a title generator"  # how opencode's call beside each conversation begins


def text_of(request: Request) -> str:
    return fast_tokenizer().decode(list(request.prompt_token_ids), skip_special_tokens=False)


def last_turn(request: Request) -> str:
    return text_of(request).removesuffix("<|start|>assistant\n").rpartition("<|start|>user\n")[2]


def calling(name: str, **arguments: str) -> Callable[[Request], Iterator[Commit]]:
    """Calls a tool, and ends the turn once its result is there."""

    def script(request: Request) -> Iterator[Commit]:
        call = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        is_over = last_turn(request).startswith("<tool_response>") or TITLE in text_of(request)
        yield from finishing(request, token_ids("all done" if is_over else call))

    return script


@contextmanager
def agents(folder: Path, script: Callable[[Request], Iterator[Commit]]) -> Iterator[tuple[CodingAgents, ScriptedClient]]:
    cluster = ScriptedClient(model_info(MAX_MODEL_LEN), script)
    git_repository(folder, **{"greeting.txt": "hello\n"})
    with listening(app_of(cluster)) as url:
        yield CodingAgents(folder, url, cluster.info.name, MAX_MODEL_LEN), cluster


def test_codex_runs_commands_in_two_turns(tmp_path: Path) -> None:
    program("codex")
    shell = calling("exec_command", cmd="echo from-the-$((40 + 2))-shell")
    with agents(tmp_path / "repository", shell) as (agent, cluster):
        assert agent.codex("say hi").strip() == "all done"
        assert agent.codex("and again").strip() == "all done"
    assert [text_of(request).count("\nfrom-the-42-shell\n") for request in cluster.requests] == [0, 1, 1, 2]


def test_opencode_runs_commands_in_two_turns(tmp_path: Path) -> None:
    program("opencode")
    shell = calling("bash", command="echo from-the-$((40 + 2))-shell", description="Prints a word")
    with agents(tmp_path / "repository", shell) as (agent, cluster):
        assert "all done" in agent.opencode("say hi")
        assert "all done" in agent.opencode("and again")
    turns = [text_of(request) for request in cluster.requests if TITLE not in text_of(request)]
    assert [turn.count("from-the-42-shell") for turn in turns] == [0, 1, 1, 2]


def test_aider_edits_a_file(tmp_path: Path) -> None:
    program("aider")

    def edit(request: Request) -> Iterator[Commit]:
        yield from finishing(request, token_ids("Here it is.\n\ngreeting.txt\n```\ngoodbye\n```\n"))

    with agents(tmp_path / "repository", edit) as (agent, cluster):
        agent.aider("Say goodbye instead.", "greeting.txt")
    assert (tmp_path / "repository" / "greeting.txt").read_text() == "goodbye\n"
    assert "Say goodbye instead." in text_of(cluster.requests[0])
