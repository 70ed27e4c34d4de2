"""One tenant's long texts leave threads for those of others."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import deploy.api.service
from deploy.api.tasks import ThreadShares
from deploy.api.tokenizer import Tokenizer
from tests.support.api import completion_body
from tests.support.tenants import auth, limited


class _Work:
    """Runs until it is released."""

    def __init__(self) -> None:
        self.running = Counter[str]()
        self.release, self.begun = asyncio.Event(), asyncio.Event()  # begun: three of them run

    async def of(self, tenant: str) -> str:
        self.running[tenant] += 1
        if self.running.total() == 3:
            self.begun.set()
        await self.release.wait()
        self.running[tenant] -= 1
        return tenant


async def _settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_tenant_has_so_many_threads_at_once(is_shared: bool) -> None:
    shares, work = ThreadShares(2), _Work()
    shares.is_shared = is_shared
    calls = [asyncio.create_task(shares.run(one, lambda one=one: work.of(one))) for one in ["a"] * 5 + ["b"]]  # type: ignore[misc]
    await _settle()
    assert work.running == {"a": 2 if is_shared else 5, "b": 1}
    work.release.set()
    assert await asyncio.gather(*calls) == ["a"] * 5 + ["b"]


async def test_a_thread_is_held_until_its_work_ends_also_if_the_caller_left() -> None:
    shares, work = ThreadShares(1), _Work()
    shares.is_shared = True
    calls = [asyncio.create_task(shares.run("a", lambda: work.of("a"))) for _ in range(3)]
    await _settle()
    for call in calls[:2]:  # one that runs, and one that waits
        call.cancel()
    await asyncio.wait(calls[:2])
    await _settle()
    assert work.running == {"a": 1}
    work.release.set()
    assert await calls[2] == "a"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_long_texts_of_a_tenant_are_encoded_within_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    work = _Work()

    async def encode(self: Tokenizer, text: Any, *_: object, **__: object) -> tuple[int, ...]:
        await work.of("short" if text == "a" else "long")
        return (5,)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    monkeypatch.setattr(Tokenizer, "encode_chat", encode)
    monkeypatch.setattr(deploy.api.service, "ThreadShares", lambda: ThreadShares(1))
    text = "a" * 10_000
    body: dict[str, Any] = {"model": completion_body()["model"]}
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    async with limited(tmp_path) as (http, _):
        keys = ("sk-one", "sk-two", "sk-one", "sk-free")  # the first two are of one tenant
        calls = [asyncio.create_task(http.post(path, json=body, headers=auth(key))) for key in keys]
        short = asyncio.create_task(http.post("/tokenize", json={"prompt": "a"}, headers=auth("sk-one")))
        await asyncio.wait_for(work.begun.wait(), 60)
        await _settle()
        assert work.running == {"long": 2, "short": 1}
        work.release.set()
        assert {(await call).status_code for call in (*calls, short)} == {200}
