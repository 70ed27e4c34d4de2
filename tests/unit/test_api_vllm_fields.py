"""Fields that vLLM's clients send, and what they do here."""

import asyncio
import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from cluster.sampling_params import SamplingParams
from cluster.types import Prefill, Request, TokenLogprobs
from deploy.api.tokenizer import Tokenizer
from tests.support.api import (
    CHAT,
    COMPLETIONS,
    MAX_MODEL_LEN,
    MODEL,
    TEXT,
    ask,
    chat_body,
    chunks_in,
    completion_body,
    end_id,
    finishing,
    serving,
    stream,
    token_ids,
    tokenizer,
)
from tests.support.asgi import Caller
from tests.support.scripted import Step

OFF: dict[str, Any] = {
    "bad_words": [],
    "truncate_prompt_tokens": None,
    "priority": 0,
    "prompt_logprobs": None,
    "logits_processors": [],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "structured_outputs": None,
    "spaces_between_special_tokens": True,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "return_token_ids": False,
    "allowed_token_ids": None,
}


async def request_of(path: str, body: dict[str, Any]) -> Request:
    async with serving() as (http, cluster):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        return cluster.requests[0]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (COMPLETIONS, completion_body)])
async def test_values_that_turn_a_field_off_change_nothing(path: str, body: Any) -> None:
    plain = await request_of(path, body(seed=1))
    for fields in (OFF, {"top_k": -1}, {"top_k": 0}):
        assert (await request_of(path, body(seed=1, **fields))).sampling == plain.sampling


async def test_only_allowed_tokens() -> None:
    request = await request_of(CHAT, chat_body(seed=1, max_tokens=3, allowed_token_ids=[5, 7]))
    assert request.sampling == SamplingParams(max_tokens=3, seed=1, allowed_token_ids=(5, 7))


async def test_tools_are_ignored_when_the_caller_chooses_none() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = await request_of(CHAT, chat_body(tools=tools, tool_choice="none"))
    assert request.prompt_token_ids == (await request_of(CHAT, chat_body())).prompt_token_ids


async def test_a_chat_without_the_beginning_of_the_answer() -> None:
    request = await request_of(CHAT, chat_body(add_generation_prompt=False))
    assert request.prompt_token_ids == token_ids("<|start|>user\nwhat is it?<|end|>\n")


async def test_the_final_message_is_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the answer "}]
    for fields in ({}, {"add_generation_prompt": False}):
        request = await request_of(CHAT, chat_body(messages=messages, continue_final_message=True, **fields))
        assert request.prompt_token_ids == token_ids("<|start|>user\na<|end|>\n<|start|>assistant\nthe answer ")


async def test_special_tokens_are_text_where_they_are_not_skipped() -> None:
    ids = (*token_ids("the "), end_id(), *token_ids("answer"))

    def script(request: Request) -> list[Step]:
        return list(finishing(request, ids))

    async with serving(script) as (http, _):
        for fields, text in (({}, "the answer"), ({"skip_special_tokens": False}, "the <|end|>answer")):
            answer = (await http.post(CHAT, json=chat_body(ignore_eos=True, **fields))).json()
            assert answer["choices"][0]["message"]["content"].removesuffix("<|end|>") == text
        # The end of the sequence is no part of the text.
        answer = (await http.post(CHAT, json=chat_body(skip_special_tokens=False))).json()
        assert answer["choices"][0]["message"]["content"] == "the <|end|>answer"


@pytest.mark.parametrize("num_per_round", [1, 50])
async def test_the_stop_string_is_part_of_the_text_if_asked_for(num_per_round: int) -> None:
    body = chat_body(stop=["r is", "never"], include_stop_str_in_output=True, drafting_details=True)
    answer = await ask(CHAT, body, num_per_round=num_per_round)
    assert answer["choices"][0]["message"]["content"] == "the answer is"
    assert answer["choices"][0]["finish_reason"] == "stop"
    (segments,) = answer["outrider"]["segments"]
    assert "".join(segment["text"] for segment in segments) == "the answer is"


COMMA = token_ids(",")[0]


def stopped_by_a_comma(request: Request) -> list[Step]:
    *steps, last = finishing(request, token_ids("the answer"))
    return [*steps, replace(last, token_ids=(*last.token_ids[:-1], COMMA))]


