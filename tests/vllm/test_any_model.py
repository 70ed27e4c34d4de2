"""Models that only vLLM computes: plain vLLM's greedy tokens without drafts, and the same tokens whatever is drafted, held,
preempted or found in the prefix cache."""

import gc
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cluster.config import Config, ModelConfig, TargetConfig
from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import Adapter, Request
from drafters.footprint import adapter_bytes
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand, Drafter
from engine.target import AdapterHost, LoadedTarget
from engine.vllm.environment import prepare_environment
from tests.reference.suffix import SuffixDrafter
from tests.support.target_driver import Played, play
from tests.support.vllm_engine import BLOCK_LEN, MAX_MODEL_LEN, make_vllm
from tests.support.vllm_models import MODELS, MULTIMODAL, WINDOW, quantise, write_adapter, write_model

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm")
    prepare_environment()


HAS_TORCHVISION = find_spec("torchvision") is not None  # before a test has imported what stands in for it
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


def asked(prefix: str, temperature: float, adapters: Sequence[Adapter | None]) -> dict[str, Request]:
    requests = {}
    for k, adapter in enumerate(adapters):
        for i, prompt in enumerate(prompts()):
            sampling = SamplingParams(NUM_NEW, temperature, top_p=0.95, seed=i + 1, ignore_eos=True)
            name = f"{prefix}-{temperature}-{k}{i}"
            requests[name] = Request(name, tuple(prompt), sampling, 0.0, adapter=adapter)
    return requests


def plain_tokens(folder: Path, adapters: Sequence[Path | None] = (None,), **more: Any) -> list[list[int]]:
    """vLLM's own, without this project's scheduler, runner and sampler: of each prompt with each adapter, None for none."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        language_model_only=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
        block_size=BLOCK_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        **({"gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}),
        **more,
    )
    greedy = VllmSamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for _ in adapters for prompt in prompts()]
    loras = [one and LoRARequest(one.name, i, str(one)) for i, one in enumerate(adapters) for _ in prompts()]
    answers = llm.generate(asked, greedy, use_tqdm=False, lora_request=loras)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # else its end would take the process groups of the next engine
    return [list(answer.outputs[0].token_ids) for answer in answers]


def tokens(outputs: Mapping[str, Sequence[int]]) -> list[list[int]]:
    return [list(outputs[name]) for name in sorted(outputs)]


def played(
    engine: LoadedTarget,
    prefix: str,
    temperature: float,
    drafter: Drafter | None = None,
    adapters: Sequence[Adapter | None] = (None,),
) -> Played:
    """With proposals of ``drafter``; for the prefix "noise" with random ones, requests held and preempted at random."""
    requests = asked(prefix, temperature, adapters)
    rng, noisy = random.Random(prefix), prefix == "noise"

    def drafts(name: str, length: int) -> Sequence[int]:
        if drafter is not None:
            (draft,) = drafter.propose([Demand(name, 5)])
            return tuple(draft.token_ids)
        return [rng.randrange(250) for _ in range(rng.randrange(8))] if noisy else ()

    for name, one in requests.items():
        if drafter is not None:
            drafter.open(name, one.prompt_token_ids, len(one.prompt_token_ids), one.sampling, one.salt)
    return play(
        engine,
        {name: one.prompt_token_ids for name, one in requests.items()},
        {name: one.sampling for name, one in requests.items()},
        drafts,
        holds=lambda name, number: noisy and rng.random() < 0.2,
        preempts=lambda name, number: noisy and rng.random() < 0.05,
        on_tokens=lambda name, token_ids: None if drafter is None else drafter.extend(name, token_ids),
        adapters={name: one.adapter for name, one in requests.items() if one.adapter is not None},
    )


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that also see can be imported, here and in the process in which vLLM looks at them."""
    if not HAS_TORCHVISION:
        from transformers.utils.import_utils import is_torchvision_available

        folder = str(Path(__file__).parents[1] / "support" / "imageless")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        is_torchvision_available.cache_clear()


