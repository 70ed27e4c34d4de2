"""Model drafters and chains against the target that they imitate: exact in fp32, and no row computed twice."""

import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from cluster.sampling_params import SamplingParams
from drafters.model import ModelDrafter
from drafters.ngram import NgramDrafter
from drafters.protocol import Demand, Draft, Drafter
from drafters.small_model import Question, SmallModel
from engine.factory import load_model, load_target
from engine.target import TargetEngine
from router.plan import Span
from tests.support.quick import first
from tests.support.requests import a_request
from tests.support.tiny_model import write_tiny_model
from tests.support.with_proposers import WithProposers

pytestmark = pytest.mark.slow  # together they take seconds

VOCAB_SIZE = 257
EOS = VOCAB_SIZE - 1
PROMPT = tuple(range(40, 100))
GREEDY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=80, temperature=0.8, seed=5, ignore_eos=True)
PENALIZED = SamplingParams(
    max_tokens=80,
    temperature=0.8,
    seed=6,
    ignore_eos=True,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    top_k=40,
    min_p=0.01,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=3)


def small_model(
    folder: Path, *, num_layers: int | None = None, num_blocks: int = 64, max_pass_rows: int = 512
) -> SmallModel:
    return SmallModel(
        load_model(folder, "float32", num_layers=num_layers),
        num_blocks=num_blocks,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        max_pass_rows=max_pass_rows,
    )


def plain_run(folder: Path, sampling: SamplingParams, num_tokens: int = 80) -> list[int]:
    """Prompt and what the target alone answers."""
    target: TargetEngine = load_target(folder, dtype="float32", kv_cache_bytes=2**25, max_model_len=256)
    token_ids = list(PROMPT)
    base_len = target.open(a_request("r", PROMPT, sampling=sampling), token_ids)
    while len(token_ids) < len(PROMPT) + num_tokens:
        (outcome,) = target.execute([Span.bound("r", base_len, tuple(token_ids[base_len:]))])
        base_len = len(token_ids)
        token_ids += outcome.chosen
    return token_ids


def ride(drafter: Drafter, token_ids: Sequence[int], sampling: SamplingParams, num_tokens: int) -> tuple[int, int]:
    """Drafts for a request whose output is known; (drafted, accepted) tokens."""
    drafter.open("r", token_ids[: len(PROMPT)], len(PROMPT), sampling)
    committed_len, num_drafted, num_accepted = len(PROMPT), 0, 0
    while committed_len < len(token_ids) - 1:
        (draft,) = drafter.propose([Demand("r", min(num_tokens, len(token_ids) - committed_len - 1))])
        drafter.check_integrity()
        num_right = 0
        while num_right < len(draft.token_ids) and draft.token_ids[num_right] == token_ids[committed_len + num_right]:
            num_right += 1
        drafter.extend("r", token_ids[committed_len : committed_len + num_right + 1])
        committed_len += num_right + 1
        num_drafted += len(draft.token_ids)
        num_accepted += num_right
    return num_drafted, num_accepted


@pytest.mark.parametrize("sampling", first(1, [PENALIZED, SAMPLED, GREEDY]))
def test_the_target_as_its_own_drafter_is_always_right(folder: Path, sampling: SamplingParams) -> None:
    model = small_model(folder)
    output = plain_run(folder, sampling)
    drafted, accepted = ride(ModelDrafter(model), output, sampling, 5)
    assert drafted == accepted > 60
    # Each position once: the prompt, then every token but the bonus token of the end and what it would predict.
    assert model.num_rows <= len(output)


@pytest.mark.parametrize("sampling", first(1, [PENALIZED, SAMPLED, GREEDY]))
def test_another_model_is_wrong_and_a_wrong_draft_costs_only_its_rows(folder: Path, sampling: SamplingParams) -> None:
    model = small_model(folder, num_layers=1)
    output = plain_run(folder, sampling)
    drafted, accepted = ride(ModelDrafter(model), output, sampling, 4)
    assert accepted < drafted / 2
    assert model.num_rows <= len(output) + drafted - accepted


def led(proposer: Drafter, verifier: SmallModel) -> Drafter:
    return WithProposers(ModelDrafter(verifier, {"below": proposer}), ("below",))


def chains(folder: Path, verifier: SmallModel) -> list[Drafter]:
    shallow = ModelDrafter(small_model(folder, num_layers=2))
    middle = ModelDrafter(small_model(folder, num_layers=2), {"below": NgramDrafter()})
    of_three = WithProposers(ModelDrafter(verifier, {"below": middle}), ("below", "below"))
    return [led(shallow, verifier), led(NgramDrafter(), verifier), of_three]


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("sampling", first(1, [PENALIZED, SAMPLED, GREEDY]))
def test_a_chain_hands_out_what_its_verifier_would(folder: Path, index: int, sampling: SamplingParams) -> None:
    chain = chains(folder, small_model(folder))[index]
    alone = ModelDrafter(small_model(folder))
    rng = random.Random(index)
    for drafter in (chain, alone):
        for name in "abc":
            drafter.open(name, PROMPT[: 20 + ord(name) % 7], 10, sampling)
    for _ in range(8):
        demands = [Demand(name, rng.randint(0, 9)) for name in "abc"]
        drafts = chain.propose(demands)
        assert [d.token_ids for d in drafts] == [d.token_ids for d in alone.propose(demands)]
        for draft in drafts:
            kept = (*draft.token_ids[: rng.randint(0, 6)], rng.randrange(EOS))
            chain.extend(draft.request_id, kept)
            alone.extend(draft.request_id, kept)
        chain.check_integrity()


