"""The flags of `vllm serve`: each a field of the file, or a line that says why not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.config import Config, DrafterConfig, ModelOptions, NgramOptions, SuffixOptions, VllmOptions, load, with_fields
from cluster.errors import InvalidField, OutriderError
from deploy import cli, vllm_flags
from deploy.command_line import as_file, parse
from deploy.vllm_flags import FLAGS, NEEDLESS, REFUSED, SPECIAL, SPECULATIVE, field_paths
from engine.vllm import arguments
from engine.vllm.arguments import argument_switches

NGRAM = '{"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 8}'


def configured(*words: str, base: Config | None = None) -> Config:
    line = parse(words)
    return with_fields(base or Config(), line.fields, line.settings)


def refusal(*words: str) -> str:
    with pytest.raises(OutriderError) as refused:
        configured(*words)
    return str(refused.value)


def test_each_flag_names_a_field_and_is_named_once() -> None:
    assert {flag.field for flag in FLAGS.values()} <= set(field_paths())
    tables = [FLAGS, NEEDLESS, REFUSED, SPECIAL, SPECULATIVE]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["Qwen/Qwen3-8B"], "model.name", "Qwen/Qwen3-8B"),
        (["--model", "Qwen/Qwen3-8B", "--revision", "v1"], "model.name", "Qwen/Qwen3-8B@v1"),
        (["--revision=v1", "Qwen/Qwen3-8B"], "model.name", "Qwen/Qwen3-8B@v1"),
        (["--served-model-name", "a", "b", "--port", "80"], "model.served_names", ("a", "b")),
        (["--max-model-len", "16384"], "model.max_model_len", 16384),
        (["--max-model-len=16k"], "model.max_model_len", 16000),
        (["--max_model_len", "16K"], "model.max_model_len", 16384),
        (["--generation-config", "vllm"], "model.generation_config", "none"),
        (["--dtype", "bfloat16"], "target.dtype", "bfloat16"),
        (["--dtype", "half"], "target.dtype", "float16"),
        (["--dtype", "float16"], "target.engine", "vllm"),
        (["--dtype", "float"], "target.dtype", "float32"),
        (["-tp", "2"], "target.tensor_parallel", 2),
        (["-tp=2"], "target.tensor_parallel", 2),
        (["--data-parallel-size", "3"], "target.replicas", 3),
        (["--block-size", "64"], "target.block_len", 64),
        (["--max-num-seqs", "256"], "target.max_num_sequences", 256),
        (["--max-num-batched-tokens", "8192"], "target.max_pass_tokens", 8192),
        (["--kv-cache-memory-bytes", "1G"], "target.kv_cache_gb", 1.0),
        (["--host", "0.0.0.0"], "api.host", "0.0.0.0"),
        (["--allowed-origins", '["https://chat.example"]'], "api.cors_origins", ("https://chat.example",)),
        (["--tool-call-parser", "hermes"], "api.tool_call_parser", "hermes"),
        (["--set", "target.tensor_parallel=2", "-tp", "4"], "target.tensor_parallel", 2),
        (["--set", "router.policy={kind: lbss}"], "router.policy.kind", "lbss"),
        (["--speculative-config", NGRAM, "--set", "drafters[0].capacity=3"], "drafters.0.capacity", 3),
    ],
)
def test_a_flag_sets_its_field(words: list[str], field: str, value: Any) -> None:
    found: Any = configured(*words)
    for name in field.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == value


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "outrider.yaml"
    file.write_text("target: {tensor_parallel: 2, replicas: 2}\ndrafters: []\napi: {port: 1}\n")
    for words in ([str(file), "-tp", "4"], ["--config", str(file), "-tp", "4"]):
        assert parse(words).file == str(file)
        config = configured(*words, base=load(file))
        assert (config.target.tensor_parallel, config.target.replicas, config.api.port) == (4, 2, 1)
        assert config.drafters == ()
    assert "second file" in refusal(str(file), "--config", str(file))


def test_speculative_configurations_make_a_pool() -> None:
    words = ["--speculative-config", NGRAM, "-sc", '{"method": "suffix"}']
    small = ["--speculative-config", '{"model": "Qwen/Qwen3-0.6B", "revision": "v1", "num_speculative_tokens": 5}']
    eagle = [
        "--set",
        "target.engine=vllm",
        "--speculative-config",
        '{"method": "eagle3", "model": "x/y", "num_speculative_tokens": 3}',
    ]
    again = ["--spec-method", "ngram", "--spec-tokens", "3"]
    dotted = ["--speculative-config.method", "ngram", "--speculative-config.prompt_lookup_max", "2"]
    assert configured(*words, *small, *eagle, *again).drafters == (
        DrafterConfig(name="ngram", max_draft_len=8, options=NgramOptions(max_match_len=4)),
        DrafterConfig(name="suffix", options=SuffixOptions()),
        DrafterConfig(name="model", max_draft_len=5, options=ModelOptions(model="Qwen/Qwen3-0.6B@v1")),
        DrafterConfig(name="vllm", max_draft_len=3, options=VllmOptions(speculative={"method": "eagle3", "model": "x/y"})),
        DrafterConfig(name="ngram-2", max_draft_len=3, options=NgramOptions()),
    )
    assert configured(*dotted).drafters == (DrafterConfig(name="ngram", options=NgramOptions(max_match_len=2)),)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-le", "3"], "did you mean --max-model-len?"),
        (["--kv-cache-g", "3"], "did you mean `--set target.kv_cache_gb=VALUE`?"),
        (["--set", "target.tensor_paralel=2"], "did you mean 'tensor_parallel'?"),
        (["--set", "target"], "must be FIELD=VALUE"),
        (["--set", "drafters[0].capacity=2"], "in no list"),
        (["--set", "=2"], "must be FIELD=VALUE"),
        (["-tp", "0"], "target.tensor_parallel: must be greater than or equal to 1, got 0"),
        (["--port", "many"], "api.port: must be a valid integer, got 'many'"),
        (["--port"], "--port: needs a value"),
        (["--dtype", "half", "--set", "target.engine=native"], "bfloat16 or float32 on the native engine"),
        (["a/b", "c/d"], "second model"),
        (["--revision", "v1"], "needs ORG/MODEL"),
        (["--ssl-certfile", "x"], "proxy"),
        (["--response-role", "x"], "no counterpart"),
        (["a/b", "--quantization", "awq"], "make setup-vllm"),
        (["--speculative-config", "ngram"], "must be a JSON object"),
        (["--speculative-config", '{"method": 5}'], "speculative-config.method: must be a string"),
        (["--speculative-config", '{"model": "x/y", "revision": 5}'], "speculative-config.revision: must be a string"),
        (["-sc.method=ngram", "-sc.prompt_lookup_mx=1", "-sc.prompt_lookup_mx.a=2"], "did you mean 'prompt_lookup_max'?"),
        (["--set", "model.max_model_len=2024-99-99"], "got '2024-99-99'"),
        (["--speculative-config", '{"method": "eagel3", "model": "x/y"}'], "not supported yet; supported are ngram"),
        (
            ["--set", "target.engine=native", "--speculative-config", '{"method": "mtp"}'],
            "it needs target.engine vllm, got native",
        ),
        (["--speculative-config", '{"method": "ngram", "prompt_lookup_mx": 4}'], "did you mean 'prompt_lookup_max'?"),
        (["--speculative-config", '{"method": "draft_model"}'], 'needs "model"'),
        (["--speculative-config", '{"num_speculative_tokens": 4}'], 'needs "method"'),
    ],
)
def test_what_cannot_be_translated_is_said(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_flags, "argument_switches", dict)
    assert said in refusal(*words)


def test_flags_of_the_engine_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"enforce_eager": True, "quantization": False, "enable_expert_parallel": True, "compilation_config": False}
    monkeypatch.setattr(vllm_flags, "argument_switches", lambda: arguments)
    words = [
        "--enforce-eager",
        "a/b",
        "-q",
        "awq",
        "--no-enable-expert-parallel",
        "-cc.mode",
        "3",
        "-cc.cudagraph_mode=FULL",
    ]
    fields = parse(words).fields
    assert fields["model"] == {"name": "a/b"}
    assert fields["target"]["engine"] == "vllm"
    assert fields["target"]["vllm"] == {
        "enforce_eager": True,
        "quantization": "awq",
        "enable_expert_parallel": False,
        "compilation_config": {"mode": 3, "cudagraph_mode": "FULL"},
    }
    with pytest.raises(InvalidField, match="did you mean --enforce-eager"):
        parse(["--enforce-eagr"])


def test_arguments_of_the_engine_are_those_of_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(
        "class Other:\n    x: int = 1\n"
        "class EngineArgs:\n    enforce_eager: bool = False\n    enable_prefix_caching: bool | None = None\n"
        "    hf_token: bool | str | None = None\n    _rank: int = 0\n    def make(self): ...\n"
    )
    installed = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(arguments, "find_spec", lambda name: installed)
    argument_switches.cache_clear()
    try:
        assert argument_switches() == {"enforce_eager": True, "enable_prefix_caching": True, "hf_token": False}
    finally:
        argument_switches.cache_clear()


def test_flags_that_change_nothing_are_said() -> None:
    line = parse(["--enable-prefix-caching", "--seed", "3", "/a/b", "--revision", "v1"])
    assert [note.partition(":")[0] for note in line.notes] == ["--enable-prefix-caching", "--seed", "--revision"]
    assert line.fields == {"model": {"name": "/a/b"}}


def test_a_command_line_of_vllm_becomes_a_file() -> None:
    command = (
        "CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-8B --dtype auto --enable-prefix-caching -tp 2 --api-key secret \\\n"
        f"  --speculative-config '{NGRAM}'"
    )
    written = as_file(command)
    assert "# --enable-prefix-caching: the prefix cache is always on" in written
    assert "secret" not in written
    assert yaml.safe_load(written) == {
        "model": {"name": "Qwen/Qwen3-8B"},
        "target": {"tensor_parallel": 2},
        "drafters": [{"name": "ngram", "max_draft_len": 8, "options": {"kind": "ngram", "max_match_len": 4}}],
    }
    printed = CliRunner().invoke(cli.app, ["config", "--from", command])
    assert printed.stdout == written
    for words in ("python train.py", "vllm serve 'a"):
        with pytest.raises(InvalidField, match="vllm serve"):
            as_file(words)
    with pytest.raises(InvalidField, match="write its settings as flags"):
        as_file("vllm serve --config vllm.yaml")


def test_what_differs_from_the_default_makes_the_same_configuration(tmp_path: Path) -> None:
    file = tmp_path / "outrider.yaml"
    words = ["-tp", "2", "--set", "router.policy={kind: lbss, chunk_slots: 4}", "--set", "cluster.state={folder: /x}"]
    file.write_text(as_file("vllm serve a/b " + " ".join(f"'{word}'" for word in words)))
    assert load(file) == configured("a/b", *words)


def test_keys_are_in_a_private_file_while_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, str, int]] = []

    def launch(config: Config) -> None:
        file = config.api.api_keys_file
        assert file is not None
        seen.append((file, file.read_text(), file.stat().st_mode & 0o777))

    monkeypatch.setattr("deploy.launch.serve", launch)
    ran = CliRunner().invoke(cli.app, ["serve", "/a/model", "--api-key", "one", "two", "--seed", "1"])
    assert ran.exit_code == 0, ran.output
    ((file, text, mode),) = seen
    assert (text.split(), mode, file.exists()) == (["one", "two"], 0o600, False)
    assert "--seed" in ran.stderr


def test_the_help_lists_each_flag_with_its_field() -> None:
    text = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "160"}).stdout
    for name, flag in FLAGS.items():
        assert any(line.split()[:1] == [name] and line.split()[-1] == flag.field for line in text.splitlines()), name
