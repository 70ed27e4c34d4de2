"""Models of a hub: downloaded once, resumed, taken from the cache, and refused with one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.config import Config, ModelConfig
from cluster.errors import ModelUnavailable
from cluster.model_name import HubName, public_name
from drafters.vllm_plugin.proposer import _fingerprint_of
from engine.models.hub import local_folder
from engine.models.prepare import check_folder, resolve_model
from engine.models.tokenizer import fingerprint
from tests.support.hub import TOKEN, TestHub, running_hub
from tests.support.waiting import DEADLINE_S

NAME = "test/Tiny"

# Of a process of its own, since huggingface_hub reads its environment when it is imported.
_FETCH = """
import json, sys
from cluster.errors import OutriderError
from engine.models.prepare import ensure_model
steps = []
for name in sys.argv[1:]:
    try:
        print(ensure_model(name, lambda step, fraction: steps.append((step, fraction))))
    except OutriderError as error:
        print(f"{type(error).__name__}: {error}")
print(json.dumps(steps))
"""


def fetched(hub: TestHub, cache: Path, *names: str, **environment: str) -> tuple[list[str], list[tuple[str, float]]]:
    """What ``ensure_model`` gives for each name, and the steps that it reported."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = {**inherited, **hub.environment(cache, **environment)}
    ran = subprocess.run([sys.executable, "-c", _FETCH, *names], env=env, capture_output=True, text=True, check=True)
    *lines, steps = ran.stdout.splitlines()
    return lines, json.loads(steps)


