"""What vLLM's engine promises beside the contract of targets (`tests/contract/test_target.py`)."""

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.embedded import EmbeddedCluster, PoolEntry
from cluster.config import HiddenStateKind, HiddenStateOptions
from cluster.errors import LinkClosed
from cluster.sampling_params import SamplingParams
from cluster.types import FinishReason, ModelInfo, Request
from drafters.hidden_states.host import Host, make_hidden_state_drafter
from drafters.ngram import NgramDrafter
from engine.factory import load_target
from engine.models.tokenizer import fingerprint
from engine.target import LoadedTarget
from engine.target_probe import TargetProbe
from engine.vllm.environment import RUNNER_V2
from profiler.interleaved import OwnTime
from router.cost_model import TableCost
from router.plan import Span
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.dspark import write_speculators
from tests.support.features import rows_of
from tests.support.target_driver import Drafts, play, play_with_drafter
from tests.support.tiny_model import write_tiny_model
from tests.support.vllm_engine import BLOCK_LEN, EOS, MAX_MODEL_LEN, ConstantProposer, make_vllm

pytestmark = pytest.mark.vllm

COST = TableCost((1, 32), (0.02, 0.03))
LAYERS = (-1, 0, 1)
VOCAB, NUM_SAMPLES = 257, 800
ON_V2 = os.environ.get(RUNNER_V2) == "1"  # vLLM's model runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=128)


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedTarget:
    return make_vllm(folder, feature_layers=LAYERS)


@pytest.fixture(scope="module")
def native(folder: Path) -> LoadedTarget:
    return load_target(folder, dtype="float32", max_model_len=MAX_MODEL_LEN, feature_layers=LAYERS)


def request(name: str, length: int = 20, max_tokens: int = 24, seed: int = 1) -> Request:
    rng = random.Random(name.split("-")[-1])
    sampling = SamplingParams(max_tokens, 0.8, seed=seed, ignore_eos=True)
    return Request(name, tuple(rng.randrange(1, 250) for _ in range(length)), sampling, arrival_s=0.0)


def test_vllm_takes_the_model_runner_that_is_asked_for(target: LoadedTarget) -> None:
    assert target.operators.endswith("model runner V2" if ON_V2 else "model runner V1")


@pytest.mark.skipif(not ON_V2, reason="V1 has none")
def test_the_warm_up_of_runner_v2_leaves_the_target_as_it_was(target: LoadedTarget) -> None:
    """On GPUs vLLM runs requests of its own through the runner, with drafts of the longest kind."""
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    asked = request("warm-1")
    plain = play(target, {asked.id: asked.prompt_token_ids}, {asked.id: asked.sampling})
    worker = target._core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
    again = play(target, {asked.id: asked.prompt_token_ids}, {asked.id: asked.sampling})
    assert again.outputs == plain.outputs
    assert list(worker.model_runner._states) == [asked.id], "of vLLM's own requests nothing is kept"


def test_all_threads_compute_on_the_stream_of_the_one_that_loaded(target: LoadedTarget) -> None:
    """On a GPU vLLM takes another stream for each thread in the middle of a pass; graphs of drafters are of that stream."""
    asked, stream = request("stream-1"), object()
    with mock.patch.object(target, "_stream", stream), mock.patch("torch.cuda.set_stream") as entered:
        target.open(asked, asked.prompt_token_ids)
    target.release(asked.id)
    entered.assert_called_once_with(stream)


def model_of(folder: Path) -> ModelInfo:
    return ModelInfo("tiny", VOCAB, MAX_MODEL_LEN, (EOS,), fingerprint(folder))


def test_hidden_states_are_those_of_the_native_target(target: LoadedTarget, native: LoadedTarget) -> None:
    """Of a prompt in two chunks, after a rejected draft, and of a prompt that the prefix cache holds."""
    found = []
    for engine in (target, native):
        asked = request("states-1", length=2 * BLOCK_LEN + 9)
        prompt = asked.prompt_token_ids
        engine.open(asked, prompt)
        engine.execute([Span.bound(asked.id, 0, prompt[:40], samples=False)])
        (first,) = engine.execute([Span.bound(asked.id, 40, prompt[40:])])
        span = Span.bound(asked.id, len(prompt), (*first.chosen, 3, 4), num_drafts=2)
        (second,) = engine.execute([span])
        committed_len = len(prompt) + 1 + len(second.chosen)
        rows = rows_of(engine, asked.id, 0, committed_len - 1)
        with pytest.raises(LookupError):
            rows_of(engine, asked.id, 0, committed_len)
        engine.release(asked.id)
        again = Request("states-again", prompt, asked.sampling, arrival_s=0.0)
        assert engine.open(again, prompt) == 2 * BLOCK_LEN
        engine.execute([Span.bound(again.id, 2 * BLOCK_LEN, prompt[2 * BLOCK_LEN :])])
        cached = rows_of(engine, again.id, 0, len(prompt))
        engine.release(again.id)
        torch.testing.assert_close(cached, rows[: len(prompt)], atol=1e-4, rtol=1e-4)
        found.append(rows)
    assert found[0].shape == (found[1].shape[0], len(LAYERS) * 128)
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.embedding, native.embedding)


