"""Teams of threads end with what was computed on a thread of its own."""

import os
import subprocess
import sys

import pytest

from engine.cpu_setup import in_own_thread
from engine.model_facts import useful_threads
from engine.models.config import DecoderConfig, parse_config

CODE = """
import os, torch
from engine.cpu_setup import in_own_thread
from tests.support.waiting import eventually
torch.set_num_threads(3)
num = lambda: len(os.listdir("/proc/self/task"))
def compute():
    torch.ones(4_000_000).exp()
    return num()
in_own_thread(num)  # what a first thread brings for good
before = num()
inside = in_own_thread(compute)
eventually(lambda: num() <= before)  # they end by themselves, soon after
print(before, inside, num())
compute()
print(num())
"""


@pytest.mark.slow
def test_no_team_is_left_behind() -> None:
    environment = {**os.environ, "PYTHONPATH": "."}
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr
    first, last = ran.stdout.splitlines()
    before, inside, after = map(int, first.split())
    assert inside > before + 1, "there was no team to be left"
    assert after <= before
    assert int(last) > before, "on the main thread it stays"


def test_errors_come_through() -> None:
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)


def model_of(hidden_size: int, intermediate_size: int) -> DecoderConfig:
    return parse_config(
        {
            "model_type": "llama",
            "vocab_size": 100,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": 2,
            "num_attention_heads": hidden_size // 64,
            "max_position_embeddings": 64,
        }
    )


def test_small_models_use_few_threads_and_large_ones_all() -> None:
    assert useful_threads(model_of(64, 128)) == 1
    assert 4 < useful_threads(model_of(576, 1536)) < 32, "a model of 135 million parameters"
    assert useful_threads(model_of(4096, 14336)) > 256