async def test_the_stop_token_is_part_of_the_text_if_asked_for() -> None:
    async with serving(stopped_by_a_comma) as (http, _):
        for include, text in ((False, "the answer"), (True, "the answer,")):
            body = chat_body(stop_token_ids=[COMMA], include_stop_str_in_output=include)
            answer = (await http.post(CHAT, json=body)).json()
            assert answer["choices"][0]["message"]["content"] == text


async def test_token_ids_of_a_chat() -> None:
    whole = await ask(CHAT, chat_body(return_token_ids=True))
    assert tokenizer().text_of(whole["prompt_token_ids"]).startswith("<|start|>user\nwhat is it?")
    assert whole["choices"][0]["token_ids"] == [*token_ids(TEXT), end_id()]
    first, *rest = await stream(CHAT, chat_body(return_token_ids=True))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    streamed = [i for chunk in rest for i in chunk["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]
    plain = await ask(CHAT, chat_body())
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_token_ids_of_completions() -> None:
    body = completion_body(prompt=["the", "an answer"], return_token_ids=True, max_tokens=3)
    whole = await ask(COMPLETIONS, body)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [
        list(token_ids("the")),
        list(token_ids("an answer")),
    ]
    assert [choice["token_ids"] for choice in whole["choices"]] == [list(token_ids(TEXT)[:3])] * 2
    chunks = await stream(COMPLETIONS, body)
    prompts = {c["choices"][0]["index"]: c["choices"][0].get("prompt_token_ids") for c in reversed(chunks)}
    assert prompts == {0: list(token_ids("the")), 1: list(token_ids("an answer"))}


async def test_echo() -> None:
    body = completion_body(prompt=["the ", "an answer "], echo=True, n=2)
    whole = await ask(COMPLETIONS, body)
    assert [choice["text"] for choice in whole["choices"]] == ["the " + TEXT] * 2 + ["an answer " + TEXT] * 2
    texts = dict.fromkeys(range(4), "")
    for chunk in await stream(COMPLETIONS, body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]
    ids = await ask(COMPLETIONS, completion_body(prompt=[end_id(), *token_ids("the ")], echo=True))
    assert ids["choices"][0]["text"] == "<|end|>the " + TEXT


async def test_top_logprobs_of_a_completion_include_the_chosen_token() -> None:
    def script(request: Request) -> list[Step]:
        top = ((7, -0.1), (8, -0.2))[: request.sampling.top_logprobs]
        return [
            replace(commit, logprobs=tuple(TokenLogprobs(-3.0, top) for _ in commit.token_ids))
            for commit in finishing(request, token_ids("the answer"))
        ]

    async with serving(script) as (http, _):
        for num_top in (0, 2):
            answer = (await http.post(COMPLETIONS, json=completion_body(logprobs=num_top))).json()
            logprobs = answer["choices"][0]["logprobs"]
            for name, logprob, top in zip(
                logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
            ):
                assert top[name] == logprob == -3.0
                assert len(top) == num_top + 1


def drafted(request: Request) -> list[Step]:
    """Six passes: without a draft, of drafts of three, two, three and one token, and again without one."""
    sizes = [(1, 0, 0), (3, 3, 2), (1, 2, 0), (4, 3, 3), (1, 1, 0), (1, 0, 0)]
    ids = iter((*token_ids("the answer is forty-two, or another")[:10], end_id()))
    commits, base = [], len(request.prompt_token_ids)
    template = finishing(request, ())[0]
    for num_tokens, num_proposed, num_accepted in sizes:
        piece = tuple(next(ids) for _ in range(num_tokens))
        drafter = "ngram" if num_proposed else None
        commit = replace(template, base_len=base, token_ids=piece, num_proposed=num_proposed, num_accepted=num_accepted)
        commits.append(replace(commit, drafter=drafter, finish=None))
        base += num_tokens
    first = replace(commits[0], prefill=Prefill(num_cached_tokens=16, queue_s=0.5, prefill_s=0.25))
    return [first, *commits[1:-1], replace(commits[-1], finish=template.finish)]


SPECULATIVE_DECODING = {
    "mean_acceptance_length": 1 + 5 / 4,
    "draft_acceptance_rate": 5 / 9,
    "acceptance_histogram": [2, 0, 1, 1],
    "acceptance_histogram_by_draft_length": {"1": [1, 0], "2": [1, 0, 0], "3": [0, 0, 1, 1]},
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 9,
    "num_spec_tokens": 3,
}


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body), (COMPLETIONS, completion_body)])
async def test_how_speculative_decoding_went(path: str, body: Any) -> None:
    async with serving(drafted) as (http, _):
        whole = (await http.post(path, json=body(max_tokens=20))).json()
        assert whole["metrics"] == {"speculative_decoding": SPECULATIVE_DECODING}
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await http.post(path, json=body(max_tokens=20, **options))
        *chunks, last = chunks_in(response.text)
        assert last["choices"] == []
        assert last["metrics"] == whole["metrics"]
        assert last["usage"] == whole["usage"]
        assert all("metrics" not in chunk for chunk in chunks)
        # vLLM's describe one sequence; the cached tokens of a prompt count once.
        several = (await http.post(path, json=body(max_tokens=20, n=2))).json()
        assert "metrics" not in several
        assert several["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_a_draft_that_ends_the_answer_is_followed_by_no_bonus_token() -> None:
    def script(request: Request) -> list[Step]:
        (commit,) = finishing(request, token_ids("the answer"), num_per_round=8)
        num = len(commit.token_ids)
        return [replace(commit, num_proposed=num + 2, num_accepted=num, drafter="ngram")]

    async with serving(script) as (http, _):
        answer = (await http.post(CHAT, json=chat_body())).json()
    found = answer["metrics"]["speculative_decoding"]
    assert found["mean_acceptance_length"] == found["num_accepted_draft_tokens"] == answer["usage"]["completion_tokens"]


async def test_an_answer_without_drafts_has_an_empty_histogram() -> None:
    answer = await ask(CHAT, chat_body(), drafter=None)
    assert answer["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0],
        "acceptance_histogram_by_draft_length": {},
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": 0,
    }


async def test_tokenize_and_detokenize() -> None:
    async with serving(max_request_bytes=5000, max_held_bytes=5000) as (http, _):
        text = "the <|end|> café"
        answer = (await http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True})).json()
        ids = list(token_ids(text))
        strs = [tokenizer().token_strs([i])[0] for i in ids]
        assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": strs}
        assert "<|end|>" in strs
        assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}
        messages = chat_body()["messages"]
        chat = (await http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
        assert chat["tokens"] == list(token_ids("<|start|>user\nwhat is it?<|end|>\n"))
        assert chat["token_strs"] is None
        # Longer than the model's context, which is no matter here.
        long = (await http.post("/tokenize", json={"prompt": "an answer " * 400})).json()
        assert long["count"] == len(token_ids("an answer " * 400)) > 256
        for path, body, status, param in (
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": messages}, 400, "prompt"),
            ("/tokenize", {"prompt": 5}, 400, "prompt"),
            ("/tokenize", {"prompt": "a", "model": "gpt-17"}, 404, "model"),
            ("/tokenize", {"messages": messages, "add_special_tokens": True}, 400, "add_special_tokens"),
            ("/detokenize", {"tokens": [1, 10**6]}, 400, "tokens.1"),
            ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
            ("/detokenize", {}, 400, "tokens"),
            ("/detokenize", {"tokens": [1], "model": "gpt-17"}, 404, "model"),
        ):
            response = await http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_the_reason_of_a_stop_is_told() -> None:
    for path, body in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
        assert (await ask(path, body(stop=["r is", "never"])))["choices"][0]["stop_reason"] == "r is"
        assert (await ask(path, body(max_tokens=2)))["choices"][0]["stop_reason"] is None
        assert (await ask(path, body(max_tokens=50)))["choices"][0]["stop_reason"] is None
        *chunks, last = await stream(path, body(stop=["r is"]))
        assert last["choices"][0]["stop_reason"] == "r is"
        assert all("stop_reason" not in chunk["choices"][0] for chunk in chunks)
        async with serving(stopped_by_a_comma) as (http, _):
            answer = (await http.post(path, json=body(stop_token_ids=[COMMA]))).json()
            assert answer["choices"][0]["stop_reason"] == COMMA


async def test_the_usage_so_far_is_in_each_chunk_if_asked_for() -> None:
    for path, body in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
        is_read = asyncio.Event()

        def script(request: Request, is_read: asyncio.Event = is_read) -> list[Step]:
            first, *others = finishing(request, token_ids(TEXT))
            return [first, is_read, *others]

        caller = Caller(script)
        asked = {"include_usage": True, "continuous_usage_stats": True}
        answer = caller.start(body(max_tokens=50, stream=True, stream_options=asked), path)
        await caller.got_body.wait()
        is_read.set()
        await answer
        chunks = chunks_in(caller.body)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, len(token_ids(TEXT)) + 1)
        assert chunks[-1]["choices"] == []
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
        (*rest, last) = await stream(path, body(stream_options={"include_usage": True}))
        assert all(chunk["usage"] is None for chunk in rest)
        assert last["usage"] is not None


