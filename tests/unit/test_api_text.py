"""Tokens into text: exact for any tokens, any chunking, any stop strings."""

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from cluster.errors import ModelUnavailable
from cluster.types import Commit, FinishReason, TokenLogprobs
from deploy.api.choice import Choice, Delta, OutputOptions, StopMatcher
from deploy.api.errors import ApiError
from deploy.api.tokenizer import Detokenizer, TextTooLong, Tokenizer
from tests.support.api import MODEL, chat_body, end_id, fast_tokenizer, model_info, serving, token_ids, tokenizer
from tests.support.asgi import CHAT
from tests.support.requests import a_request

any_tokens = st.lists(st.integers(0, tokenizer().vocab_size + 3), max_size=40)
any_text = st.text(max_size=30).filter(lambda text: "<|" not in text)  # of no control token


@given(any_tokens)
def test_deltas_are_the_full_decode(ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer())
    streamed = "".join(detokenizer.feed(token_id) for token_id in ids) + detokenizer.flush()
    assert streamed == tokenizer().decode(ids)
    known = [token_id for token_id in ids if token_id < tokenizer().vocab_size]
    assert streamed == fast_tokenizer().decode(known, skip_special_tokens=True)


@given(any_text)
@pytest.mark.slow
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    detokenizer = Detokenizer(tokenizer())
    pieces = [detokenizer.feed(token_id) for token_id in token_ids(text)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert detokenizer.flush() == ""


@given(any_text)
def test_token_bytes_spell_the_text(text: str) -> None:
    assert b"".join(map(tokenizer().token_bytes, token_ids(text))) == text.encode()


def test_special_tokens_have_a_name_and_no_text() -> None:
    assert tokenizer().token_bytes(end_id()) == b""
    assert tokenizer().token_name(end_id()) == "<|end|>"
    added = fast_tokenizer().token_to_id("<plain added>")
    assert added is not None
    assert tokenizer().token_bytes(added) == b"<plain added>"


def test_sentence_piece_tokens_are_spelled_by_bytes() -> None:
    vocab = {token: i for i, token in enumerate(["<unk>", "▁the", "▁", "n", "<0xC3>", "<0xAF>", "<0x0A>"])}
    fast = FastTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    spelled = Tokenizer(fast, None)
    ids = [1, 2, 3, 4, 5, 6]
    assert spelled.decode(ids) == " the nï\n"
    assert spelled.decode(ids) == fast.decode(ids)


def test_an_unknown_kind_of_tokenizer_is_refused() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelUnavailable, match="no decoder"):
        Tokenizer(fast, None)
    fast.decoder = decoders.WordPiece()
    with pytest.raises(ModelUnavailable, match="WordPiece"):
        Tokenizer(fast, None)


