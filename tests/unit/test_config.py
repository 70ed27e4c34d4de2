"""The configuration file: what it refuses and how it says so, and how "auto" becomes values."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import Config, DraftLengthConfig, NgramOptions, PlannerConfig, load, show
from cluster.config.reference import reference
from cluster.config.section import Section
from cluster.errors import InvalidField
from cluster.resolve import Inventory, Node, resolve
from cluster.strict_yaml import ConfigError, parse
from engine.dtypes import resolve_dtypes

LAPTOP = Inventory((Node("laptop", 2),))
SHIPPED_DRAFTER = "drafters:\n- name: a\n  options: {kind: model, model: x, dtype: as-shipped}\n"
SERVER = Inventory((Node("server", 64, 8),))


def parsed(text: str) -> Config:
    return parse(text, Config, "test.yaml")


def problems(text: str) -> dict[str, tuple[int | None, str]]:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    return {problem.path: (problem.line, problem.message) for problem in caught.value.problems}


def autos(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in autos(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in autos(item, f"{path}[{i}]")]
    return [path] if value == "auto" else []


def test_an_empty_file_is_the_laptop_default() -> None:
    assert parsed("") == Config()
    assert parsed("# nothing\n") == Config()
    assert Config().model.name == "smollm2-135m"
    assert [drafter.options.kind for drafter in Config().drafters] == ["cascade", "ngram", "suffix"]
    assert not any(drafter.has_model for drafter in Config().drafters), "what serves any model needs no training"


def test_values_reach_their_fields() -> None:
    config = parsed(
        "drafters:\n- name: a\n  options: {kind: ngram, max_match_len: 7}\nrouter: {policy: {kind: fixed, chain: [a]}}"
    )
    assert config.drafters[0].options == NgramOptions(max_match_len=7)
    assert config.router.policy.kind == "fixed"
    assert config.router.policy.chain == ("a",)
    assert parsed("drafters: []").drafters == ()
    assert parsed("api: {api_keys_file: keys.txt}").api.api_keys_file == Path("keys.txt")


def test_every_problem_is_told_at_once_with_line_key_and_value() -> None:
    found = problems(
        """\
model: {name: smollm2-135m, max_modl_len: 10}
target:
  dtype: fp16
  replicas: "2"
  kv_cache_gb: -1
drafters:
  - name: a
    options: {kind: model}
  - name: b
    options: {kind: ngrm}
  - name: c
    options: {max_match_len: 3}
  - name: d
    options:
      kind: cascade
      members: [{kind: ngram, max_mtch_len: 3}]
      members_: 7
router:
  policy: {kind: epsilon-greedy, epsilon: 1.5}