async def test_the_load_counts_requests() -> None:
    release = asyncio.Event()

    def slow(request: Request) -> list[Step]:
        return [release, *finishing(request, token_ids(TEXT))]

    async with serving(slow, status_ttl_s=0.0) as (http, cluster):
        assert (await http.get("/load")).json() == {"server_load": 0}
        calls = [asyncio.create_task(http.post(CHAT, json=chat_body())) for _ in range(3)]
        await cluster.asked(3)
        assert (await http.get("/load")).json() == {"server_load": 3}
        release.set()
        await asyncio.gather(*calls)
        assert (await http.get("/load")).json() == {"server_load": 0}


async def test_the_server_describes_itself() -> None:
    async with serving(sampling_defaults={"temperature": 0.6}, max_n=4) as (http, _):
        info = (await http.get("/server_info")).json()
        assert (info["model"]["name"], info["model"]["max_model_len"]) == (MODEL, 256)
        assert (info["sampling_defaults"], info["max_n"]) == ({"temperature": 0.6}, 4)
        assert info["version"] == (await http.get("/version")).json()["version"]


IDS = list(range(40, 60))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 5}, IDS[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, IDS[:5]),
        ({"truncate_prompt_tokens": 100}, IDS),
        ({"truncate_prompt_tokens": -1}, IDS),
        ({"truncate_prompt_tokens": -1, "max_tokens": MAX_MODEL_LEN - 7}, IDS[-7:]),
    ],
)
async def test_a_prompt_is_cut_to_its_end(fields: dict[str, Any], expected: list[int]) -> None:
    assert list((await request_of(COMPLETIONS, completion_body(prompt=IDS, **fields))).prompt_token_ids) == expected


