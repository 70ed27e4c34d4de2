"""The proposer for an unchanged vLLM server, over a batch that behaves as that of vLLM's model runner."""

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from drafters.protocol import Capabilities, Demand, Draft
from drafters.vllm_plugin import PoolProposer
from drafters.vllm_plugin.lengths import _TRIAL_EVERY as TRIAL_EVERY
from drafters.vllm_plugin.lengths import MeasuredLengths
from drafters.vllm_plugin.proposer import SETTING
from drafters.vllm_plugin.rows import Row, RowSessions
from tests.support.vllm_batch import DRAFT_LEN, MAX_MODEL_LEN, MAX_ROWS, VOCAB, Batch, next_token, ticking, vllm_config


class RecordingDrafter:
    """Follows texts as told."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.num_opened = 0
        self.released: list[str] = []

    def open(
        self, request_id: str, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, salt: str = ""
    ) -> None:
        assert sampling.temperature == 0.0
        assert prompt_len < len(token_ids)
        self.texts[request_id] = list(token_ids)
        self.num_opened += 1

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.texts[request_id] += token_ids

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        return [Draft(demand.request_id, (1,) * demand.num_tokens, (0.5,) * demand.num_tokens) for demand in demands]

    def release(self, request_id: str) -> None:
        del self.texts[request_id]
        self.released.append(request_id)

    def check_integrity(self) -> None: ...


class Followed:
    """Checks at each pass that every row is followed with its own tokens, and nothing else is."""

    def __init__(self) -> None:
        self.drafter = RecordingDrafter()
        self.sessions = RowSessions(self.drafter)
        self.only_decoded = False

    def __call__(self, sampled: Sequence[Sequence[int]], lens: Any, token_ids: Any) -> list[list[int]]:
        rows = [Row(i, token_ids[i, : lens[i]], len(new)) for i, new in enumerate(sampled)]
        self.only_decoded = self.sessions.follow(rows)
        self.sessions.check_integrity()
        names = [self.sessions.request_id(row) for row in rows if row.num_new]
        assert len(set(names)) == len(names)
        for row in rows:
            if row.num_new:
                assert self.drafter.texts[self.sessions.request_id(row)] == row.token_ids.tolist()
        assert len(self.drafter.texts) <= len(rows)
        return [[] for _ in rows]


def test_rows_keep_their_sessions_when_they_move() -> None:
    followed = Followed()
    batch = Batch(followed)
    for name in "abcd":
        batch.add(name, [ord(name) % VOCAB, 2, 3, 4, 5, 6, 7, 8])
    batch.run()
    assert followed.drafter.num_opened == 4
    assert not followed.only_decoded
    batch.run()
    assert followed.only_decoded
    batch.remove("b")  # d moves to its row
    batch.run()
    batch.swap(0, 2)
    batch.run()
    assert followed.only_decoded
    assert followed.drafter.num_opened == 4
    assert len(followed.drafter.texts) == 3


def test_equal_prompts_are_followed_apart() -> None:
    """As the choices of one call, which share a prompt and part when they are sampled."""
    followed = Followed()
    batch = Batch(followed)
    for name in "abc":
        batch.add(name, [1, 2, 3, 4, 5, 6, 7, 8])
    batch.run()
    batch.run()
    batch.add("d", [9, 2, 3, 4, 5, 6, 7, 8])
    batch.add("e", [9, 2, 3, 4, 5, 6, 7, 8])
    batch.run()
    batch.swap(0, 3)
    batch.swap(1, 4)
    batch.run()
    batch.texts["b"][-1] += 1
    batch.swap(0, 1)
    batch.run()
    assert len(followed.drafter.texts) == 5


def test_a_preempted_request_is_followed_again_whole() -> None:
    followed = Followed()
    batch = Batch(followed)
    for name in "ab":
        batch.add(name, [ord(name) % VOCAB, 2, 3, 4, 5, 6, 7, 8])
    batch.run()
    batch.remove("b")
    batch.run()
    assert len(followed.drafter.texts) == 1
    batch.add("b")
    batch.run(in_prompt="b")
    assert len(followed.drafter.texts) == 1
    batch.run()
    assert followed.drafter.num_opened == 3
    batch.run(tells=False)
    batch.run()  # both grew without the proposer
    assert followed.drafter.num_opened == 5


def test_requests_that_end_together_are_released_in_the_order_of_rows() -> None:
    """The last of them are what a drafter remembers longest."""
    followed = Followed()
    batch = Batch(followed)
    for i in range(MAX_ROWS):
        batch.add(f"r{i}", [i, 2, 3, 4, 5, 6, 7, 8])
    batch.run()
    for i in range(MAX_ROWS):
        batch.remove(f"r{i}")
    batch.run()
    assert followed.drafter.released == [str(i) for i in range(MAX_ROWS)]


def test_a_row_computed_again_without_having_left_keeps_its_session() -> None:
    followed = Followed()
    batch = Batch(followed)
    batch.add("a", [1, 2, 3, 4, 5, 6, 7, 8])
    batch.run()
    batch.run(in_prompt="a")
    batch.run()
    assert followed.drafter.num_opened == 1


@pytest.mark.parametrize("setting", [None, '{"kind": "ngram"}', '{"kind": "suffix", "max_shared_tokens": 256}'])
def test_outputs_are_the_targets_and_memory_is_bounded(setting: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come, are preempted, resumed and end; each output is that of greedy decoding."""
    if setting is not None:
        monkeypatch.setenv(SETTING, setting)
    rng = random.Random(5)
    proposer = PoolProposer(vllm_config(), clock=ticking())
    proposer.load_model(None)
    batch = Batch(proposer.propose)
    waiting, preempted, ends = [f"r{i}" for i in range(60)], list[str](), dict[str, int]()
    prompts = {name: [rng.randrange(VOCAB) for _ in range(rng.randrange(8, 60))] for name in waiting}
    while waiting or preempted or batch.rows:
        fresh = []
        while (waiting or preempted) and len(batch.rows) < MAX_ROWS:
            name = preempted.pop() if preempted else waiting.pop()
            batch.add(name, prompts[name])
            ends.setdefault(name, len(prompts[name]) + rng.randrange(5, 80))
            fresh.append(name)
        batch.run(in_prompt=[name for name in fresh if rng.random() < 0.3], tells=rng.random() < 0.95)
        proposer.check_integrity()
        for name in list(batch.rows):
            if len(batch.texts[name]) >= ends[name]:
                batch.remove(name)
        if len(batch.rows) > 1:
            if rng.random() < 0.1:
                preempted.append(rng.choice(batch.rows))
                batch.remove(preempted[-1])
            batch.swap(0, len(batch.rows) - 1)
    for name, prompt in prompts.items():
        text = list(prompt)
        while len(text) < len(batch.texts[name]):
            text.append(next_token(text))
        assert batch.texts[name] == text
    assert batch.num_accepted > 1000
    proposer.propose([], batch.lens, batch.token_ids)
    assert not proposer._sessions._sessions


