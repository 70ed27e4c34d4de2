"""`outrider serve` on vLLM's engine: drafts change no token, a target that dies comes back, and another one takes its
streams over."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

from benchmarks.server import ServerProcess
from cluster.config import DrafterConfig, HiddenStateOptions, LoraModule, Resources
from tests.support.servers import served
from tests.support.settings import ALWAYS_DRAFTED, small_config
from tests.support.streaming import MODEL, Streamed, answers, run, undrafted
from tests.support.vllm_models import quantise, write_adapter, write_model
from tests.support.waiting import eventually, gauge

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.vllm]

NUM_TOKENS = 120


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not in this environment: make test-vllm")


@pytest.fixture(scope="module")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(folder / name, model_folder, seed)
    write_adapter(folder / "narrow", model_folder, 3, inputs=64)
    write_adapter(folder / "wide", model_folder, 4, rank=32)
    return folder


@pytest.fixture(scope="module")
def server(model_folder: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = small_config(str(model_folder), tmp_path_factory.mktemp("state"))
    dspark = DrafterConfig(name="dspark", options=HiddenStateOptions(path="dspark"))
    first = LoraModule(name="first", path=adapters / "first")
    update = {
        "target": config.target.model_copy(update={"engine": "vllm", "vllm": {"max_loras": 2}, "lora_modules": (first,)}),
        "api": config.api.model_copy(update={"lora_folder": adapters}),
        "drafters": (*config.drafters, dspark),
        "planner": ALWAYS_DRAFTED,
    }
    with served(config.model_copy(update=update)) as server:
        yield server


@pytest.fixture(scope="module")
def plain(server: ServerProcess) -> Mapping[int, str]:
    return undrafted(server)


@pytest.mark.parametrize("drafter", ["ngram", "dspark"])
def test_drafts_change_no_token(server: ServerProcess, plain: Mapping[int, str], drafter: str) -> None:
    """One drafter in a process of its own, and one on vLLM's hidden states."""
    with server.client() as http:
        before = gauge(http, "outrider_drafter_accepted_total", drafter)

        def accepts() -> bool:
            drafted = run(server, drafting=drafter)
            assert (drafted.texts, drafted.errors) == (plain, {})
            return gauge(http, "outrider_drafter_accepted_total", drafter) > before

        eventually(accepts)


def test_a_killed_target_ends_its_streams_with_an_error_and_serves_again(
    server: ServerProcess, plain: Mapping[int, str]
) -> None:
    killed = run(server, kill="TargetActor", max_tokens=1500, drafting="off")  # so long that none ends before
    assert not killed.texts
    assert {type(error) for error in killed.errors.values()} == {openai.APIError}
    assert all("again" in str(error) for error in killed.errors.values()), killed.errors
    with server.client() as http:
        eventually(lambda: answers(http))
    assert run(server).texts == plain


def test_adapters_come_and_go_and_drafts_change_no_token_of_theirs(
    server: ServerProcess, plain: Mapping[int, str], adapters: Path
) -> None:
    """One is in the file. One is loaded while it serves, and lost with its target."""
    with server.client() as http:

        def load(name: str) -> httpx.Response:
            return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})

        for name, reason in (("narrow", "matrices"), ("wide", "max_lora_rank"), ("none", "lora_path")):
            refused = load(name)
            assert refused.status_code == HTTPStatus.BAD_REQUEST
            assert reason in refused.text
        assert load("second").status_code == HTTPStatus.OK
        assert load("third").status_code == HTTPStatus.BAD_REQUEST, "max_loras"
        cards = {card["id"]: card["parent"] for card in http.get("/v1/models").json()["data"]}
        assert cards == {MODEL: None, "first": MODEL, "second": MODEL}
        of = {model: undrafted(server, model=model) for model in ("first", "second")}
        assert plain not in of.values()
        assert of["first"] != of["second"]
        for model, texts in of.items():
            for drafter in ("ngram", "dspark"):
                drafted = run(server, drafting=drafter, model=model)
                assert (drafted.texts, drafted.errors) == (texts, {})
        assert 'outrider_adapter_tokens_verified_total{adapter="second",drafter="ngram"}' in http.get("/metrics").text
        server.workers("TargetActor")[0].kill()
        eventually(lambda: answers(http))
        assert undrafted(server, model="second") == of["second"]
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == HTTPStatus.OK
        assert not answers(http, "second")
        assert load("third").status_code == HTTPStatus.OK
        assert undrafted(server, model="third") not in of.values()
        assert run(server).texts == plain


def test_drafts_change_no_token_of_a_quantised_model_of_another_family(tmp_path: Path) -> None:
    """Gemma 3 in int8, which the native engine does not compute."""
    folder = quantise(write_model(tmp_path / "gemma", "gemma-3"))
    config = small_config(str(folder), tmp_path / "state")
    update = {
        "model": config.model.model_copy(update={"served_names": (MODEL,)}),
        "target": config.target.model_copy(update={"engine": "vllm", "vllm": {"quantization": "compressed-tensors"}}),
        "planner": ALWAYS_DRAFTED,
    }
    with served(config.model_copy(update=update)) as server, server.client() as http:
        plain = undrafted(server)
        drafted = run(server, drafting="ngram")
        assert (drafted.texts, drafted.errors) == (plain, {})
        eventually(lambda: gauge(http, "outrider_drafter_verified_total", "ngram") > 0)


@pytest.mark.nightly
def test_streams_of_a_lost_target_go_on_at_another(model_folder: Path, tmp_path: Path) -> None:
    config = small_config(str(model_folder), tmp_path)
    resources = Resources(cpus=0.25, gpus=0, threads=1)
    target = config.target.model_copy(update={"engine": "vllm", "replicas": 2, "resources": resources})
    with served(config.model_copy(update={"target": target, "planner": ALWAYS_DRAFTED})) as server, server.client() as http:
        eventually(lambda: gauge(http, "outrider_target_ready") == 2)
        plain = undrafted(server, NUM_TOKENS)
        streamed = Streamed(server.url, NUM_TOKENS)
        streamed.start(4)
        streamed.wait_flowing()
        server.workers("TargetActor")[0].kill()
        streamed.wait_end()
        assert (streamed.texts, streamed.errors) == (plain, {})
        eventually(lambda: gauge(http, "outrider_requests_resumed_total") > 0)
