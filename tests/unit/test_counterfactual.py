"""What drafters would have done for requests that others draft for: exactly what they really do when it is their turn."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import DrafterOptions, LayersOptions, ModelOptions, NgramOptions, SuffixOptions
from cluster.messages import Budget, DraftRound, DraftScore, Extend, Hello, Message, Open, ProposalRound, Role
from cluster.sampling_params import SamplingParams
from cluster.transport.base import LinkUp, Mailbox, Received
from cluster.types import DraftTerms, ModelInfo, Proposal
from drafters.counterfactual import Shadow
from drafters.loop import REPORT_PERIOD_S, DrafterLoop
from drafters.model import ModelDrafter
from drafters.protocol import Drafter
from drafters.registry import Site, make
from drafters.sessions import MAX_UNSCORED, SessionLimits
from drafters.small_model import Question, SmallModel
from engine.factory import load_model
from engine.models.tokenizer import fingerprint
from tests.support.quick import first
from tests.support.tiny_model import write_tiny_layers, write_tiny_model

VOCAB_SIZE = 257
EOS = VOCAB_SIZE - 1
PROMPT = tuple(range(40, 70))
MAX_DRAFT_LEN = 4
SAMPLED = SamplingParams(max_tokens=60, temperature=0.8, seed=5, ignore_eos=True)
SAMPLED_LONG = replace(SAMPLED, max_tokens=400)
PENALIZED = replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, top_k=40)


@dataclass(eq=False)
class Link:
    """The drafter's end of a link."""

    name: str = "target"
    sent: list[ProposalRound] = field(default_factory=list)

    @property
    def peer(self) -> Hello:
        return Hello(Role.TARGET, self.name, VOCAB_SIZE, "fingerprint")

    def send(self, message: Message) -> None:
        assert isinstance(message, ProposalRound)
        self.sent.append(message)

    def close(self) -> None: ...


class Bench:
    """A drafter's loop, and a target that says what it commits."""

    def __init__(self, drafter: Drafter, **limits: int) -> None:
        self.mailbox, self.link, self.now_s = Mailbox(), Link(), 0.0
        self.loop = DrafterLoop("d", drafter, self.mailbox, SessionLimits(**{"max_draft_len": MAX_DRAFT_LEN, **limits}))
        self.mailbox.put(LinkUp(self.link))

    def mail(self, **content: Any) -> None:
        self.mailbox.put(Received(self.link, DraftRound(1, **content)))

    def open(self, name: str, token_ids: Sequence[int], sampling: SamplingParams, budget: int) -> None:
        self.mail(
            opens=(Open(name, tuple(token_ids), min(len(PROMPT), len(token_ids)), sampling),),
            budgets=(Budget(name, DraftTerms(budget)),),
        )

    def settle(self) -> None:
        for _ in range(2000):
            self.now_s += REPORT_PERIOD_S  # so that scores are sent with every piece of work
            if not self.loop.step(self.now_s):
                break
        else:
            raise AssertionError("the loop never comes to rest")
        self.loop.check_integrity()

    def scores(self) -> list[DraftScore]:
        return [score for message in self.link.sent for score in message.scores]

    def proposals(self) -> list[Proposal]:
        found = [proposal for message in self.link.sent for proposal in message.proposals]
        self.link.sent.clear()
        return found


@pytest.mark.parametrize(("took_s", "rests_s"), [(0.5, 4.5), (150.0, 9.0)])
def test_scoring_has_its_share_of_time_but_for_a_pause_of_the_machine(took_s: float, rests_s: float) -> None:
    bench = Bench(make(NgramOptions(), Site(None, "cpu")))
    bench.loop = DrafterLoop("d", make(NgramOptions(), Site(None, "cpu")), bench.mailbox, spare_share=0.1)
    bench.open("r", PROMPT, SAMPLED, 0)
    bench.mail(extends=(Extend("r", len(PROMPT), PROMPT),))
    assert bench.loop.begin(0.0) == "scored"
    bench.loop.finish("scored", 0.0, took_s)
    bench.mail(extends=(Extend("r", 2 * len(PROMPT), PROMPT),))
    assert bench.loop.begin(took_s) == "nothing"
    assert bench.loop.next_due_s() == pytest.approx(took_s + rests_s)


