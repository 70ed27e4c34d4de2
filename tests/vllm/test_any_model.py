"""Models that only vLLM computes: plain vLLM's greedy tokens without drafts, and the same tokens whatever is drafted, held,
preempted or found in the prefix cache."""

import gc
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cluster.sampling_params import SamplingParams
from cluster.types import Request
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand, Drafter
from drafters.suffix import SuffixDrafter
from engine.target import LoadedTarget
from engine.vllm.environment import prepare_environment
from tests.support.target_driver import Played, play
from tests.support.vllm_engine import BLOCK_LEN, MAX_MODEL_LEN, make_vllm
from tests.support.vllm_models import MODELS, WINDOW, quantise, write_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm")
    prepare_environment()


NUM_NEW = 24
KV_CACHE_BYTES = 8 * 2**20
PROMPT_LENS = (30, 50, 90, 117)  # also more than a window


def prompts(seed: int = 0) -> list[list[int]]:
    """Two repetitive ones and two random ones."""
    rng = random.Random(seed)
    found = []
    for i, length in enumerate(PROMPT_LENS):
        period = 7 if i % 2 else length
        phrase = [rng.randrange(1, 250) for _ in range(period)]
        found.append([phrase[t % period] for t in range(length)])
    return found


def asked(prefix: str, temperature: float) -> dict[str, Request]:
    requests = {}
    for i, prompt in enumerate(prompts()):
        sampling = SamplingParams(NUM_NEW, temperature, top_p=0.95, seed=i + 1, ignore_eos=True)
        requests[f"{prefix}-{temperature}-{i}"] = Request(f"{prefix}-{temperature}-{i}", tuple(prompt), sampling, 0.0)
    return requests


def plain_tokens(folder: Path) -> list[list[int]]:
    """vLLM's own, without this project's scheduler, runner and sampler."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
        block_size=BLOCK_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        **({"gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}),
    )
    greedy = VllmSamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], greedy, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # else its end would take the process groups of the next engine
    return [list(answer.outputs[0].token_ids) for answer in answers]


def tokens(outputs: Mapping[str, Sequence[int]]) -> list[list[int]]:
    return [list(outputs[name]) for name in sorted(outputs)]


def played(engine: LoadedTarget, prefix: str, temperature: float, drafter: Drafter | None = None) -> Played:
    """With proposals of ``drafter``; for the prefix "noise" with random ones, requests held and preempted at random."""
    requests = asked(prefix, temperature)
    rng, noisy = random.Random(prefix), prefix == "noise"

    def drafts(name: str, length: int) -> Sequence[int]:
        if drafter is not None:
            (draft,) = drafter.propose([Demand(name, 5)])
            return tuple(draft.token_ids)
        return [rng.randrange(250) for _ in range(rng.randrange(8))] if noisy else ()

    for name, one in requests.items():
        if drafter is not None:
            drafter.open(name, one.prompt_token_ids, len(one.prompt_token_ids), one.sampling)
    return play(
        engine,
        {name: one.prompt_token_ids for name, one in requests.items()},
        {name: one.sampling for name, one in requests.items()},
        drafts,
        holds=lambda name, number: noisy and rng.random() < 0.2,
        preempts=lambda name, number: noisy and rng.random() < 0.05,
        on_tokens=lambda name, token_ids: None if drafter is None else drafter.extend(name, token_ids),
    )


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_token_of_any_model(name: str, tmp_path: Path) -> None:
    check(write_model(tmp_path / name, name))


def test_drafts_change_no_token_of_a_quantised_model(tmp_path: Path) -> None:
    check(quantise(write_model(tmp_path / "int8", "qwen3-yarn")))


def check(folder: Path) -> None:
    plain = plain_tokens(folder)
    with closing(make_vllm(folder, kv_cache_bytes=KV_CACHE_BYTES)) as engine:
        for temperature in (0.0, 0.8):
            first = played(engine, "first", temperature)
            expected = tokens(first.outputs)
            if temperature == 0.0:
                assert not any(first.num_cached.values())
                assert expected == plain
            assert len({token for output in expected for token in output}) > (4 if temperature == 0 else NUM_NEW)
            noise = played(engine, "noise", temperature)
            assert tokens(noise.outputs) == expected
            assert noise.num_drafted > noise.num_accepted
            assert max(noise.num_cached.values()) >= WINDOW, "the prefix cache holds the same prompts"
            for kind, drafter in lookups().items():
                drafted = played(engine, kind, temperature, drafter)
                assert tokens(drafted.outputs) == expected, kind
                assert drafted.num_drafted > 0, kind


def lookups() -> dict[str, Drafter]:
    return {"ngram": NgramDrafter(), "suffix": SuffixDrafter(max_match_len=32, max_shared_tokens=10_000)}
