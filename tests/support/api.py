"""The HTTP API over a scripted cluster, with a tokenizer small enough to train on the spot."""

import functools
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from cluster.client import EngineClient
from cluster.types import Commit, FinishReason, ModelInfo, Request, TokenLogprobs
from deploy.api.app import create_app
from deploy.api.chat_template import ChatTemplate
from deploy.api.middleware import drop_trailers
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from tests.support.scripted import ScriptedClient, Step, spell

MODEL = "scripted"
MAX_MODEL_LEN = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_CORPUS = [
    "the answer is forty-two",
    "naïve café, 東京 and 大阪 ❤️ 🎉🎉🎊",
    "an answer to the other answers, word by word",
] * 8


@functools.cache
def fast_tokenizer() -> FastTokenizer:
    """Byte-level BPE whose tokens begin and end also amid characters."""
    fast = FastTokenizer(BPE())
    fast.pre_tokenizer = ByteLevel(add_prefix_space=False)
    fast.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=340, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    fast.train_from_iterator(_CORPUS, trainer)
    fast.add_special_tokens(["<|start|>", "<|end|>"])
    fast.add_tokens([AddedToken("<plain added>", special=False)])
    return fast


@functools.cache
def tokenizer(template: str = CHAT_TEMPLATE) -> Tokenizer:
    return Tokenizer(fast_tokenizer(), ChatTemplate(template, {"eos_token": "<|end|>"}))


def token_ids(text: str) -> tuple[int, ...]:
    return tuple(fast_tokenizer().encode(text, add_special_tokens=False).ids)


def end_id() -> int:
    end = fast_tokenizer().token_to_id("<|end|>")
    assert end is not None
    return end


def model_info(max_model_len: int = MAX_MODEL_LEN) -> ModelInfo:
    return ModelInfo(MODEL, tokenizer().vocab_size, max_model_len, (end_id(),), "scripted")


def saying(text: str, *, num_per_round: int = 3, drafter: str | None = "ngram") -> Callable[[Request], list[Step]]:
    """A script that answers every request with ``text`` and the end of the sequence, or as much as max_tokens allows."""

    def script(request: Request) -> list[Step]:
        return list(finishing(request, token_ids(text), num_per_round=num_per_round, drafter=drafter))

    return script


def finishing(request: Request, ids: Iterable[int], **how: Any) -> list[Commit]:
    wanted = (*ids, end_id())
    given = wanted[: request.sampling.max_tokens]
    commits = spell(request, given, **how)
    if (num_top := request.sampling.prompt_logprobs) is not None:
        top = tuple((i, -1.0 - i) for i in range(num_top))
        scored = tuple(TokenLogprobs(-float(i % 7), top, i % 7 + 1) for i in request.prompt_token_ids[1:])
        commits.insert(0, Commit(request.id, len(request.prompt_token_ids), (), prompt_logprobs=scored))
    finish = FinishReason.STOP if given == wanted else FinishReason.LENGTH
    return [*commits[:-1], replace(commits[-1], finish=finish)]


def app_of(cluster: EngineClient, words: Tokenizer | None = None, **options: Any) -> FastAPI:
    """The app over a cluster. ``options``: fields of `ApiSettings`, and what else `create_app` takes."""
    others = {name: options.pop(name) for name in ("peers", "try_policy", "swap_adapter") if name in options}
    return create_app(cluster, words or tokenizer(), ApiSettings(**options), **others)


def client_of(app: ASGIApp, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api", **options)


@asynccontextmanager
async def serving(
    script: Callable[[Request], Iterable[Step]] | None = None,
    template: str = CHAT_TEMPLATE,
    max_model_len: int = MAX_MODEL_LEN,
    **settings: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedClient]]:
    """An HTTP client of the app, and the scripted cluster behind it, which must have nothing open at the end."""
    info = model_info(max_model_len)
    cluster = ScriptedClient(info, script or saying("the answer"), drafters=("ngram", "small", "big"))
    app = app_of(cluster, tokenizer(template), **settings)
    ending = app.router.lifespan_context(app) if "observability" in settings else nullcontext()  # closes the audit log
    async with client_of(app) as http, ending:
        yield http, cluster
    assert cluster.num_open == 0


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "the answer is naïve ❤️🎉, or another"


async def ask(path: str, body: dict[str, Any], text: str = TEXT, **how: Any) -> dict[str, Any]:
    """The answer of a server that says ``text``, as ``how`` of `saying`."""
    async with serving(saying(text, **how)) as (http, _):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert "x-outrider-warning" not in response.headers
        return dict(response.json())


async def stream(path: str, body: dict[str, Any], text: str = TEXT, **how: Any) -> list[dict[str, Any]]:
    """As ``ask``, in chunks."""
    async with serving(saying(text, **how)) as (http, _):
        response = await http.post(path, json={**body, "stream": True})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return chunks_in(response.text)


def chunks_in(text: str) -> list[dict[str, Any]]:
    """Of a stream that is complete."""
    *chunks, done = events(text)
    assert done == "[DONE]"
    return list(map(json.loads, chunks))


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "what is it?"}], **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "the answer is", **fields}


def events(text: str) -> Iterator[str]:
    """The data of server-sent events."""
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            yield block.removeprefix("data: ")


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """The app behind a real HTTP server on a thread of its own; the address of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        drop_trailers()  # as a process of Serve does
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http")
        thread.start()
        try:
            host, port = listener.getsockname()
            yield f"http://{host}:{port}"  # connections wait in the listener until the server is up
        finally:
            server.should_exit = True
            thread.join()