@pytest.mark.slow
def test_a_chain_saves_passes_of_its_verifier(folder: Path) -> None:
    """The verifier's own weights as the proposer: every proposal is right, so a pass confirms it and adds a token. Four are
    requested at a time, and more where passes are timed and a proposed token takes less than one. The first rounds compare
    distributions and are not timed."""
    output, ticks = plain_run(folder, SAMPLED), count()
    for draft_len, clock, num_answers in ((5, None, 1), (9, lambda: float(next(ticks)), 8)):
        verifier, alone = small_model(folder), small_model(folder)
        chain = ModelDrafter(verifier, {"below": ModelDrafter(small_model(folder))}, clock=clock)
        led_by, by_itself = WithProposers(chain, ("below",)), ModelDrafter(alone)
        for _ in range(num_answers):
            assert ride(led_by, output, SAMPLED, draft_len) == ride(by_itself, output, SAMPLED, draft_len)
        assert verifier.num_passes <= alone.num_passes / 4
        assert (chain._windows["below"].window > 4) == (clock is not None)


def test_drafts_end_at_stop_tokens(folder: Path) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.0, logit_bias=((EOS, 100.0),))
    for params, expected in (
        (sampling, (EOS,)),
        (SamplingParams(max_tokens=20, temperature=0.0, logit_bias=((EOS, 100.0),), ignore_eos=True), (EOS,) * 4),
        (SamplingParams(max_tokens=20, temperature=0.0, logit_bias=((7, 100.0),), stop_token_ids=(7,)), (7,)),
    ):
        for drafter in (
            ModelDrafter(small_model(folder)),
            led(ModelDrafter(small_model(folder, num_layers=1)), small_model(folder)),
        ):
            drafter.open("r", PROMPT, len(PROMPT), params)
            (draft,) = drafter.propose([Demand("r", 4)])
            assert draft.token_ids == expected
            (further,) = drafter.propose([Demand("r", 4, draft.token_ids)])
            assert bool(further.token_ids) == params.ignore_eos


def test_a_row_that_cannot_be_sampled_ends_the_draft(folder: Path) -> None:
    impossible = SamplingParams(20, 0.0, allowed_token_ids=(5,), stop_token_ids=(5,), min_tokens=20)  # all tokens masked
    for drafter in (ModelDrafter(small_model(folder)), led(NgramDrafter(), small_model(folder))):
        drafter.open("r", PROMPT, len(PROMPT), impossible)
        drafter.open("s", PROMPT, len(PROMPT), GREEDY)
        drafts = drafter.propose([Demand("r", 4), Demand("s", 4)])
        assert [len(draft.token_ids) for draft in drafts] == [0, 4]
        drafter.check_integrity()


def test_a_long_prompt_catches_up_without_holding_up_the_others(folder: Path) -> None:
    model, fresh = small_model(folder, max_pass_rows=32), small_model(folder)
    drafter = ModelDrafter(model)
    long = [i % 250 for i in range(100)]
    drafter.open("long", long, 10, GREEDY)
    drafter.open("short", PROMPT[:20], 10, GREEDY)
    num_rounds = 0
    draft = None
    while draft is None or not draft.token_ids:
        num_passes = model.num_passes
        draft, short = drafter.propose([Demand("long", 2), Demand("short", 2)])
        drafter.check_integrity()
        assert len(short.token_ids) == 2
        assert model.num_passes - num_passes <= 3  # one to catch up, one per token
        drafter.extend("short", short.token_ids)
        num_rounds += 1
    assert num_rounds >= 3
    alone = ModelDrafter(fresh)
    alone.open("long", long, 10, GREEDY)
    assert draft.token_ids == alone.propose([Demand("long", 2)])[0].token_ids


def test_requests_that_lost_their_cache_are_computed_anew(folder: Path) -> None:
    """Room for two requests of 90 tokens, at three blocks each, and five of them."""
    small, large = small_model(folder, num_blocks=7), small_model(folder)
    names = "abcde"
    drafters = [ModelDrafter(small), ModelDrafter(large)]
    for drafter in drafters:
        for i, name in enumerate(names):
            drafter.open(name, [(7 * i + 3 * t) % 250 for t in range(80)], 10, SAMPLED)
    for _ in range(3):
        few, many = ([draft.token_ids for draft in d.propose([Demand(name, 4) for name in names])] for d in drafters)
        assert few == many
        for name, token_ids in zip(names, few, strict=True):
            for drafter in drafters:
                drafter.extend(name, token_ids)
                drafter.check_integrity()
    assert small.num_rows > large.num_rows