@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.usefixtures("sees")
def test_models_that_also_see_are_served_as_text(name: str, tmp_path: Path) -> None:
    check(write_model(tmp_path / name, name))


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_token_of_any_model(name: str, tmp_path: Path) -> None:
    check(write_model(tmp_path / name, name))


def test_drafts_change_no_token_of_a_quantised_model(tmp_path: Path) -> None:
    check(quantise(write_model(tmp_path / "int8", "qwen3-yarn")))


def test_adapters_answer_beside_the_model_in_one_batch(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3-yarn")
    check(folder, [None, *(write_adapter(tmp_path / name, folder, seed) for seed, name in enumerate(("a", "b"), 1))])


def test_places_of_adapters_are_counted_before_the_start(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3-yarn")
    target = TargetConfig.model_validate(
        {"engine": "vllm", "device": "cpu", "vllm": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}}
    )
    more = {"num_adapters": target.num_adapters, "max_lora_rank": 8}
    with closing(make_vllm(folder, kv_cache_bytes=KV_CACHE_BYTES, **more)) as engine:
        (num_bytes,) = engine._core.model_executor.collective_rpc(  # type: ignore[attr-defined]
            lambda worker: sum(
                tensor.nbytes
                for layer in worker.model_runner.lora_manager._adapter_manager.modules.values()
                for value in vars(layer).values()
                for tensor in (value if isinstance(value, tuple) else (value,))
                if isinstance(tensor, torch.Tensor)
            )
        )
    counted = adapter_bytes(Config(model=ModelConfig(name=str(folder)), target=target), folder, 4) // 2  # those in use, too
    assert num_bytes <= counted < 1.1 * num_bytes


def test_an_adapter_that_the_hubs_cache_has_lost_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other error: it would end the target."""
    from engine.vllm.adapters import AdapterSlots

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidField, match="lora_path"):
        AdapterSlots(cast(Any, None), 1).load(Adapter("sql", "org/none", "key"), ())


def check(folder: Path, adapters: Sequence[Path | None] = (None,)) -> None:
    """``adapters``: folders; None: the model alone."""
    lora = {"enable_lora": True, "max_loras": len(adapters)} if any(adapters) else {}
    plain = plain_tokens(folder, adapters, **lora)
    named = [one and Adapter(one.name, str(one), one.name) for one in adapters]
    size = {"kv_cache_bytes": KV_CACHE_BYTES, "num_adapters": len(adapters) if lora else 0}
    with closing(make_vllm(folder, **size, max_num_seqs=len(adapters) * len(PROMPT_LENS))) as engine:
        for one in named:
            if one is not None:
                assert isinstance(engine, AdapterHost)
                engine.load_adapter(one, named)
        for temperature in (0.0, 0.8):
            first = played(engine, "first", temperature, adapters=named)
            expected = tokens(first.outputs)
            assert all(len(set(map(str, expected[i :: len(PROMPT_LENS)]))) == len(named) for i in range(len(PROMPT_LENS)))
            if temperature == 0.0:
                assert not any(first.num_cached.values())
                assert expected == plain
            assert len({token for output in expected for token in output}) > (4 if temperature == 0 else NUM_NEW)
            noise = played(engine, "noise", temperature, adapters=named)
            assert tokens(noise.outputs) == expected
            assert noise.num_drafted > noise.num_accepted
            assert max(noise.num_cached.values()) >= WINDOW, "the prefix cache holds the same prompts"
            for kind, drafter in lookups().items():
                drafted = played(engine, kind, temperature, drafter, named)
                assert tokens(drafted.outputs) == expected, kind
                assert drafted.num_drafted > 0, kind


def lookups() -> dict[str, Drafter]:
    return {"ngram": NgramDrafter(), "suffix": SuffixDrafter(max_match_len=32, max_shared_tokens=10_000)}
