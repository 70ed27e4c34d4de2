"""Drafts of the target engine's own proposer: for the requests of the last pass, after the tokens that it committed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cluster.config import Config, DrafterConfig, NgramOptions, TargetConfig, VllmOptions
from cluster.errors import InvalidField
from cluster.sampling_params import SamplingParams
from cluster.types import ModelInfo
from drafters.engine_proposals import EngineProposals
from drafters.protocol import Demand
from drafters.registry import Site, make
from engine.loading import proposer_of
from tests.support.dspark import write_speculators

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0)
EAGLE = VllmOptions(speculative={"method": "eagle3", "model": "org/head"})


class Engine:
    """Answers once a pass."""

    def __init__(self) -> None:
        self.drafts: Mapping[str, Sequence[int]] = {}
        self.asked: list[int] = []

    def draft(self, num_tokens: int) -> Mapping[str, Sequence[int]]:
        self.asked.append(num_tokens)
        drafts, self.drafts = self.drafts, {}
        return {name: ids[:num_tokens] for name, ids in drafts.items()}


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def drafter(engine: Engine) -> EngineProposals:
    drafter = EngineProposals(engine)
    drafter.open("1/a", [1, 2, 3], 3, SAMPLING)
    drafter.open("1/b", [4], 1, SAMPLING)
    return drafter


def drafted(drafter: EngineProposals, *demands: Demand) -> list[tuple[int, ...]]:
    return [draft.token_ids for draft in drafter.propose(demands)]


def test_one_question_a_pass_serves_all_demands(engine: Engine, drafter: EngineProposals) -> None:
    engine.drafts = {"a": [7, 8, 9], "b": [5, 6, 7], "unfollowed": [1]}
    assert drafted(drafter, Demand("1/a", 3), Demand("1/b", 1)) == [(7, 8, 9), (5,)]
    assert engine.asked == [3]
    assert drafted(drafter, Demand("1/b", 2)) == [(5, 6)]  # there is none anew before the next pass


def test_a_request_that_went_on_has_none_of_an_earlier_pass(engine: Engine, drafter: EngineProposals) -> None:
    engine.drafts = {"a": [7, 8], "b": [5, 6]}
    drafted(drafter, Demand("1/a", 2))
    drafter.extend("1/a", [7])
    assert drafted(drafter, Demand("1/a", 2), Demand("1/b", 2)) == [(), (5, 6)]


def test_what_is_ahead_must_be_the_beginning_of_the_draft(engine: Engine, drafter: EngineProposals) -> None:
    engine.drafts = {"a": [7, 8, 9]}
    assert drafted(drafter, Demand("1/a", 3)) == [(7, 8, 9)]
    assert drafted(drafter, Demand("1/a", 1, ahead=(7,)), Demand("1/a", 1, ahead=(3,))) == [(8,), ()]


def test_confidence_is_the_share_of_tokens_that_were_right(engine: Engine, drafter: EngineProposals) -> None:
    for _ in range(50):
        engine.drafts = {"a": [7, 8, 9]}
        drafter.propose([Demand("1/a", 3)])
        drafter.extend("1/a", [7, 8, 1, 2])
    engine.drafts = {"a": [7, 8, 9]}
    (draft,) = drafter.propose([Demand("1/a", 3)])
    assert draft.confidences == pytest.approx((2 / 3,) * 3, abs=0.01)


def test_ended_requests_leave_nothing(engine: Engine, drafter: EngineProposals) -> None:
    engine.drafts = {"a": [7], "b": [5]}
    drafter.propose([Demand("1/a", 1)])
    drafter.release("1/a")
    drafter.release("unknown")
    drafter.check_integrity()
    drafter.open("1/a", [1], 1, SAMPLING)
    assert drafted(drafter, Demand("1/a", 1)) == [()]


@pytest.mark.parametrize(
    "speculative", [{"model": "org/head"}, {"method": "ngram"}, {"method": "mtp", "num_speculative_tokens": 3}]
)
def test_what_is_no_proposer_with_a_model_is_refused(speculative: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must name a method|is the drafter's max_draft_len"):
        VllmOptions.model_validate({"speculative": speculative})


def test_a_head_needs_no_tokenizer_of_its_own(tmp_path: Path, tiny_model_folder: Path) -> None:
    write_speculators(tmp_path, tiny_model_folder, "eagle3")
    asked = {"method": "eagle3", "model": str(tmp_path)}
    hosted = VllmOptions(speculative={**asked})
    assert (
        proposer_of([DrafterConfig(name=kind, options=one) for kind, one in (("n", NgramOptions()), ("a", hosted))]) == asked
    )


def test_vllm_hosts_one_proposer_and_no_other_engine_does() -> None:
    first, second = DrafterConfig(name="a", options=EAGLE), DrafterConfig(name="b", options=EAGLE)
    with pytest.raises(ValueError, match="vLLM has one proposer, got 2"):
        Config(drafters=(first, second), target=TargetConfig(engine="vllm"))
    with pytest.raises(ValueError, match=r"needs target\.engine vllm, got native"):
        Config(drafters=(first,), target=TargetConfig(engine="native"))
    assert DrafterConfig(name="n", options=NgramOptions()).is_colocated is False
    assert first.is_colocated
    with pytest.raises(InvalidField, match=r"needs target\.engine vllm"):
        make(EAGLE, Site(ModelInfo("m", 257, 512, (1,), "f"), "cpu"))
