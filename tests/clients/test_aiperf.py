"""NVIDIA's load client aiperf over a running server: it must read how drafting went from our answers, unmodified.

See test_langchain.py for what this needs; aiperf is looked for in the environment that runs the tests."""

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("aiperf", reason="aiperf is not installed")

URL = os.environ.get("OUTRIDER_URL")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")
TOKENIZER = os.environ.get("OUTRIDER_TOKENIZER")  # the model's folder, so that nothing is fetched

pytestmark = pytest.mark.skipif(
    URL is None or TOKENIZER is None, reason="OUTRIDER_URL and OUTRIDER_TOKENIZER name no server"
)

NUM_REQUESTS = 4
PROMPT = "Repeat after me, many times: the grey goose crossed the green field. The grey goose crossed the green field."


def drafting() -> Counter[str]:
    """What the server has counted so far, under vLLM's names."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    prefix = "vllm:spec_decode_num_"
    return Counter(
        {line.removeprefix(prefix).split("{")[0]: int(float(line.split()[-1])) for line in lines if line.startswith(prefix)}
    )


def profile(folder: Path) -> dict[str, object]:
    """The report of a short run."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"{i}. {PROMPT}"}) + "\n" for i in range(NUM_REQUESTS)))
    fields = ["temperature:0", "ignore_eos:true", "max_tokens:48"]
    command = [
        *(str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", str(URL)),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(TOKENIZER), "--ui", "none"),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--artifact-dir", str(folder)),
        *(argument for field in fields for argument in ("--extra-inputs", field)),
    ]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return dict(json.loads((folder / "profile_export_aiperf.json").read_text()))


def test_aiperf_reports_our_acceptance(tmp_path: Path) -> None:
    before = drafting()
    report = profile(tmp_path)
    counted = drafting() - before

    def figure(name: str, of: str = "avg") -> float:
        entry = report[name]
        assert isinstance(entry, dict), f"{name}: {entry}"
        return float(entry[of])

    assert report["error_summary"] == []
    assert figure("completed_request_count") == NUM_REQUESTS
    # What aiperf read from the answers is what the server counted meanwhile.
    assert figure("total_spec_decode_steps") == counted["drafts_total"] > 0
    assert figure("total_draft_tokens") == counted["draft_tokens_total"]
    assert figure("total_accepted_draft_tokens") == counted["accepted_tokens_total"] > 0
    assert figure("spec_decode_acceptance_length") > 1.0
    histogram = report["pooled_spec_decode_acceptance_histogram"]
    assert isinstance(histogram, dict)
    assert sum(histogram.values()) == counted["drafts_total"]