@pytest.fixture
def published(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """As publishers store a model: beside what is needed, its weights in two other forms."""
    folder = shutil.copytree(tiny_model_folder, tmp_path / "published")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.safetensors").write_bytes(b"the same weights")
    (folder / "README.md").write_text("a card")
    return folder


@pytest.fixture
def hub(published: Path) -> Iterator[TestHub]:
    with running_hub({NAME: published}) as hub:
        yield hub


def test_a_repository_of_a_tokenizer_alone_is_found(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``vllm serve --tokenizer`` may name; one of GGUF files has neither."""
    monkeypatch.setattr("engine.models.hub.find", lambda name: published)
    (published / "config.json").unlink()
    assert _fingerprint_of(NAME) == fingerprint(published)
    (published / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        _fingerprint_of(NAME)


def test_a_model_is_downloaded_once_and_then_taken_from_the_cache(hub: TestHub, published: Path, tmp_path: Path) -> None:
    (folder,), steps = fetched(hub, tmp_path / "cache", NAME)
    assert Path(folder).name == hub.commit(NAME)
    kept = {path.name for path in Path(folder).iterdir()}
    assert kept == {path.name for path in published.iterdir()} - {"pytorch_model.bin", "original", "README.md"}
    assert (Path(folder) / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    assert steps[-1] == ["downloading 0.00 GB", 1.0]
    files = hub.asked["file"]
    by_branch, by_commit, gone = NAME, f"{NAME}@{hub.commit(NAME)}", f"{NAME}@v2"
    (same, again, refused), _ = fetched(hub, tmp_path / "cache", by_branch, by_commit, gone)
    assert (same, again) == (folder, folder)
    assert refused == f"ModelUnavailable: {NAME} has no revision 'v2' on {hub.url}"
    assert hub.asked["file"] == files


def test_a_complete_model_needs_no_hub(hub: TestHub, tmp_path: Path) -> None:
    (folder,), _ = fetched(hub, tmp_path / "cache", NAME)
    asked = dict(hub.asked)
    (offline, pinned, missing), _ = fetched(
        hub, tmp_path / "cache", NAME, f"{NAME}@{hub.commit(NAME)}", "test/Other", HF_HUB_OFFLINE="1"
    )
    assert (offline, pinned) == (folder, folder)
    assert "test/Other: no folder here, and it is not in the cache" in missing
    assert "HF_HUB_OFFLINE=1" in missing
    assert dict(hub.asked) == asked
    hub.is_down = True
    assert fetched(hub, tmp_path / "cache", NAME)[0] == [folder]
    (Path(folder) / "model.safetensors").unlink()
    (incomplete,), _ = fetched(hub, tmp_path / "cache", NAME, HF_HUB_OFFLINE="1")
    assert "it is incomplete in the cache" in incomplete


def test_a_broken_transfer_goes_on_where_it_ended(published: Path, tmp_path: Path) -> None:
    """Which huggingface_hub does in steps of 10 MiB."""
    save_file({"more": np.arange(3 * 2**20, dtype=np.int32)}, published / "more.safetensors")
    with running_hub({NAME: published}, cut_after=11 * 2**20) as hub:
        (folder,), _ = fetched(hub, tmp_path / "cache", NAME)
        assert hub.cut == {"more.safetensors"}
        assert hub.asked["range"] == 1
    assert (Path(folder) / "more.safetensors").read_bytes() == (published / "more.safetensors").read_bytes()


def test_a_signal_ends_a_download_before_its_file_is_complete(published: Path, tmp_path: Path) -> None:
    save_file({"more": np.arange(8 * 2**20, dtype=np.int32)}, published / "more.safetensors")
    code = f"""
from deploy.stop import stoppable
from engine.models.prepare import ensure_model
with stoppable():
    ensure_model({NAME!r}, lambda step, fraction: print(step, flush=True))
"""
    with running_hub({NAME: published}, pause_after=21 * 2**20) as hub:
        env = {**os.environ, **hub.environment(tmp_path / "cache")}
        with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=PIPE, stderr=PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                assert "downloading" in process.stdout.readline()
                process.send_signal(signal.SIGINT)
                assert process.stderr.readline() == "outrider: stopped\n"
                hub.goes_on.set()
                assert process.wait(DEADLINE_S) == 0
            finally:
                hub.goes_on.set()
                process.kill()
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    (snapshot,) = (tmp_path / "cache").glob("hub/models--*/snapshots/*")
    assert not (snapshot / "more.safetensors").exists()


def test_what_cannot_be_had_is_one_line_that_says_what_helps(published: Path, tmp_path: Path) -> None:
    with running_hub({NAME: published}, gated=frozenset({NAME})) as hub:
        (gated, misspelt, bad), _ = fetched(hub, tmp_path / "cache", NAME, "test/Tinny", "test/a--b")
        assert gated == f"ModelUnavailable: {NAME} is gated on {hub.url}: accept its terms there; set HF_TOKEN"
        assert f"test/Tinny: no folder here, and {hub.url} has no such model, or it is private: set HF_TOKEN" in misspelt
        assert "no name of a hub's model" in bad
        (folder, hidden), _ = fetched(hub, tmp_path / "cache", NAME, "test/Tinny", HF_TOKEN=TOKEN)
        check_folder(Path(folder))
        assert "hidden from HF_TOKEN's account" in hidden
        hub.is_down = True
        (down,), _ = fetched(hub, tmp_path / "empty", NAME)
        assert "503" in down
        hub.url = "http://127.0.0.1:9"
        (unreachable,), _ = fetched(hub, tmp_path / "empty", NAME)
        assert "it is not in the cache" in unreachable
        assert "asking http://127.0.0.1:9 failed" in unreachable


def test_a_configuration_names_the_commits_of_all_its_models(hub: TestHub, tmp_path: Path) -> None:
    """Of which a process of the API on another machine needs the tokenizer alone."""
    code = f"""
from pathlib import Path
from cluster.config import CascadeOptions, Config, DrafterConfig, LayersOptions, LoraModule, ModelConfig, ModelOptions
from cluster.config import NgramOptions, TargetConfig
from engine.adapter_files import adapter_folder
from deploy.model_files import tokenizer_folder, with_files
folder = tokenizer_folder(Config(model=ModelConfig(name={NAME!r})), "/of/another/machine")
print(*sorted(path.suffix for path in Path(folder).iterdir()))
cascade = CascadeOptions(members=(NgramOptions(), ModelOptions(model={NAME!r})))
layers = LayersOptions(path={NAME!r})
config = with_files(Config(model=ModelConfig(name={NAME!r}), drafters=(
    DrafterConfig(name="cascade", options=cascade), DrafterConfig(name="layers", options=layers))))
one, two = config.drafters
target = TargetConfig(engine="vllm", lora_modules=(LoraModule(name="a", path=Path({NAME!r})),))
adapter = with_files(Config(model=ModelConfig(name={NAME!r}), target=target)).target.lora_modules[0].adapter
assert str(adapter_folder(adapter.path)) == folder
print(adapter.path, config.model.name, one.options.members[1].model, two.options.path, *config.model.public_names)
"""
    env = {**os.environ, **hub.environment(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    suffixes, names = ran.stdout.splitlines()
    assert suffixes.split() == [".jinja", ".json", ".json", ".json", ".json"]
    assert names.split() == [f"{NAME}@{hub.commit(NAME)}"] * 4 + [NAME]


def test_a_folder_wins_over_the_hub(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "test" / "Tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == tmp_path / "test" / "Tiny"


def test_a_folder_of_the_cache_is_a_model(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--test--Tiny"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny_model_folder, model / "snapshots" / commit)
    with pytest.raises(ModelUnavailable, match="2 snapshots and no main branch"):
        local_folder(str(model))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("b" * 40)
    assert resolve_model(str(model)) == model / "snapshots" / ("b" * 40)
    assert public_name(str(model)) == public_name(str(model / "snapshots" / ("a" * 40))) == NAME


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@refs/pr/3", "Qwen/Qwen3-0.6B"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("./models/Qwen3", "Qwen3"),
    ],
)
def test_clients_call_a_model_by_its_name_on_the_hub_or_its_folder(name: str, public: str) -> None:
    assert Config(model=ModelConfig(name=name)).model.public_names == (public,)


def test_names_of_the_hub_have_a_revision_or_none() -> None:
    assert HubName.parse("a/b@v1") == HubName("a/b", "v1")
    assert str(HubName("a/b", "v1")) == "a/b@v1"
    assert [HubName.parse(name) for name in ("a", "/a/b", "a/b/c", "a/b@", "~/b", "./a/b")] == [None] * 6
    leaving = "a/b:Q4@../../../etc/passwd", "a/b@/", "a/b@x//y", "a/b/../../x.gguf"
    assert [HubName.parse(name) for name in leaving] == [None] * 4


def test_a_missing_part_of_the_weights_is_named(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelUnavailable, match=r"model-00002-of-00002\.safetensors is missing"):
        check_folder(folder)