def test_no_draft_reaches_the_end_of_the_context() -> None:
    """The last position is for the token after the drafts."""
    batch = Batch(PoolProposer(vllm_config(), clock=ticking()).propose)
    batch.add("a", [1, 2, 3, 4, 5, 6, 7] * 35)
    while len(batch.texts["a"]) < MAX_MODEL_LEN:
        batch.run()
        assert len(batch.texts["a"]) + len(batch.drafts["a"]) < MAX_MODEL_LEN or not batch.drafts["a"]
    assert batch.num_accepted


def drafts_of(num: int, confidence: float) -> list[Draft]:
    return [Draft(str(i), (1,) * DRAFT_LEN, (confidence,) * DRAFT_LEN) for i in range(num)]


def measured(seconds_of: Callable[[int], float], batches: Sequence[int], confidence: float) -> MeasuredLengths:
    """After passes over so many requests, of which one of n rows takes ``seconds_of(n)``."""
    now_s = 0.0
    lengths = MeasuredLengths("cpu", 512, lambda: now_s)
    for num in batches:
        num_rows = num + sum(lengths.choose(drafts_of(num, confidence), [100] * num))
        now_s += seconds_of(num_rows)
        lengths.note_pass(True)
    return lengths


def test_lengths_follow_the_load_by_the_measured_time_of_passes() -> None:
    """Passes are flat up to 16 rows, then a row costs as much as a request decodes."""
    lengths = measured(lambda rows: 0.02 + 0.002 * max(0, rows - 16), [1, 4, 24] * 60, 0.7)
    few, many = (sum(lengths.choose(drafts_of(num, 0.7), [100] * num)) / num for num in (1, 24))
    assert few >= 6
    assert many <= 2


