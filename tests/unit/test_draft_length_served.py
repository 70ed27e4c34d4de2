"""Draft lengths with the real loops: a native target, a model drafter in another process' loop, and a clock by hand."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from cluster.config import DraftLengthConfig
from cluster.types import Commit, DraftTerms, ModelInfo
from drafters.model import ModelDrafter
from drafters.protocol import Demand, Draft
from drafters.small_model import SmallModel
from engine.factory import load_model, load_target
from engine.loop_status import StepReport
from router.cost_model import TableCost
from router.drafting.length import DraftLengths
from router.drafting.policies import build_draft_lengths
from router.drafting.value import DraftingValue
from router.plan import SequenceView, StepPlan
from router.planning.planner import PlannerSettings, StepPlanner
from tests.support.linked_loops import LinkedTarget
from tests.support.requests import a_request
from tests.support.tiny_model import write_tiny_model

VOCAB_SIZE = 257
MODEL = ModelInfo("tiny", VOCAB_SIZE, 512, (VOCAB_SIZE - 1,), "tiny")
MAX_LEN = 5
PASS_S = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3)


class Noting(ModelDrafter):
    """Keeps the lengths of its drafts."""

    def __init__(self, model: SmallModel) -> None:
        super().__init__(model)
        self.model = model
        self.lens: list[int] = []

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        drafts = super().propose(demands)
        self.lens += [len(draft.token_ids) for draft in drafts]
        return drafts


class Load:
    """A cost model whose rows become dearer."""

    row_s = 0.0

    def step_s(self, num_rows: int, num_context: int) -> float:
        return PASS_S + self.row_s * num_rows

    prefill_s = step_s

    def table(self, num_context: int) -> TableCost:
        return TableCost((1, 64), (self.step_s(1, 0), self.step_s(64, 0)))

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> None:
        return None

    def catch_up_s(self, drafter: str, num_tokens: int) -> None:
        return None


class Switched(DraftLengths):
    """A length that the test sets."""

    num_tokens = MAX_LEN

    def budgets(self, sequences: Iterable[SequenceView], value: DraftingValue) -> dict[str, DraftTerms]:
        return {s.request_id: DraftTerms(self.num_tokens) for s in sequences if s.drafter is not None}


class Served(LinkedTarget):
    """A target and a drafter of the same weights, which is always right."""

    def __init__(
        self, folder: Path, lengths: DraftLengths, chain: tuple[str, ...] | None = None, spare: float = 1.0
    ) -> None:
        self.cost, model = Load(), load_model(folder, "float32")
        engine = load_target(folder, dtype="float32", kv_cache_bytes=2**25, max_model_len=512)
        planner = StepPlanner(PlannerSettings("all", max_hold_s=1.0))
        super().__init__(engine, self.cost, planner, lengths, drafter="d", model=MODEL)
        self.drafter = Noting(SmallModel(model, num_blocks=64, vocab_size=VOCAB_SIZE, eos_token_ids=(VOCAB_SIZE - 1,)))
        self.drafts = self.drafter_loop("d", self.drafter, spare, max_draft_len=MAX_LEN)
        self.submit(a_request("r", range(40, 72), max_tokens=400, temperature=0.0, ignore_eos=True, chain=chain))
        self.plans: list[StepPlan] = []
        self.num_waits = 0

    def run(self, num_passes: int) -> list[Commit]:
        """Its commits. The drafter answers while the target waits or computes."""
        self.plans, self.num_waits = [], 0
        commits: list[Commit] = []
        while len(self.plans) < num_passes:
            begun = self.loop.begin(self.clock.now_s)
            while self.drafts.step(self.clock.now_s):
                pass
            if isinstance(begun, StepReport):
                assert begun.wake_s is not None, "the request has ended"
                self.num_waits += 1
                self.clock.now_s += 0.001
            else:
                self.loop.execute(begun)
                self.clock.now_s += PASS_S
                self.loop.finish(begun, self.clock.now_s)
                self.plans.append(begun.plan)
            commits += self.commits()
        self.drafts.check_integrity()
        return commits


@pytest.mark.slow
def test_proposals_of_a_remote_model_get_shorter_when_the_price_of_a_row_rises(folder: Path) -> None:
    """The tiny model's confidences are low, so little is drafted at a price until they are calibrated."""

    def lens_before_and_after(lengths: DraftLengths) -> tuple[set[int], set[int]]:
        served = Served(folder, lengths)
        served.run(10)
        before = set(served.drafter.lens)
        served.cost.row_s = 0.05 * PASS_S  # at six tokens a pass and its wait a row costs nearly a third of a token
        served.run(4)  # until the price has come
        served.drafter.lens.clear()
        served.run(10)
        return before, set(served.drafter.lens)

    max_lens = {"d": MAX_LEN}
    before, after = lens_before_and_after(build_draft_lengths(DraftLengthConfig(), max_lens))
    assert before == {MAX_LEN}
    assert after
    assert max(after) < MAX_LEN
    assert lens_before_and_after(build_draft_lengths(DraftLengthConfig(kind="fixed", num_tokens=MAX_LEN), max_lens)) == (
        {MAX_LEN},
        {MAX_LEN},
    )