def test_equal_prompts_share_their_blocks(folder: Path) -> None:
    model = small_model(folder)
    drafter = ModelDrafter(model)
    for name in "ab":
        drafter.open(name, PROMPT, len(PROMPT), GREEDY)
        drafter.propose([Demand(name, 1)])
        drafter.extend(name, [1])
        drafter.propose([Demand(name, 1)])
    assert model.num_rows <= 2 * (len(PROMPT) + 1) - 32  # one block of 32 tokens is whole, and found by the second


BEYOND = VOCAB_SIZE + 7  # a row that the target's embedding has and the drafter's has not


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("sampling", [SAMPLED, PENALIZED])
def test_a_request_with_tokens_that_a_model_has_no_rows_for_is_followed_in_silence(
    folder: Path, is_chain: bool, sampling: SamplingParams
) -> None:
    verifier = small_model(folder)
    drafter = led(ModelDrafter(small_model(folder, num_layers=2)), verifier) if is_chain else ModelDrafter(verifier)
    drafter.open("asked", (*PROMPT[:20], BEYOND, *PROMPT[20:]), len(PROMPT) + 1, sampling)
    drafter.open("answered", PROMPT, len(PROMPT), sampling)
    drafter.open("ahead", PROMPT[:30], 30, sampling)
    drafter.open("plain", PROMPT[:40], 40, sampling)
    assert drafter.propose([Demand("answered", 4)])[0].token_ids
    drafter.extend("answered", (5, BEYOND))
    drafter.extend("answered", (6,))
    demands = [Demand("asked", 4), Demand("answered", 4), Demand("ahead", 4, (5, BEYOND, 6)), Demand("plain", 4)]
    for _ in range(2):
        drafts = drafter.propose(demands)
        drafter.check_integrity()
        assert [len(draft.token_ids) for draft in drafts] == [0, 0, 0, 4]
    for name in ("asked", "answered", "ahead", "plain"):
        drafter.release(name)
    drafter.check_integrity()


def test_a_chain_takes_no_more_of_a_proposal_than_its_verifier_can_read(folder: Path) -> None:
    class Wide(NgramDrafter):
        def propose(self, demands: Sequence[Demand]) -> list[Draft]:
            return [
                Draft(d.request_id, (right[0], BEYOND, 3)[: d.num_tokens], (0.5,) * min(3, d.num_tokens)) for d in demands
            ]

    alone, chain = ModelDrafter(small_model(folder)), led(Wide(), small_model(folder))
    right = (0,)
    for drafter in (alone, chain):
        drafter.open("r", PROMPT, len(PROMPT), GREEDY)
    (expected,) = alone.propose([Demand("r", 4)])
    right = expected.token_ids
    (found,) = chain.propose([Demand("r", 4)])
    assert found.token_ids == expected.token_ids


def test_a_question_may_stand_anywhere_after_the_committed_tokens(folder: Path) -> None:
    """One pass over drafts says what single steps say."""
    model, stepped = small_model(folder), small_model(folder)
    for m in (model, stepped):
        m.open("r", PROMPT, len(PROMPT), PENALIZED)
    drafts = (3, 9, 9, 4)
    (answer,) = model.choose([Question("r", (8,), drafts)])
    singly = [stepped.choose([Question("r", (8, *drafts[:i]))])[0] for i in range(5)]
    assert answer.token_ids == tuple(one.token_ids[0] for one in singly)
    assert answer.confidences == pytest.approx([one.confidences[0] for one in singly], rel=1e-4)


@pytest.mark.model
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_real_target_as_its_own_drafter_is_always_right(model_folder: Path, sampling: SamplingParams) -> None:
    model = load_model(model_folder, "float32")
    small = SmallModel(model, num_blocks=16, vocab_size=model.config.vocab_size, eos_token_ids=model.config.eos_token_ids)
    token_ids = plain_run(model_folder, sampling, 32)
    drafted, accepted = ride(ModelDrafter(small), token_ids, sampling, 5)
    assert drafted == accepted > 20


def test_ids_beyond_the_models_vocabulary_are_left_out_of_its_sampling(folder: Path) -> None:
    """A target may have more tokens than its drafter: a request that names one of them must not end the whole batch."""
    model = load_model(folder, "float32")
    small = SmallModel(model, num_blocks=16, vocab_size=VOCAB_SIZE + 50, eos_token_ids=(EOS,))
    drafter, outside = ModelDrafter(small), VOCAB_SIZE + 10
    drafter.open("plain", PROMPT, len(PROMPT), GREEDY)
    drafter.open("bias", PROMPT, len(PROMPT), SamplingParams(16, 0.0, logit_bias=((outside, 50.0),)))
    drafter.open("some", PROMPT, len(PROMPT), SamplingParams(16, 0.0, allowed_token_ids=(7, outside)))
    drafter.open("none", PROMPT, len(PROMPT), SamplingParams(16, 0.0, allowed_token_ids=(outside,)))
    plain, bias, some, none = drafter.propose([Demand(name, 3) for name in ("plain", "bias", "some", "none")])
    assert bias.token_ids == plain.token_ids != ()
    assert some.token_ids == (7, 7, 7)
    assert none.token_ids == ()