def scored(
    make_one: Callable[[], Drafter], text: Sequence[int], sampling: SamplingParams, lens: Sequence[int]
) -> dict[int, DraftScore]:
    """Of a request that is committed by as many tokens at a time; by base."""
    bench = Bench(make_one())
    bench.open("r", text[: len(PROMPT)], sampling, 0)
    at = len(PROMPT)
    for i, length in enumerate(lens):
        bench.mail(extends=(Extend("r", at, tuple(text[at : at + length])),))
        at += length
        if i % 3:  # sometimes several commits wait
            bench.settle()
    bench.settle()
    found = {score.base_len: score for score in bench.scores()}
    assert not bench.proposals()
    return found


def really(make_one: Callable[[], Drafter], text: Sequence[int], sampling: SamplingParams) -> dict[int, tuple[int, int]]:
    """Of the same request when the drafter drafts for it: tokens right and proposed, by base."""
    bench = Bench(make_one())
    bench.open("r", text[: len(PROMPT)], sampling, MAX_DRAFT_LEN)
    found, at = {}, len(PROMPT)
    while at < len(text):
        bench.settle()
        (proposal,) = [p for p in bench.proposals() if p.base_len == at]
        drafts = proposal.token_ids
        num_right = next((i for i, (a, b) in enumerate(zip(drafts, text[at:], strict=False)) if a != b), len(drafts))
        num_right = min(num_right, len(text) - at)
        found[at] = num_right, len(drafts)
        bench.mail(extends=(Extend("r", at, tuple(text[at : at + 1])),))
        at += 1
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3)