@pytest.mark.slow
@pytest.mark.parametrize("spare", [1.0, 0.0], ids=["kept in step", "catches up"])
def test_without_a_budget_a_request_is_decoded_plainly_and_acceptance_is_at_once_what_it_was(
    folder: Path, spare: float
) -> None:
    lengths = Switched()
    served = Served(folder, lengths, spare=spare)
    served.run(3)
    drafted = served.run(10)
    assert {commit.num_accepted for commit in drafted} == {MAX_LEN}
    assert served.num_waits, "the round waits for drafts"

    lengths.num_tokens = 0
    served.run(2)  # the proposal under way is verified
    served.drafter.lens.clear()
    plain = served.run(60)
    assert served.num_waits == 0
    assert not served.drafter.lens
    assert all(not plan.held and [span.num_drafts for span in plan.spans] == [0] for plan in served.plans)
    assert {(commit.num_proposed, commit.drafter, len(commit.token_ids)) for commit in plain} == {(0, None, 1)}

    lengths.num_tokens = MAX_LEN
    num_rows = served.drafter.model.num_rows
    again = served.run(10)
    first = next(i for i, commit in enumerate(again) if commit.num_proposed)
    assert first <= 2, "one round to say so, one to draft"
    assert {commit.num_accepted for commit in again[first:]} == {MAX_LEN}
    # A row for each token, and those that were missed once: nothing is computed twice.
    num_missed = 0 if spare else 62
    assert served.drafter.model.num_rows - num_rows <= num_missed + sum(len(commit.token_ids) for commit in again) + MAX_LEN


def test_a_drafter_that_forgets_what_it_was_sent_does_not_pass_the_test_above(folder: Path) -> None:
    """The control: with tokens missing in its context, drafts are wrong."""
    served = Served(folder, Switched())
    served.run(3)
    lose: Callable[[str, Sequence[int]], None] = lambda request_id, token_ids: None  # noqa: E731
    served.drafter.model.extend = lose  # type: ignore[method-assign]
    assert {commit.num_accepted for commit in served.run(10)[2:]} != {MAX_LEN}


def test_who_opts_out_of_drafting_is_neither_held_nor_drafted_for(folder: Path) -> None:
    served = Served(folder, build_draft_lengths(DraftLengthConfig(kind="fixed", num_tokens=4), {"d": MAX_LEN}), chain=())
    commits = served.run(20)
    assert served.num_waits == 0
    assert not served.drafter.lens
    assert not served.drafts.sessions.num_drafted
    assert not served.drafts.sessions.num_shadows
    assert all(not plan.held for plan in served.plans)
    assert {commit.num_proposed for commit in commits} == {0}
    drafted = Served(folder, build_draft_lengths(DraftLengthConfig(kind="fixed", num_tokens=4), {"d": MAX_LEN})).run(20)
    assert max(commit.num_proposed for commit in drafted) == 4
    tokens = [token for commit in drafted for token in commit.token_ids]
    assert [token for commit in commits for token in commit.token_ids] == tokens[: len(commits)]
