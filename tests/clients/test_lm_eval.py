"""EleutherAI's lm-eval scores a small task over a running server as it does over transformers.

See test_langchain.py for what this needs. The task is made here, and the model is read from a folder: nothing is fetched."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

URL = os.environ.get("OUTRIDER_URL")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")
FOLDER = os.environ.get("OUTRIDER_TOKENIZER")  # the model's

pytestmark = pytest.mark.skipif(URL is None or FOLDER is None, reason="OUTRIDER_URL and OUTRIDER_TOKENIZER name no server")

QUESTIONS = [
    ("The capital of France is", ["Paris", "Rome", "Berlin"]),
    ("Water is made of hydrogen and", ["oxygen", "iron", "helium"]),
    ("The opposite of hot is", ["cold", "green", "loud"]),
    ("Two plus two equals", ["four", "nine", "twelve"]),
    ("Cats and dogs are", ["animals", "numbers", "cities"]),
    ("The sun rises in the", ["east", "west", "kitchen"]),
    ("A week has seven", ["days", "hours", "wheels"]),
    ("Shakespeare wrote", ["plays", "software", "recipes for rockets"]),
]


def task(folder: Path) -> dict[str, Any]:
    rows = [{"question": text, "choices": choices, "answer": 0} for text, choices in QUESTIONS]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "task": "small_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }


def scored(folder: Path, model: str, arguments: dict[str, Any]) -> tuple[float, list[tuple[float, bool]]]:
    """The accuracy, and of each choice the log-probability and whether it is what greedy decoding writes."""
    import lm_eval

    found = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=[task(folder)], batch_size=1, log_samples=True)
    samples = sorted(found["samples"]["small_questions"], key=lambda sample: sample["doc_id"])
    choices = [(float(logprob), str(greedy) == "True") for sample in samples for ((logprob, greedy),) in sample["resps"]]
    return float(found["results"]["small_questions"]["acc,none"]), choices


def test_lm_eval_scores_the_server_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    served = {"model": MODEL, "base_url": f"{URL}/v1/completions", "tokenizer": FOLDER, "tokenizer_backend": "huggingface"}
    accuracy, choices = scored(tmp_path, "local-completions", {**served, "num_concurrent": 2, "max_retries": 1})
    expected_accuracy, expected = scored(tmp_path, "hf", {"pretrained": FOLDER, "dtype": "float32", "device": "cpu"})
    assert len(choices) == len(expected) == sum(len(choices) for _, choices in QUESTIONS)
    assert accuracy == expected_accuracy > 0.5
    # The server computes in bfloat16 or int8 where that is fast.
    assert [logprob for logprob, _ in choices] == pytest.approx([logprob for logprob, _ in expected], abs=0.7)
    assert sum(a[1] == b[1] for a, b in zip(choices, expected, strict=True)) >= len(choices) - 1