async def test_a_prompt_beyond_the_context_fits_when_it_is_cut() -> None:
    long = "word " * 4 * MAX_MODEL_LEN
    for path, body in ((CHAT, chat_body(messages=[{"role": "user", "content": long}])), (COMPLETIONS, {"prompt": long})):
        request = await request_of(path, {**body, "truncate_prompt_tokens": -1, "max_tokens": 9})
        assert len(request.prompt_token_ids) == MAX_MODEL_LEN - 9
        assert (await request_of(path, {**body, "truncate_prompt_tokens": 9})).prompt_token_ids == request.prompt_token_ids[
            -9:
        ]


async def test_the_echo_of_a_cut_prompt_is_what_is_left() -> None:
    answer = await ask(COMPLETIONS, completion_body(echo=True, truncate_prompt_tokens=1))
    (last,) = token_ids("the answer is")[-1:]
    assert answer["choices"][0]["text"] == tokenizer().text_of([last]) + TEXT


async def test_bad_words_are_sent_as_tokens_with_and_without_a_space() -> None:
    for path, body in ((CHAT, chat_body), (COMPLETIONS, completion_body)):
        request = await request_of(path, body(bad_words=["answer", " the", "the"]))
        expected = tuple(token_ids(text) for text in ("answer", " answer", "the", " the"))
        assert request.sampling.bad_words == expected


async def test_the_event_loop_encodes_no_bad_words_and_names_no_tokens_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = defaultdict(set)
    for name in ("encode_each", "text_of", "token_name"):
        work = getattr(Tokenizer, name)

        def noted(self: Tokenizer, texts: Any, work: Any = work) -> Any:
            threads[work.__name__].add(threading.current_thread().name)
            return work(self, texts)

        monkeypatch.setattr(Tokenizer, name, noted)
    await ask(COMPLETIONS, completion_body(echo=True, truncate_prompt_tokens=2, bad_words=["answer"], prompt_logprobs=1))
    await ask(CHAT, chat_body(logprobs=True))
    assert set(threads) == {"encode_each", "text_of", "token_name"}
    assert threading.main_thread().name not in set().union(*threads.values())