@pytest.fixture(scope="module")
def layers_folder(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return write_tiny_layers(tmp_path_factory.mktemp("layers"), folder, token_ids=range(3, 250, 2))


def text_of(folder: Path, seed: int, sampling: SamplingParams) -> list[int]:
    """A prompt that repeats itself, and an answer that takes turns at that and at what the model says, with slips."""
    model = small_model(folder)
    rng = random.Random(seed)
    text = [*PROMPT[:10], *PROMPT[:20]]
    model.open("r", text, len(text), sampling)
    while len(text) < len(PROMPT) + 40:
        (chosen,) = model.choose([Question("r")])
        token = chosen.token_ids[0] if len(text) // 8 % 2 else text[-10]
        token = rng.randrange(EOS) if rng.random() < 0.1 else token
        model.extend("r", [token])
        text.append(token)
    return text


def small_model(folder: Path, num_blocks: int = 64, max_pass_rows: int = 512) -> SmallModel:
    return SmallModel(
        load_model(folder, "float32"),
        num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        max_pass_rows=max_pass_rows,
    )


@pytest.mark.parametrize("sampling", first(1, [PENALIZED, SAMPLED]), ids=["penalized", "sampled"])
@pytest.mark.parametrize("kind", ["ngram", "suffix", "model", "layers"])
def test_a_score_is_what_really_drafting_gives(
    kind: str, sampling: SamplingParams, folder: Path, layers_folder: Path
) -> None:
    text = text_of(folder, 3, sampling)
    target = ModelInfo("tiny", VOCAB_SIZE, 512, (EOS,), fingerprint(folder))
    options: dict[str, DrafterOptions] = {
        "ngram": NgramOptions(),
        "suffix": SuffixOptions(),
        "model": ModelOptions(model=str(folder), dtype="float32", kv_cache_gb=0.001),
        "layers": LayersOptions(path=str(layers_folder), dtype="float32", kv_cache_gb=0.001, min_survival=0.3).of_target(
            str(folder)
        ),
    }

    def make_one() -> Drafter:
        return make(options[kind], Site(target, "cpu"))

    truth = really(make_one, text, sampling)
    driven, base = [], len(PROMPT)  # the rounds that it has when it drives
    while base < len(text):
        driven.append((base, truth[base][0]))
        base += truth[base][0] + 1
    rng = random.Random(1)
    for lens in ([1] * 40, [rng.randint(1, 5) for _ in range(12)]):
        committed_len = min(len(PROMPT) + sum(lens), len(text))
        found = scored(make_one, text, sampling, lens)
        # However the driver's commits fall. What the last draft comes to is not known before its end is committed.
        decided = [(base, right) for base, right in driven if base + right < committed_len]
        assert [(score.base_len, score.num_matched) for score in found.values()][: len(decided)] == decided
        assert len(found) <= len(decided) + 1
        for base_len, score in found.items():
            num_right, num_proposed = truth[base_len]
            assert (score.num_scored > score.num_matched) == (num_right < num_proposed or num_proposed < MAX_DRAFT_LEN)
    assert sum(num_right for num_right, _ in truth.values()) >= 3, "the test needs drafts that are right"


def test_a_request_that_comes_over_finds_the_cache_in_step(folder: Path) -> None:
    text = text_of(folder, 4, SAMPLED)
    model = small_model(folder)
    bench = Bench(ModelDrafter(model))
    bench.open("r", text[:30], SAMPLED, 0)
    bench.mail(extends=(Extend("r", 30, tuple(text[30:50])),))
    bench.settle()
    num_rows = model.num_rows
    bench.mail(budgets=(Budget("r", DraftTerms(MAX_DRAFT_LEN)),), extends=(Extend("r", 50, tuple(text[50:52])),))
    bench.settle()
    (proposal,) = bench.proposals()
    assert (proposal.base_len, len(proposal.token_ids)) == (52, MAX_DRAFT_LEN)
    assert model.num_rows - num_rows <= 2 + MAX_DRAFT_LEN
    fresh = Bench(ModelDrafter(small_model(folder)))
    fresh.open("r", text[:52], SAMPLED, MAX_DRAFT_LEN)
    fresh.settle()
    assert fresh.proposals()[0].token_ids == proposal.token_ids
    bench.mail(budgets=(Budget("r", DraftTerms(0)),), extends=(Extend("r", 52, tuple(text[52:56])),))  # and back
    bench.settle()
    assert not bench.proposals()
    assert model.num_rows - num_rows <= 2 * MAX_DRAFT_LEN + 6


def test_drafts_come_before_scores_and_wait_for_one_small_pass_at_most(folder: Path) -> None:
    model = small_model(folder)
    bench = Bench(ModelDrafter(model))
    bench.open("far-behind", [i % 250 for i in range(200)], replace(SAMPLED, max_tokens=300), 0)
    bench.mail(extends=(Extend("far-behind", 200, (1, 2, 3)),))
    assert bench.loop.step(0.0)
    bench.open("wanted", PROMPT, SAMPLED, MAX_DRAFT_LEN)
    rows = model.num_rows
    bench.loop.step(0.0)
    assert len(bench.proposals()) == 1  # at once
    assert model.num_rows - rows <= len(PROMPT) + MAX_DRAFT_LEN
    while True:
        rows = model.num_rows
        if not bench.loop.step(0.0):
            break
        assert model.num_rows - rows <= 32
    assert model.num_rows > 200  # it has caught up, in pieces


def test_requests_of_others_take_no_cache_from_those_that_it_drafts_for(folder: Path) -> None:
    """Blocks for one request of 60 tokens, and a little."""
    model = small_model(folder, num_blocks=3)
    bench = Bench(ModelDrafter(model))
    bench.open("own", PROMPT * 2, SAMPLED, MAX_DRAFT_LEN)
    bench.settle()
    bench.open("other", [7 * i % 250 for i in range(60)], SAMPLED, 0)
    bench.mail(extends=(Extend("other", 60, (1, 2)),))
    bench.settle()
    assert model.num_lost == 0
    assert not bench.scores()


def test_room_is_kept_for_requests_that_want_drafts(folder: Path) -> None:
    from drafters.ngram import NgramDrafter

    bench = Bench(NgramDrafter(), capacity=1, max_shadows=2)
    for name in "abc":
        bench.open(name, PROMPT, SAMPLED, 0)
        bench.mail(extends=(Extend(name, len(PROMPT), (1, 2)),))
    bench.settle()
    assert {score.request_id for score in bench.scores()} == {"a", "b"}
    bench.link.sent.clear()
    bench.mail(extends=(Extend("c", len(PROMPT) + 2, (3,)),))
    bench.settle()
    assert not any(message.resyncs for message in bench.link.sent)  # nobody need know
    bench.mail(budgets=(Budget("c", DraftTerms(MAX_DRAFT_LEN)),))
    bench.settle()
    assert [message.resyncs for message in bench.link.sent] == [("c",)]
    bench.open("c", (*PROMPT, 1, 2, 3), SAMPLED, MAX_DRAFT_LEN)
    bench.settle()
    assert [p.request_id for p in bench.proposals()] == ["c"]
    bench.mail(budgets=(Budget("a", DraftTerms(MAX_DRAFT_LEN)),))  # one too many
    bench.mail(extends=(Extend("a", len(PROMPT) + 2, (3,)),))
    bench.settle()
    assert [(p.request_id, p.token_ids) for p in bench.proposals()] == [("a", ())]


def test_scores_are_told_in_time_though_nothing_is_proposed() -> None:
    from drafters.ngram import NgramDrafter

    bench = Bench(NgramDrafter())
    bench.open("r", PROMPT, SAMPLED, 0)
    for i in range(4):
        bench.now_s = i * REPORT_PERIOD_S
        bench.mail(extends=(Extend("r", len(PROMPT) + i, (i,)),))
        bench.settle()
        assert sum(len(message.scores) for message in bench.link.sent) >= i
    bench.mail(releases=("r",))
    bench.settle()


def test_a_busy_drafter_gives_up_scores_and_not_the_request() -> None:
    shadow = shadow_of(10, 4, 10_000)
    shadow.commit(range(MAX_UNSCORED))
    assert shadow.skip() == list(range(MAX_UNSCORED))
    assert (shadow.scored_len, shadow.pending) == (10 + MAX_UNSCORED, [])


def shadow_of(scored_len: int, max_draft_len: int, end_len: int) -> Shadow:
    return Shadow("key", "r", scored_len, max_draft_len, end_len)


def advanced(shadow: Shadow, chosen: int, confidence: float, min_survival: float) -> DraftScore | None:
    if shadow.begins:
        shadow.begin()
    return shadow.advance(chosen, confidence, min_survival)


def rounds_of(
    shadow: Shadow, choices: Sequence[int], confidences: Sequence[float], min_survival: float = 0.0
) -> list[DraftScore]:
    found = [advanced(shadow, chosen, c, min_survival) for chosen, c in zip(choices, confidences, strict=True)]
    return [score for score in found if score is not None]


def test_virtual_drafts_end_where_real_ones_do() -> None:
    for confidences, min_survival, expected in (
        ((0.9, 0.9, 0.9, 0.9), 0.0, DraftScore("r", 5, 4, 4)),  # the longest draft, all right: no position failed
        ((0.9, 0.5, 0.9, 0.9), 0.5, DraftScore("r", 5, 2, 3)),  # the unlikely token itself is drafted
    ):
        shadow = shadow_of(5, 4, 1000)
        shadow.commit((1, 2, 3, 4))
        assert rounds_of(shadow, (1, 2, 3, 4), confidences, min_survival) == [expected]
    shadow = shadow_of(5, 4, 8)  # it ends at 8: two tokens may be drafted, the last is the target's own
    shadow.commit((1, 2, 3))
    assert rounds_of(shadow, (1, 2, 3), (1.0,) * 3) == [DraftScore("r", 5, 2, 2)]


def test_a_virtual_round_begins_where_the_one_before_it_ended_and_not_at_a_commit() -> None:
    shadow = shadow_of(5, 4, 1000)
    shadow.commit((1,))
    shadow.commit((2, 3))  # a round of the driver's began at 6; its own draft is still right there
    assert rounds_of(shadow, (1, 2, 9), (1.0,) * 3) == [DraftScore("r", 5, 2, 3)]
    assert shadow.begins
    shadow.commit((4, 5))
    assert rounds_of(shadow, (9, 5), (1.0,) * 2) == [DraftScore("r", 8, 0, 1)]


def test_scores_have_the_mean_of_really_driving_on_text_where_the_driver_differs() -> None:
    """A text in which every run of five tokens was seen before, and a driver whose rounds end at the third of each."""
    from drafters.ngram import NgramDrafter

    rng = random.Random(7)
    phrases = [[rng.randrange(250) for _ in range(5)] for _ in range(6)]
    text = list(PROMPT) + [token for _ in range(40) for token in phrases[rng.randrange(6)]]
    truth = really(NgramDrafter, text, SAMPLED_LONG)
    base, driven = len(PROMPT) + 60, []
    while base < len(text) - MAX_DRAFT_LEN:
        driven.append(truth[base][0])
        base += truth[base][0] + 1
    lens = [5] * 40
    lens[0] = 3
    found = scored(NgramDrafter, text, SAMPLED_LONG, lens)
    own = [score.num_matched for base, score in found.items() if len(PROMPT) + 60 <= base < len(text) - MAX_DRAFT_LEN]
    ratio = (1 + sum(own) / len(own)) / (1 + sum(driven) / len(driven))
    assert 0.95 < ratio < 1.05
    at_commits = [truth[base][0] for base in range(len(PROMPT) + 63, len(text) - MAX_DRAFT_LEN, 5)]
    biased = (1 + sum(at_commits) / len(at_commits)) / (1 + sum(driven) / len(driven))
    assert not 0.95 < biased < 1.05, "the driver's bases must be biased, or the test shows nothing"