api: 5
zzz: 1
"""
    )
    assert found == {
        "model.max_modl_len": (1, "unknown key; did you mean 'max_model_len'?"),
        "target.dtype": (3, "must be 'auto', 'as-shipped', 'bfloat16', 'float16' or 'float32', got 'fp16'"),
        "target.replicas": (4, "must be a valid integer, got '2'"),
        "target.kv_cache_gb": (5, "must be greater than 0 or 'auto', got -1"),
        "drafters[0].options.model": (8, "is missing"),
        "drafters[1].options.kind": (
            10,
            "must be one of 'ngram', 'suffix', 'table', 'model', 'layers', 'dspark', 'dflash', 'eagle3', 'peagle', "
            "'vllm', 'cascade', got 'ngrm'",
        ),
        "drafters[2].options": (12, "needs the key 'kind'"),
        "drafters[3].options.members[0].max_mtch_len": (16, "unknown key; did you mean 'max_match_len'?"),
        "drafters[3].options.members_": (17, "unknown key; did you mean 'members'?"),
        "router.policy.epsilon": (19, "must be between 0.0 and 1.0, got 1.5"),
        "api": (20, "must be an object, got 5"),
        "zzz": (21, f"unknown key; known here: {', '.join(Config.model_fields)}"),
    }


@pytest.mark.parametrize(
    ("text", "path", "line", "words"),
    [
        ("target: {device: cpu,\n  resources: {gpus: 1}}", "target", 1, "resources.gpus must be 0 on device cpu, got 1"),
        ("target: {device: cuda,\n  resources: {gpus: 0}}", "target", 1, "resources.gpus must be greater than 0"),
        ("target: {tensor_parallel: 2,\n  resources: {gpus: 0.5}}", "target", 1, "NCCL refuses two ranks on one GPU"),
        ("target: {dtype: as-shipped,\n  device: cuda}", "target", 1, "dtype as-shipped needs a device"),
        ("target: {dtype: as-shipped,\n  tensor_parallel: 2}", "target", 1, "dtype as-shipped needs a device"),
        ("target: {dtype: as-shipped,\n  resources: {gpus: 1}}", "target", 1, "dtype as-shipped needs a device"),
        ("target:\n  engine: vllm\n  block_len: 16", "target.block_len", 3, "must be 32 or 64 on the vllm engine, got 16"),
        (
            "target:\n  engine: vllm\n  early_exit: auto",
            "target.early_exit",
            3,
            "must be off on the vllm engine, got 'auto': its passes cannot be stopped between layers",
        ),
        ("slo: {default: fast}", "slo", 1, "default must be one of classes (there are none), got 'fast'"),
        ("slo:\n  classes: {custom: {}}", "slo", 1, "classes must not be named 'custom'"),
        ("slo:\n  classes:\n    fast: {tpot_ms: 0}", "slo.classes.fast.tpot_ms", 3, "greater than or equal to 0.001, got 0"),
        ("api: {tool_call_parser: qwen_coder}", "api.tool_call_parser", 1, "(did you mean 'qwen3_coder'?), got 'qwen_c"),
        ("api: {reasoning_parser: gptoss}", "api.reasoning_parser", 1, "(did you mean 'openai_gptoss'?), got 'gptoss'"),
        ("slo:\n  classes:\n    fast: {tpt_ms: 5}", "slo.classes.fast.tpt_ms", 3, "did you mean 'tpot_ms'?"),
        ("cluster: {state: {password_file: x}}", "cluster.state", 1, "password_file is Redis's"),
        ("target: {engine: vllm, max_pass_tokens: -5}", "target.max_pass_tokens", 1, "equal to 1 or 'auto', got -5"),
        ("target: {max_pass_tokens: many}", "target.max_pass_tokens", 1, "must be a valid integer or 'auto', got 'many'"),
        ("target: {resources: {threads: 0}}", "target.resources.threads", 1, "equal to 1 or 'auto', got 0"),
        (
            "target: {max_pass_tokens: 64, max_num_sequences: 65}",
            "target",
            1,
            "max_num_sequences (65) must be at most max_pass_tokens (64)",
        ),
        ("target:\n  resources: {gpus: 1.5}", "target.resources", 2, "whole number"),
        ("drafters:\n- {name: grammar, options: {kind: ngram}}", "", 1, "'grammar' is the name of a drafter that each"),
        ("drafters:\n- {name: a, device: cuda, options: {kind: ngram}}", "drafters[0]", 2, "device must be cpu or auto"),
        (SHIPPED_DRAFTER + "  device: cuda", "drafters[0]", 2, "dtype as-shipped needs a device of auto or cpu"),
        (SHIPPED_DRAFTER + "  resources: {gpus: 1}", "drafters[0]", 2, "dtype as-shipped needs a device of auto or cpu"),
        (
            "drafters:\n- {name: a, options: {kind: ngram}, resources: {gpus: 1}}",
            "drafters[0]",
            2,
            "resources.gpus must be 0",
        ),
        (
            "drafters:\n- {name: a, device: cuda, options: {kind: model, model: x}, resources: {gpus: 0}}",
            "drafters[0]",
            2,
            "resources.gpus must be greater than 0 on device cuda",
        ),
        ("drafters:\n- {name: a, options: {kind: ngram, min_match_len: 5}}", "drafters[0].options", 2, "min_match_len (5)"),
        ("drafters:\n- {name: A b, options: {kind: ngram}}", "drafters[0].name", 2, "'A b'"),
        (
            "router:\n  policy: {kind: fixed, chain: [ngram, suffix]}",
            "",
            1,
            "suffix must be of kind model or layers to verify drafts, got suffix",
        ),
        ("router:\n  policy: {kind: fixed, chain: [ngram, ngram]}", "", 1, "at most three drafters, each once"),
        ("router:\n  policy: {kind: fixed, chain: [x]}", "", 1, "must name drafters (cascade, ngram, suffix), got 'x'"),
        (
            "drafters:\n- {name: a, options: {kind: ngram}}\n- {name: a, options: {kind: suffix}}",
            "",
            1,
            "a is used more than once",
        ),
        ("cluster: {state: {url: 'http://x'}}", "cluster.state", 1, "url must start with redis://"),
        ("cluster: {state: {url: 'redis://x:99999'}}", "cluster.state", 1, "ort out of range"),
        ("cluster: {state: {url: 'redis://'}}", "cluster.state", 1, "url must name a host"),
        ("memory: {min_residence_s: 0}", "memory.min_residence_s", 1, "must be greater than 0, got 0"),
        ("router: {policy: {kind: hedg}}", "router.policy.kind", 1, "(did you mean 'hedge'?), got 'hedg'"),
        (
            "router:\n  policy: {kind: lbss,\n    chunk_slot: 2}",
            "router.policy.chunk_slot",
            3,
            "did you mean 'chunk_slots'?",
        ),
        ("router: {policy: {kind: lbss, chunk_slots: 2.0}}", "router.policy.chunk_slots", 1, "must be an integer, got 2.0"),
        (
            "router: {policy: {kind: hedge, chain: [ngram]}}",
            "router.policy",
            1,
            "chain must be left out for the policy hedge",
        ),
        # Settings of older versions.
        ("router:\n  policy: {hysteresis: 0.1}", "router.policy.hysteresis", 2, "no setting any more: it is a constant now"),
        ("router: {collapse: {quarantine_s: 9}}", "router.collapse", 1, "no setting any more: it is a constant now; known"),
        ("drafters:\n- {name: a, ahead_len: 8, options: {kind: ngram}}", "drafters[0].ahead_len", 2, "no setting any more"),
        (
            "supervision: {health_period_ms: 40000}",
            "supervision.health_period_ms",
            1,
            "no setting any more: it is a constant now; did you mean 'health_timeout_ms'?",
        ),
        (
            "target: {prefill_chunk_len: 600}",
            "target.prefill_chunk_len",
            1,
            "no setting any more: it follows from max_pass_to",
        ),
        ("cluster: {state: {kind: redis}}", "cluster.state.kind", 1, "for Redis set url, such as redis://127.0.0.1:6379/0"),
        (
            "drafters:\n- {name: a, options: {kind: eagle3, path: x, target: y}}",
            "drafters[0].options.target",
            2,
            "no setting any more: it is always the served model",
        ),
        ("api: {port: .inf}", "api.port", 1, "must be a valid integer, got inf"),
        ("api: {request_deadline_s: .inf}", "api.request_deadline_s", 1, "must be a finite number, got inf"),
        ("api: {port: 2026-11-21}", "api.port", 1, "got '2026-11-21'"),
        ("model: {name: 2026-13-41}", "model.name", 1, "'2026-13-41' is no timestamp: text needs quotes"),
        ("api: {port: !!int many}", "api.port", 1, "'many' is no int"),
        (f"api: {{port: {'1' * 5000}}}", "api.port", 1, "is no int"),
        ("api: !!bool maybe", "api", 1, "is no bool"),
        ("api: !!timestamp now", "api", 1, "is no timestamp"),
        ("api: " + "[" * 3000, "", None, "is nested too deeply"),
        ("target: {engine: vllm, vllm: {max_loras: null}}", "target.vllm", 1, "max_loras must be an integer, got None"),
        ("api: {port: 1}\napi: {port: 2}", "api", 2, "duplicate key, first on line 1"),
        ("api: &a {x: *a}", "api.x", 1, "alias of a section that contains it"),
        ("api: [1,", "", 1, "is not YAML"),
        ("- 1\n- 2", "", 1, "must be an object"),
    ],
)
def test_a_mistake_is_named(text: str, path: str, line: int | None, words: str) -> None:
    found = problems(text)
    assert list(found) == [path]
    assert found[path][0] == line
    assert words in found[path][1]


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="password_file") as caught:
        parsed("cluster: {state: {url: 'redis://:hunter2@host/0'}}")
    assert "hunter2" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be used:\n  cannot be read: No such file"):
        load(tmp_path / "nothing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: {name: \xff}")
    with pytest.raises(ConfigError, match="cannot be read: 'utf-8' codec"):
        load(tmp_path / "latin.yaml")


def test_the_error_crosses_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed("zzz: 1")
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


def test_a_configuration_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.api.port = 1  # type: ignore[misc]


def test_show_can_be_loaded_again() -> None:
    for config in (Config(), resolve(Config(), SERVER)):
        assert parsed(show(config)) == config


def test_resolving_a_laptop() -> None:
    config = resolve_dtypes(resolve(Config(), LAPTOP))
    assert autos(config.model_dump(mode="json")) == [".target.partition"]  # which is chosen while it serves
    assert config.target.device == "cpu"
    assert config.target.resources.threads == 2
    assert config.transport.kind == "unix"
    cpus = config.target.resources.cpus + sum(d.resources.cpus for d in config.drafters)
    assert cpus <= 2
    assert all(d.device == "cpu" and d.resources.gpus == 0 for d in config.drafters)
    assert not str(config.cluster.state.folder).startswith("~")


@pytest.mark.parametrize("inventory", [LAPTOP, SERVER, Inventory((Node("a", 8, 2), Node("b", 8, 1)))])
def test_resolving_twice_changes_nothing(inventory: Inventory) -> None:
    once = resolve(Config(), inventory)
    assert resolve(once, inventory) == once


MODELS = """
target: {{replicas: {ranks}}}
drafters:
- {{name: ngram, options: {{kind: ngram}}}}
- {{name: a, options: {{kind: model, model: x}}}}
- {{name: b, options: {{kind: model, model: x}}}}
- {{name: c, options: {{kind: cascade, members: [{{kind: ngram}}, {{kind: model, model: x}}]}}}}
"""


@pytest.mark.parametrize(
    ("ranks", "device", "drafter_device", "drafter_gpus"),
    [
        (4, "cuda", "cuda", 1.0),  # four GPUs are left for three drafters
        (5, "cuda", "cuda", 1.0),  # exactly three
        (6, "cuda", "cuda", 0.5),  # two GPUs for three
        (7, "cuda", "cuda", 0.3333),  # one
        (8, "cuda", "cpu", 0.0),  # none
        (9, "cpu", "cuda", 1.0),  # not even enough for the target, so the drafters have them all
    ],
)
def test_drafters_take_the_gpus_that_the_target_leaves(
    ranks: int, device: str, drafter_device: str, drafter_gpus: float
) -> None:
    config = resolve(parsed(MODELS.format(ranks=ranks)), SERVER)
    assert config.target.device == device
    assert config.drafters[0].device == "cpu"
    assert [(d.device, d.resources.gpus) for d in config.drafters[1:]] == [(drafter_device, drafter_gpus)] * 3


def test_weights_as_shipped_are_multiplied_on_cpus_also_of_a_machine_with_gpus() -> None:
    other = "- {name: other, options: {kind: model, model: x}}"
    config = resolve(parsed("target: {dtype: as-shipped}\n" + SHIPPED_DRAFTER + other), SERVER)
    assert [config.target.device, *(drafter.device for drafter in config.drafters)] == ["cpu", "cpu", "cuda"]


def test_what_the_file_says_stands() -> None:
    text = MODELS.format(ranks=2)
    for name in ("a", "b"):
        text = text.replace(f"name: {name},", f"name: {name}, resources: {{gpus: 2, cpus: 3, threads: 4}},")
    config = resolve(parsed(text), SERVER)
    for drafter in config.drafters[1:3]:
        assert (drafter.resources.gpus, drafter.resources.cpus, drafter.resources.threads) == (2, 3, 4)
    assert config.drafters[3].resources.gpus == 1  # eight, less two of the target and four of these


def test_several_machines_talk_by_grpc_and_listen_everywhere() -> None:
    machines = Inventory((Node("a", 4), Node("b", 4)))
    with pytest.raises(InvalidField, match=r"transport\.host: must be auto or an address: the cluster has 2 machines"):
        resolve(parsed("transport: {host: unix}"), machines)
    config = resolve(Config(), machines)
    assert (config.transport.kind, config.transport.host) == ("grpc", "node")
    assert config.router.policy.kind == "epsilon-greedy"


def test_labels_bound_what_auto_may_take() -> None:
    nodes = Inventory((Node("big", 32, 4, {"pool": "target"}), Node("small", 16, 1, {"pool": "drafters"})))
    text = """