def test_drafts_end_where_no_row_is_free() -> None:
    lengths = measured(lambda rows: 0.01 * rows, [4] * 100, 0.5)
    num_drafts = [sum(lengths.choose(drafts_of(4, 0.5), [100] * 4)) for _ in range(2 * TRIAL_EVERY + 2)]
    assert sum(num_drafts) == 8  # in two trials


def test_passes_with_prompts_do_not_count() -> None:
    now_s = 0.0
    lengths = MeasuredLengths("cpu", 512, lambda: now_s)
    for _ in range(50):
        lengths.choose(drafts_of(4, 0.9), [100] * 4)
        now_s += 1.0
        lengths.note_pass(False)
    assert lengths.times.table() == MeasuredLengths("cpu", 512, lambda: now_s).times.table()


def test_times_that_were_measured_wrongly_are_measured_again() -> None:
    """A machine that was busy while plain passes were measured, and one that was busy while drafts were verified."""
    for is_slow in (lambda rows, i: rows == 4 and i < 30, lambda rows, i: rows > 4 and 30 < i < 60):
        passes = count()
        lengths = measured(lambda rows: 0.1 if is_slow(rows, next(passes)) else 0.02, [4] * 1000, 0.8)  # noqa: B023
        assert sum(lengths.choose(drafts_of(4, 0.8), [100] * 4)) >= 16


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('{"kind": "model", "model": "smollm2-135m"}', "must be a lookup"),
        ('{"kind": "cascade", "members": [{"kind": "dspark", "path": "dspark"}]}', "must be a lookup"),
        ('{"kind": "ngrams"}', "options as JSON"),
        ("ngram", "options as JSON"),
    ],
)
def test_what_is_no_lookup_is_refused(setting: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, setting)
    with pytest.raises(InvalidField, match=reason):
        PoolProposer(vllm_config())


def test_a_table_needs_the_tokenizer_it_was_counted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, '{"kind": "table", "path": "table"}')
    with pytest.raises(Exception, match="tiny"):
        PoolProposer(vllm_config())


def test_the_proposer_needs_nothing_but_what_vllm_brings() -> None:
    """An installation of this package alone, beside vLLM's: its other dependencies may be missing."""
    program = """
import sys

class Missing:
    names = {"ray", "grpc", "fastapi", "httpx", "typer", "rich", "matplotlib", "redis", "scipy", "xgrammar", "torch"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import numpy as np
from itertools import count
from types import SimpleNamespace as Names
from drafters.vllm_plugin import PoolProposer

model = Names(max_model_len=64, model="tiny", tokenizer="tiny", get_vocab_size=lambda: 100)
proposer = PoolProposer(Names(
    model_config=model, speculative_config=Names(num_speculative_tokens=4),
    scheduler_config=Names(max_num_batched_tokens=512), device_config=Names(device_type="cpu"),
    parallel_config=Names(rank=0, tensor_parallel_size=1),
), clock=count().__next__)
text = np.array([[5, 6, 7, 8] * 8], np.int32)
print([proposer.propose([[text[0, n - 1]]], np.array([n]), text) for n in range(20, 32)][-1])
"""
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[[8, 5, 6, 7]]"
