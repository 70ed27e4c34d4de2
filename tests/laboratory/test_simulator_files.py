"""Recordings and scenarios as files: what is read is sound, and what is not is refused with a reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import record, simulate
from benchmarks.record import agreement
from benchmarks.report import BenchOptions
from cluster.config import DrafterConfig, NgramOptions, SuffixOptions
from cluster.errors import InvalidField, OutriderError
from cluster.sampling_params import SamplingParams
from cluster.strict_yaml import ConfigError
from cluster.types import ModelInfo
from drafters.registry import make_drafter
from drafters.replay import Recording, replay
from simulator.recording import AgreementRecording, Recorder, read_recording
from simulator.scenario import Recorded, ServingScenario, read_scenario
from simulator.serving import read_trace, requests
from tests.support.tiny_model import ship, write_tiny_layers, write_tiny_model

INFO = ModelInfo("m", 100, 4096, (99,), "f")
SAMPLING = SamplingParams(64, temperature=0.0)


def answers(num: int, output_len: int = 40) -> list[Recording]:
    """Of few words, so that lookups find something."""
    random = np.random.default_rng(2)
    found = []
    for i in range(num):
        words = random.integers(0, 98, 6)
        prompt = tuple(np.tile(words, 3).tolist())
        output = [int(w) for w in np.tile(words, -(-output_len // 6))[:output_len]]
        for at in random.integers(0, output_len, 5).tolist():
            output[at] = int(random.integers(0, 98))
        found.append(Recording(f"0/r{i}@0.0", ("code", "chat")[i % 2], prompt, tuple(output), SAMPLING))
    return found


def recorded(num: int = 6) -> AgreementRecording:
    options = {"ngram": NgramOptions(), "suffix": SuffixOptions()}
    recorder = Recorder("m", [(name, one.kind) for name, one in options.items()], 4, 0.0)
    taken = answers(num)
    told = [agreement(make_drafter(DrafterConfig(name=n, options=o), INFO), taken, 4) for n, o in options.items()]
    for i, one in enumerate(taken):
        recorder.add(one.name, one.domain, len(one.prompt_token_ids), [of_drafter[i] for of_drafter in told])
    return recorder.recording()


def test_a_recording_comes_back_as_it_was(tmp_path: Path) -> None:
    recording = recorded()
    recording.save(tmp_path / "r.npz")
    back = read_recording(tmp_path / "r.npz")
    assert back.header == recording.header
    assert (back.ids, back.domains) == (recording.ids, recording.domains)
    for name in ("prompt_lens", "output_lens", "drafted", "right", "confidences"):
        assert (getattr(back, name) == getattr(recording, name)).all()
    assert back.answer(3).by_drafter["ngram"].right == recording.answer(3).by_drafter["ngram"].right


def test_what_is_recorded_is_what_a_replay_gets() -> None:
    """At the positions that rounds come to; a lookup in its own request alone drafts the same however it got there."""
    recording = recorded()
    rounds = list(replay(make_drafter(DrafterConfig(name="n", options=NgramOptions()), INFO), answers(6), 4))
    assert recording.accepted_len("ngram") == pytest.approx(np.mean([r.num_committed for r in rounds]), rel=0.02)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: replace(r, right=r.drafted + np.uint8(1)), "more tokens are right than drafted"),
        (lambda r: replace(r, drafted=r.drafted[:, :-1]), "its drafted are"),
        (lambda r: replace(r, drafted=r.drafted.astype(np.int64)), "its drafted are int64"),
        (lambda r: replace(r, prompt_lens=r.prompt_lens * 0), "no token"),
        (lambda r: replace(r, header=r.header.model_copy(update={"format": 9})), "format 9"),
        (lambda r: replace(r, header=r.header.model_copy(update={"kinds": ("ngram",)})), "kinds"),
    ],
)
def test_a_recording_that_disagrees_with_itself_is_refused(
    tmp_path: Path, change: Callable[[AgreementRecording], AgreementRecording], reason: str
) -> None:
    change(recorded()).save(tmp_path / "r.npz")
    with pytest.raises(InvalidField, match=reason):
        read_recording(tmp_path / "r.npz")


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="is not there"):
        read_recording(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(InvalidField, match="cannot be read"):
        read_recording(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", something=np.zeros(3))
    with pytest.raises(InvalidField, match="holds no 'header'"):
        read_recording(tmp_path / "other.npz")
    np.savez(tmp_path / "pickled.npz", header=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InvalidField, match="cannot be read"):
        read_recording(tmp_path / "pickled.npz")


def test_a_pool_is_recorded_on_the_answers_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_tiny_model(tmp_path / "target", max_position_embeddings=2048)
    ship(monkeypatch, tmp_path / "shipped", target)
    write_tiny_layers(tmp_path / "shipped" / "layers-2", target, range(257))
    monkeypatch.setattr(record, "NUM_QUICK", 4)
    monkeypatch.setattr(record, "NUM_NEW_TOKENS", 12)
    found = record.record(BenchOptions(quick=True, model=str(target)))
    assert set(found.header.drafters) == {"ngram", "suffix", "table", "layers-2", "cascade"}
    assert len(found) == 4
    right = found.right[found.header.drafters.index("layers-2")]
    assert (right > 0).mean() > 0.5, "the drafter is the model itself"
    assert (found.confidences[found.header.drafters.index("layers-2")] > 0).any()


def test_an_unknown_scenario_names_the_nearest() -> None:
    with pytest.raises(InvalidField, match="did you mean specrouter"):
        simulate.find("specroute")
    with pytest.raises(OutriderError, match="cannot be read"):
        read_scenario(simulate.find("nowhere.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("study: specrouter", "study: other", "study: must be"),
        ("two_level: llama-68m", "two_level: llama-70m", "llama-70m"),
        ("horizon_s: 20", "horizont_s: 20", "did you mean"),
        ("      llama-68m: {acceptance: 0.52", "      llama-86m: {acceptance: 0.52", "says nothing of llama-68m"),
        ("target: {device: a100", "target: {device: b100", "b100"),
    ],
)
def test_a_scenario_that_cannot_be_used_says_why(tmp_path: Path, old: str, new: str, reason: str) -> None:
    text = simulate.find("specrouter").read_text()
    assert old in text
    (tmp_path / "s.yaml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=reason):
        read_scenario(tmp_path / "s.yaml")


def test_a_trace_sets_arrivals_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.5,10,3\n1.0,20000,5\n2.0,7,0\n30,5,5\n")
    scenario = read_scenario(simulate.find("h100-32b"))
    assert isinstance(scenario, ServingScenario)
    scenario = scenario.model_copy(update={"trace": path, "requests_per_s": 2.0, "duration_s": 10.0})
    found = [(r.arrival_s, r.prompt_len, r.output_len) for r in requests(scenario)]
    assert found == [(0.25, 10, 3), (0.5, scenario.max_prompt_len, 5)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,10,3\n0.5,1,1\n")
    with pytest.raises(InvalidField, match="must not fall"):
        list(read_trace(path))


def test_a_scenario_takes_recorded_arrivals_where_there_is_a_folder_of_data_and_draws_them_elsewhere(tmp_path: Path) -> None:
    scenario = read_scenario(simulate.find("h100-405b"))
    assert isinstance(scenario, ServingScenario)
    assert scenario.recorded is not None
    assert scenario.with_data(None) == scenario
    assert next(requests(scenario)).arrival_s > 0.0
    path = tmp_path / scenario.recorded.file.with_suffix("")  # as text: whether it is compressed, the name says
    path.parent.mkdir()
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.5,10,3\n")
    twice = scenario.model_copy(update={"recorded": Recorded(file=path.relative_to(tmp_path), times=2.0)})
    assert [(r.arrival_s, r.prompt_len, r.output_len) for r in requests(twice.with_data(tmp_path))] == [(0.25, 10, 3)]


@pytest.mark.parametrize("file", ["/etc/passwd", "../elsewhere.csv", "traces/../../elsewhere.csv"])
def test_what_is_recorded_lies_in_the_folder_of_data(file: str) -> None:
    with pytest.raises(ValueError, match="within the folder of data"):
        Recorded(file=Path(file))


@pytest.mark.parametrize("policy", ["{kind: chain}", "{kind: fixed, chain: [small-160m, large-7b]}"])
def test_a_serving_cluster_is_not_asked_for_chains_that_it_does_not_model(tmp_path: Path, policy: str) -> None:
    text = simulate.find("a100-70b").read_text()
    (tmp_path / "s.yaml").write_text(f"{text}\npolicies: [{policy}]\n")
    with pytest.raises(ConfigError, match="must not form chains"):
        read_scenario(tmp_path / "s.yaml")