def test_probed_passes_verify_as_many_rows_as_asked(target: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM verifies no drafts in the pass that admits a request: timed, it would price all passes as one of a row."""
    scheduler: Any = target._scheduler  # type: ignore[attr-defined]
    plain, num_rows = scheduler.schedule, list[int]()

    def counted(throttle_prefills: bool = False) -> Any:
        output = plain(throttle_prefills)
        num_rows.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", counted)
    probe = TargetProbe(target, OwnTime())
    for rows, context in ((1, 0), (8, 0), (128, 0), (8, 512), (8, 512)):
        probe.step(rows, context)
        assert num_rows[-1] == rows
    target.check_integrity()


@pytest.mark.parametrize("kind", get_args(HiddenStateKind))
def test_hidden_states_give_the_drafts_of_the_native_target(
    kind: HiddenStateKind, target: LoadedTarget, native: LoadedTarget, folder: Path, tmp_path: Path
) -> None:
    """The same proposals in every round, so the same accepted length."""
    write_speculators(tmp_path, folder, kind, target_layer_ids=LAYERS[:2])
    options = HiddenStateOptions(kind=kind, path=str(tmp_path), dtype="float32", min_survival=0.0)
    asked = {f"{kind}-{i}": request(f"{kind}-{i}", 20 + 17 * i) for i in range(4)}
    played = []
    for engine in (target, native):
        drafter = make_hidden_state_drafter(options, model_of(folder), Host(engine, folder))
        played.append(play_with_drafter(engine, drafter, asked))
        drafter.check_integrity()
    assert played[0] == played[1]
    assert sum(map(len, played[0][1].values())) > 100


def test_a_cache_that_vllm_finds_full_changes_no_token(target: LoadedTarget, folder: Path) -> None:
    """The driver plans as if blocks were endless, so vLLM preempts by itself, and the outcomes tell."""
    small = make_vllm(folder, num_blocks=MAX_MODEL_LEN // BLOCK_LEN)  # 16 blocks, of which these need 28
    asked = {f"full-{i}": request(f"full-{i}", 80 + i, max_tokens=30, seed=i) for i in range(7)}
    prompts = {name: one.prompt_token_ids for name, one in asked.items()}
    sampling = {name: one.sampling for name, one in asked.items()}
    roomy = play(target, prompts, sampling)
    num_lost = 0

    def nothing_right(name: str, committed_len: int) -> Sequence[int]:
        nonlocal num_lost
        num_lost += small.capacity().num_free_blocks == 0
        return (1, 2, 3)

    tight = play(small, prompts, sampling, nothing_right)
    assert tight.outputs == roomy.outputs
    assert num_lost, "the cache was never full"
    small.check_integrity()


@pytest.mark.skipif(ON_V2, reason="V2 keeps it in a row for as long as the request lives")
def test_a_request_left_out_of_a_pass_keeps_its_number_of_accepted_rows(target: LoadedTarget) -> None:
    """Layers with a state continue from that row; no model with such layers runs with drafts on a CPU."""
    runner = target._core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    batch, asked = runner.input_batch, [request(f"left-{i}") for i in range(3)]
    for one in asked:
        target.open(one, one.prompt_token_ids)
    target.execute([Span.bound(one.id, 0, one.prompt_token_ids) for one in asked])
    batch.num_accepted_tokens_cpu[:2] = 3
    target.execute([Span.bound("left-2", 20, (1,))])
    target.release("left-1")
    target.execute([Span.bound("left-0", 20, (1,)), Span.bound("left-2", 21, (1,))])
    read = {name: int(runner.num_accepted_tokens.np[index]) for name, index in batch.req_id_to_index.items()}
    assert (read, runner._num_accepted) == ({"left-0": 3, "left-2": 1}, {})
    for name in read:
        target.release(name)


def test_a_prompt_is_computed_by_less_than_a_block_where_decodes_take_the_rest(target: LoadedTarget) -> None:
    """Of models with state-space layers vLLM puts a chunk off until it fills a block, if the pass is as long."""
    *decoding, prompt = asked = request("short-1"), request("short-2"), request("short-prompt", length=3 * BLOCK_LEN)
    for one in asked:
        target.open(one, one.prompt_token_ids)
    target.execute([Span.bound(one.id, 0, one.prompt_token_ids) for one in decoding])
    spans = [Span.bound(one.id, 20, tuple(range(16)), 15) for one in decoding]
    with mock.patch.object(target._scheduler, "need_mamba_block_aligned_split", True):  # type: ignore[attr-defined]
        target.execute([*spans, last := Span.bound(prompt.id, 0, prompt.prompt_token_ids[:10], samples=False)])
    assert last.computed_len == 10
    for one in asked:
        target.release(one.id)


def test_a_round_over_a_small_cache_serves_more_than_fits(folder: Path) -> None:
    small = make_vllm(folder, num_blocks=MAX_MODEL_LEN // BLOCK_LEN)
    requests = [request(f"round-{i}", 60 + 3 * i, max_tokens=60, seed=i) for i in range(12)]
    outputs = []
    for pool in ({}, {"ngram": PoolEntry(NgramDrafter())}):
        with EmbeddedCluster(small, model_of(folder), COST, pool) as cluster:
            completions = cluster.complete(requests)
        assert all(c.commits[-1].finish is FinishReason.LENGTH for c in completions)
        outputs.append([c.token_ids for c in completions])
    assert outputs[0] == outputs[1]
    small.check_integrity()


def test_of_a_predicted_output_what_is_not_verified_does_not_count(target: LoadedTarget, folder: Path) -> None:
    """A proposal has up to 64 tokens, of which vLLM verifies 16 in a pass."""
    asked, planner = request("predicted", max_tokens=86), StepPlanner(PlannerSettings("all"))
    with EmbeddedCluster(target, model_of(folder), COST, {}, planner) as cluster:
        (plain,) = cluster.complete([asked])
        (done,) = cluster.complete([replace(asked, prediction_token_ids=tuple(plain.token_ids))])
    assert done.token_ids == plain.token_ids
    assert len(done.commits) == 6  # one token, then 17 in each pass
    assert done.num_proposed == done.num_accepted == 80


def test_after_an_error_of_the_engine_streams_end_and_nothing_is_computed(folder: Path) -> None:
    engine: Any = make_vllm(folder)
    executor, num_passes = engine._core.model_executor, 0
    compute = executor.execute_model

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 6:
            raise RuntimeError("the device is gone")
        return compute(*args, **kwargs)

    executor.execute_model = failing
    cluster = EmbeddedCluster(engine, model_of(folder), COST, {})
    completing = cluster.begin([request(f"error-{i}") for i in range(3)])
    with pytest.raises(LinkClosed, match="the target failed: RuntimeError: the device is gone; send the request again"):
        completing.ended.result()
    assert all(completion.token_ids for completion in completing.completions)
    with pytest.raises(RuntimeError, match="the embedded target failed: RuntimeError: the device is gone"):
        cluster.close()
    with pytest.raises(RuntimeError, match="computes nothing after an error"):
        engine.execute([Span.bound("later", 0, (1, 2))])


@pytest.mark.skipif(ON_V2, reason="V2 refuses custom proposers")
def test_drafts_do_not_change_the_distribution_as_they_do_in_vllms_own_sampler(target: LoadedTarget, folder: Path) -> None:
    """Two samples at T = 1, without drafts and with a draft that is nearly never right: ours are of one distribution."""
    prompt = request("distribution").prompt_token_ids
    constant: Drafts = lambda name, length: (ConstantProposer.TOKEN,)  # noqa: E731
    plain, drafted = _thirds(target, prompt, 0, lambda name, length: ()), _thirds(target, prompt, 10_000, constant)
    assert _same_distribution(plain, drafted) > 1e-4
    own_plain, own_drafted = _vllms_own(folder, prompt, None), _vllms_own(folder, prompt, ConstantProposer)
    assert _same_distribution(plain, own_plain) > 1e-4
    assert _same_distribution(own_plain, own_drafted) < 1e-9, "vLLM's sampler is right on a CPU now: say so in the docs"


def _thirds(engine: LoadedTarget, prompt: Sequence[int], first_seed: int, drafts: Drafts) -> list[int]:
    """The third token of the answer, over seeds."""
    found = []
    for start in range(first_seed, first_seed + NUM_SAMPLES, 8):
        sampling = {f"seed-{seed}": SamplingParams(3, 1.0, seed=seed, ignore_eos=True) for seed in range(start, start + 8)}
        played = play(engine, dict.fromkeys(sampling, prompt), sampling, drafts)
        found += [output[2] for output in played.outputs.values()]
    return found


def _vllms_own(folder: Path, prompt: Sequence[int], proposer: type | None) -> list[int]:
    import vllm

    name = f"{ConstantProposer.__module__}.{ConstantProposer.__qualname__}"
    speculation = {"method": "custom_class", "model": name, "num_speculative_tokens": 1}
    sizes: Any = {"max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_LEN, "kv_cache_memory_bytes": 2**24}
    usual: Any = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, **sizes}
    llm = vllm.LLM(str(folder), speculative_config=None if proposer is None else speculation, **usual)
    asked = vllm.SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": list(prompt)} for _ in range(NUM_SAMPLES)]
    return [answer.outputs[0].token_ids[2] for answer in llm.generate(prompts, asked, use_tqdm=False)]


def _same_distribution(one: Sequence[int], other: Sequence[int]) -> float:
    """p-value of a chi-square test of homogeneity; tokens seen fewer than ten times count together."""
    counts = np.array([np.bincount(sample, minlength=VOCAB) for sample in (one, other)])
    often = counts.sum(axis=0) >= 10
    table = np.column_stack([counts[:, often], counts[:, ~often].sum(axis=1)])
    return float(stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue)