def first_stop(text: str, stops: list[str], first_end: int = 0) -> int | None:
    """By the definition: where the stop string begins that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts and end > first_end:
            return min(starts)
    return None


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(borders)]


few_letters = st.text("ab", max_size=24)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(few_letters, stop_strings, st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_whatever_the_chunks(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for piece in cut(text, places):
        released += matcher.feed(piece)
        assert first_stop(released, stops) is None
        if matcher.matched:
            break
    released += matcher.flush()
    expected = first_stop(text, stops)
    if expected is None:
        assert (matcher.matched, released) == (None, text)
    else:
        assert matcher.matched in stops
        assert first_stop(released + matcher.matched, stops) == len(released) == expected


@given(few_letters, stop_strings, st.lists(st.integers(0, 30), max_size=8))
def test_what_cannot_begin_a_stop_string_is_not_held_back(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    fed = released = ""
    for piece in cut(text, places):
        fed += piece
        released += matcher.feed(piece)
        if matcher.matched:
            return
        held = fed[len(released) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(few_letters, stop_strings, st.integers(0, 24))
def test_a_stop_string_that_ends_unarmed_is_text(text: str, stops: list[str], unarmed: int) -> None:
    matcher = StopMatcher(stops)
    released = matcher.feed(text[:unarmed], armed=False)
    assert not matcher.matched
    released += matcher.feed(text[unarmed:])
    released += matcher.flush()
    expected = first_stop(text, stops, first_end=unarmed)
    assert released == (text if expected is None else text[:expected])


def choice_of(details: bool = True, **sampling: Any) -> Choice:
    return Choice(
        0, a_request("r", (1, 2), max_tokens=64, **sampling), tokenizer(), model_info(), OutputOptions(details=details)
    )


def test_a_request_that_is_not_possible_ends_as_the_callers_error() -> None:
    choice = choice_of()
    with pytest.raises(ApiError) as refused:
        choice.absorb(Commit("r", 2, (), finish=FinishReason.REFUSED, error="every token is masked"), 0.0)
    assert (refused.value.status, refused.value.code) == (400, "not_possible")
    assert choice.outcome is FinishReason.REFUSED


def commits_of(ids: list[int], sizes: list[int], finish: FinishReason) -> list[Commit]:
    """Rounds of the given sizes, all but the last token of each drafted; what remains comes in one more."""
    ends = [end for end in accumulate(sizes) if end < len(ids)]
    commits = []
    for begin, end in zip([0, *ends], [*ends, len(ids)], strict=True):
        piece = tuple(ids[begin:end])
        num_drafts = max(0, len(piece) - 1)
        logprobs = tuple(TokenLogprobs(-float(token_id), ()) for token_id in piece)
        commits.append(Commit("r", 2 + begin, piece, num_drafts + 1, num_drafts, "ngram", logprobs))
    last = commits.pop()
    return [*commits, Commit(last.request_id, last.base_len, last.token_ids, 0, 0, None, last.logprobs, finish)]


def play(choice: Choice, commits: list[Commit], take_every: int) -> list[Delta]:
    deltas = []
    for i, commit in enumerate(commits):
        choice.absorb(commit, float(i))
        if i % take_every == 0 or choice.finish is not None:
            delta = choice.take()
            if delta is not None:
                deltas.append(delta)
        if choice.finish is not None:
            break
    return deltas


rounds = st.lists(st.integers(1, 5), max_size=12)
content = st.lists(st.integers(0, tokenizer().vocab_size - 1).filter(lambda i: i != end_id()), min_size=1, max_size=30)


@given(content, rounds, st.integers(1, 4), st.lists(st.text("e an", min_size=1, max_size=3), max_size=2), st.integers(0, 9))
def test_a_choice_is_the_text_before_the_stop_string_whatever_the_rounds(
    ids: list[int], sizes: list[int], take_every: int, stops: list[str], min_tokens: int
) -> None:
    choice = choice_of(stop=tuple(stops), min_tokens=min_tokens)
    deltas = play(choice, commits_of(ids, sizes, FinishReason.LENGTH), take_every)
    text = "".join(delta.text for delta in deltas)

    one_by_one = choice_of(stop=tuple(stops), min_tokens=min_tokens)
    slow = play(one_by_one, commits_of(ids, [1] * len(ids), FinishReason.LENGTH), 1)
    assert text == "".join(delta.text for delta in slow)
    assert (choice.num_tokens, choice.finish) == (one_by_one.num_tokens, one_by_one.finish)
    if choice.finish is FinishReason.STOP:
        assert choice.num_tokens >= min_tokens
    else:
        assert (text, choice.num_tokens) == (tokenizer().decode(ids), len(ids))

    # The details cover the text without gap or overlap, and the tokens are those of the answer, in order.
    for delta in deltas:
        assert "".join(segment.text for segment in delta.segments) == delta.text
        assert all(a.drafter != b.drafter for a, b in zip(delta.segments, delta.segments[1:], strict=False))
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [token.id for token in tokens] == ids[: choice.num_tokens]
    assert all(token.logprobs is not None and token.logprobs.logprob == -token.id for token in tokens)
    assert deltas[-1].finish == choice.finish
    assert all(delta.finish is None for delta in deltas[:-1])


def test_the_end_of_the_sequence_counts_but_is_no_text() -> None:
    choice = choice_of()
    ids = [*token_ids("the answer"), end_id()]
    (delta,) = play(choice, commits_of(ids, [], FinishReason.STOP), 1)
    assert delta.text == "the answer"
    assert choice.num_tokens == len(ids)
    assert [token.id for token in delta.tokens] == ids
    assert delta.tokens[-1].start == delta.tokens[-1].end == len(delta.text)


def test_an_unfinished_character_is_its_last_token_s_also_when_the_end_comes_later() -> None:
    choice = choice_of()
    half = token_ids("a☃")[:2]
    choice.absorb(Commit("r", 2, half, 2, 2, "ngram"), 0.0)
    first = choice.take()
    choice.absorb(Commit("r", 4, (), finish=FinishReason.LENGTH), 1.0)
    last = choice.take()
    assert first is not None
    assert last is not None
    assert [(segment.text, segment.drafter) for segment in last.segments] == [("\ufffd", "ngram")]
    assert [token.id for token in (*first.tokens, *last.tokens)] == list(half)


def test_an_unfinished_character_before_the_end_of_the_sequence_is_not_the_end_s() -> None:
    choice = choice_of()
    half = token_ids("a☃")[:2]
    (delta,) = play(choice, commits_of([*half, end_id()], [], FinishReason.STOP), 1)
    assert delta.text == "a\ufffd"
    assert [(token.start, token.end) for token in delta.tokens] == [(0, 1), (1, 2), (2, 2)]


def test_drafts_behind_a_stop_string_were_not_needed() -> None:
    ids = list(token_ids("word by word"))
    choice = choice_of(stop=("word",))
    commit = Commit("r", 2, tuple(ids), len(ids), len(ids), "ngram")
    choice.absorb(commit, 0.0)
    assert choice.finish is FinishReason.STOP
    assert choice.num_tokens < len(ids)
    assert choice.counts.num_accepted == choice.num_tokens
    assert choice.counts.num_proposed - choice.counts.num_accepted == len(ids) - choice.num_tokens


def test_without_details_nothing_is_kept_of_the_tokens() -> None:
    choice = choice_of(details=False)
    (delta,) = play(choice, commits_of(list(token_ids("the answer")), [2, 2], FinishReason.LENGTH), 100)[-1:]
    assert delta.tokens == ()
    assert delta.segments == ()


def test_decoding_time_grows_with_the_tokens_alone() -> None:
    """Counts work, not time: each token's bytes are looked up once."""
    looked_up: list[int] = []

    class Counting:
        def token_bytes(self, token_id: int) -> bytes:
            looked_up.append(token_id)
            return tokenizer().token_bytes(token_id)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    ids = random.Random(1).choices(range(256), k=5000)
    for token_id in ids:
        detokenizer.feed(token_id)
    assert looked_up == ids


async def test_a_text_far_too_long_is_refused_before_all_of_it_is_encoded() -> None:
    text = "the answer " * 100_000
    with pytest.raises(TextTooLong) as raised:
        await tokenizer().encode(text, add_special_tokens=True, max_tokens=1000)
    assert 1000 < raised.value.num_tokens < 2**16


async def test_a_long_text_that_fits_is_encoded_whole() -> None:
    text = "the answer " * 10_000
    ids = await tokenizer().encode(text, add_special_tokens=True, max_tokens=200_000)
    assert ids == token_ids(text)
    assert await tokenizer().encode(text, add_special_tokens=True, max_tokens=len(ids)) == ids


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "input_image"])
async def test_a_part_that_is_no_text_is_refused_by_its_type(kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind}]}]
    async with serving() as (http, _):
        if kind == "input_image":
            answer = await http.post("/v1/responses", json={"model": MODEL, "input": messages})
        else:
            answer = await http.post(CHAT, json=chat_body(messages=messages))
    assert f"{kind} parts are not supported: '{MODEL}' is served as text alone" in answer.json()["error"]["message"]