target: {replicas: 4, resources: {node_labels: {pool: target}}}
drafters:
- {name: a, options: {kind: model, model: x}, resources: {node_labels: {pool: drafters}}}
- {name: b, options: {kind: model, model: x}, resources: {node_labels: {pool: target}}}
"""
    config = resolve(parsed(text), nodes)
    assert config.target.device == "cuda"
    assert [d.device for d in config.drafters] == ["cuda", "cpu"]
    assert resolve(parsed(text.replace("replicas: 4", "replicas: 5")), nodes).target.device == "cpu"
    assert resolve(parsed(text.replace("replicas: 4", "engine: vllm, replicas: 4")), nodes).target.device == "cuda"
    assert resolve(parsed(text.replace("replicas: 4", "engine: vllm, replicas: 5")), nodes).target.device == "cuda"
    without = resolve(parsed(text), nodes, uses_gpus=False)
    assert [one.device for one in (without.target, *without.drafters)] == ["cpu"] * 3, "torch is built for CPUs"


def test_a_cpu_target_gets_a_thread_for_each_physical_core_that_its_products_can_use() -> None:
    server = Inventory((Node("a", 64, num_cores=32), Node("b", 16, num_cores=8)))
    assert resolve(Config(), Inventory((Node("a", 64),))).target.resources.threads == 64
    assert resolve(Config(), server).target.resources.threads == 32
    assert resolve(Config(), server, max_threads=13).target.resources.threads == 13
    assert resolve(Config(), Inventory((Node("a", 2, num_cores=32),))).target.resources.threads == 2
    config = parsed("target: {replicas: 4}")
    assert resolve(config, Inventory((Node("a", 32, num_cores=16),))).target.resources.threads == 4
    named = parsed("target: {resources: {threads: 40}}")
    assert resolve(named, server, max_threads=13).target.resources.threads == 40, "what the file names stays"


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 2), (4, 3), (32, 31)])
def test_a_vllm_target_on_cpus_leaves_a_core_of_more_than_two(num_cores: int, num_threads: int) -> None:
    config = parsed("target: {engine: vllm}")
    assert resolve(config, Inventory((Node("a", 64, num_cores=num_cores),))).target.resources.threads == num_threads


def test_a_draft_length_rule_is_named_with_options_of_its_own() -> None:
    rule = parsed("planner: {draft_length: {kind: fixed, num_tokens: 3}}").planner.draft_length
    assert rule == DraftLengthConfig(kind="fixed", num_tokens=3)
    assert parsed(show(Config(planner=PlannerConfig(draft_length=rule)))).planner.draft_length == rule
    assert Config().planner.draft_length.kind == "outrider"
    found = problems("planner: {draft_length: {kind: fixed, num_tokens: 0}}")
    assert any("num_tokens" in path for path in found)
    found = problems("planner: {draft_length: {kind: outrider, num_tokens: 3}}")
    assert any("num_tokens" in path for path in found)
    assert problems("planner: {draft_length: {kind: longest}}")


@pytest.mark.parametrize(
    ("text", "num_gpus", "rows", "chunk_len"),
    [
        ("", 0, 512, 256),
        ("", 1, 2048, 2048),
        ("target: {max_num_sequences: 1024}", 0, 1024, 256),
        ("target: {max_pass_tokens: 128}", 0, 128, 128),
        ("target: {device: cuda, max_pass_tokens: 512}", 1, 512, 512),
        ("target: {engine: vllm}", 0, 2048, 2048),
        ("target: {engine: vllm, max_pass_tokens: 8192}", 0, 8192, 2048),
    ],
)
def test_passes_are_long_where_they_have_a_fixed_cost(text: str, num_gpus: int, rows: int, chunk_len: int) -> None:
    config = parsed(text)
    target = resolve(config, Inventory((Node("a", 8, num_gpus),))).target
    assert (target.max_pass_tokens, target.longest_chunk) == (rows, chunk_len)
    with_device = config.target.model_copy(update={"device": target.device})
    assert (with_device.longest_pass, with_device.longest_chunk) == (rows, chunk_len)


# ---- the reference


def test_the_reference_of_settings_is_current_and_has_the_defaults() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.yaml"
    assert page.read_text("utf-8") == reference(), "outrider config --reference > docs/settings.yaml"
    assert parsed(reference()) == Config()


def test_every_setting_is_in_the_reference() -> None:
    text, sections = reference(), [Section]
    for one in sections:
        sections += [other for other in one.__subclasses__() if other.__module__.startswith("cluster.config.")]
    names = [name for one in sections for name in one.model_fields]
    assert len(names) > 100
    assert [name for name in names if not re.search(rf"\b{name}\b:", text)] == []
