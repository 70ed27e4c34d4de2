"""The proposer inside an unchanged vLLM engine."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.vllm.environment import prepare_environment
from tests.support.tiny_model import write_tiny_model
from tests.support.vllm_engine import BLOCK_LEN, MAX_MODEL_LEN

pytestmark = pytest.mark.vllm

NUM_REQUESTS, MAX_ROWS, OUTPUT_LEN = 24, 8, 96
SPECULATION = {"method": "custom_class", "model": "drafters.vllm_plugin.PoolProposer", "num_speculative_tokens": 8}
FEW_BLOCKS = 20  # of which eight requests need 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=128)


def engine(folder: Path, speculation: dict[str, Any] | None) -> Any:
    prepare_environment()
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=64,  # prompts take several passes
        block_size=BLOCK_LEN,
        num_gpu_blocks_override=FEW_BLOCKS,
        kv_cache_memory_bytes=2**24,
        speculative_config=speculation,
        disable_log_stats=False,
    )


def outputs(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    from vllm import SamplingParams

    asked = [
        SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN - 5 * (i % 7), ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    answers = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def counted(llm: Any, name: str) -> int:
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}"))


def test_greedy_outputs_are_plain_vllms_with_preemption_and_few_rows(folder: Path) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 250) for _ in range(rng.randrange(20, 90))] for _ in range(NUM_REQUESTS)]
    prompts += [prompts[0]] * 3  # equal rows
    plain = outputs(engine(folder, None), prompts)
    llm = engine(folder, SPECULATION)
    assert outputs(llm, prompts) == plain
    proposed, accepted = (counted(llm, f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    assert 0 < accepted <= proposed
    assert counted(llm, "num_preemptions") > 0
    (drafter,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
    drafter.check_integrity()
    assert len(drafter._sessions._sessions) <= MAX_ROWS
    assert outputs(llm, prompts) == plain  # drafts come from answers to the same prompts
    assert counted(llm, "spec_decode_num_accepted_tokens") > 2 * accepted


@contextmanager
def drafter_process(folder: Path, file: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A drafter for the model in ``folder``, in a process of its own, and its address."""
    file.write_text(f"model: {{name: {folder}}}\ndrafters: [{{name: suffix, options: {{kind: suffix}}}}]\n")
    program = "from deploy.cli import app; app()"
    command = [sys.executable, "-c", program, "drafter", str(file), "--listen", "grpc://127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.wait()


def test_a_drafter_elsewhere_drafts_over_grpc(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is the same server without its address. Outputs stay when it hangs and when it is gone."""
    rng = random.Random(5)
    prompts = [[rng.randrange(1, 250) for _ in range(20)] for _ in range(4)]
    monkeypatch.setenv("OUTRIDER_DRAFTER", '{"kind": "ngram", "min_match_len": 20, "max_match_len": 20}')
    llm = engine(folder, SPECULATION)
    plain = outputs(llm, prompts)
    by_lookups = counted(llm, "spec_decode_num_accepted_tokens")
    del llm
    with drafter_process(folder, tmp_path / "drafter.yaml") as (address, process):
        monkeypatch.setenv("OUTRIDER_DRAFTER_URL", address)
        llm = engine(folder, SPECULATION)
        (drafter,) = llm.collective_rpc(lambda worker: worker.model_runner.drafter)
        for _ in range(20):  # a busy machine may not wait for its drafts
            assert outputs(llm, prompts) == plain
            if counted(llm, "spec_decode_num_accepted_tokens") > by_lookups:
                break
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            if fault is not None:
                os.kill(process.pid, fault)
            assert outputs(llm, prompts) == plain
            drafter.check_integrity()
        num = counted(llm, "spec_decode_num_accepted_tokens")
        drafter._drafter.close()
    assert num > by_lookups
