"""Profiles: what they hold for, how they are kept, and the costs that are read from them."""

import itertools
import json
import logging
from pathlib import Path

import pytest
from pydantic import JsonValue

from cluster.config import (
    CascadeOptions,
    Config,
    DrafterConfig,
    HiddenStateOptions,
    ModelConfig,
    ModelOptions,
    NgramOptions,
    Resources,
    SuffixOptions,
    TargetConfig,
)
from cluster.resolve import Inventory, Node, resolve
from cluster.state import FileStateStore, StateConflict, StateStore
from deploy.profile_command import plot_profile
from engine.dtypes import resolve_dtypes
from profiler.interleaved import Timing
from profiler.latency import Kind, Linear
from profiler.profile import (
    REFUSED_PREFIX,
    DrafterProfile,
    Identity,
    Profile,
    ProfiledCost,
    ProfileRefused,
    Surface,
    parts_of_drafter,
    pool_costs,
    read_profile,
    save_profile,
    usable_profile,
    with_measured_costs,
)
from tests.support.memory_store import MemoryStateStore

NGRAM = DrafterConfig(name="lookup", options=NgramOptions())
MODEL = DrafterConfig(name="small", options=ModelOptions(model="smollm2-135m", num_layers=2))
CASCADE = DrafterConfig(name="all", options=CascadeOptions(members=(NgramOptions(), HiddenStateOptions(path="blocks"))))


def config_of(*drafters: DrafterConfig, threads: int = 2) -> Config:
    target = TargetConfig(device="cpu", dtype="bfloat16", resources=Resources(threads=threads))
    return resolve(Config(target=target, drafters=drafters), Inventory((Node("here", 4.0),)))


def surface(kind: Kind, base: float, per_x: float, per_y: float = 0.0) -> Surface:
    ys = (0,) if kind is Kind.CATCH_UP else (1, 2, 4, 8)
    timings = {(x, y): Timing(base + per_x * x + per_y * y, 0.1, 5) for x, y in itertools.product((1, 4, 16, 64), ys)}
    return Surface.of(kind, timings)


def profile_of(config: Config, hardware: str = "a machine", draft_s: float = 0.004) -> Profile:
    """A pass takes 20 ms and a millisecond a row; a model's draft ``draft_s``, a lookup's 10 microseconds."""
    identity = Identity.of(config, hardware)
    parts = [part for drafter in config.drafters for part in parts_of_drafter(drafter, identity.threads)]
    return Profile(
        identity=identity,
        measured_at="2026-11-21T10:00:00+00:00",
        step=surface(Kind.PASS, 0.02, 1e-3, 1e-6),
        prefill=surface(Kind.PASS, 0.02, 5e-4, 1e-6),
        drafters={
            part.key: DrafterProfile(label=part.label, draft=surface(Kind.DRAFT, 1e-5, 1e-6))
            if part.options.kind == "ngram"
            else DrafterProfile(
                label=part.label,
                draft=surface(Kind.DRAFT, draft_s, 1e-4, 1e-4),
                catch_up=surface(Kind.CATCH_UP, 0.005, 1e-3),
            )
            for part in parts
        },
    )


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StateStore:
    return MemoryStateStore() if request.param == "memory" else FileStateStore(tmp_path)


# ---- what it holds for


def test_every_part_of_an_identity_makes_another_key() -> None:
    identity = Identity.of(resolve_dtypes(config_of()), "a machine")
    others = [
        {"engine": "vllm"},
        {"model": "/elsewhere/smollm2-135m"},
        {"dtype": "float32"},
        {"device": "cuda"},
        {"hardware": "another machine"},
        {"threads": 64},
        {"parallelism": 2},
        {"partition": "half"},
    ]
    keys = [identity.key, *(identity.model_copy(update=change).key for change in others)]
    assert len(set(keys)) == len(keys)
    assert identity.key.startswith("profile/smollm2-135m/bfloat16/cpu/")


def test_a_key_can_be_stored_whatever_the_model_is_called() -> None:
    config = config_of().model_copy(update={"model": ModelConfig(name="/models/Ünder the sea (v2)/" + "x" * 200)})
    MemoryStateStore().put(Identity.of(config, "GPU").key, 1)


def test_a_drafter_is_the_same_by_another_name_and_another_in_another_place() -> None:
    def keys(drafter: DrafterConfig, threads: int = 2) -> list[str]:
        (resolved,) = config_of(drafter, threads=threads).drafters
        return [part.key for part in parts_of_drafter(resolved, threads)]

    assert keys(MODEL) == keys(MODEL.model_copy(update={"name": "other"}))
    assert keys(MODEL) != keys(MODEL.model_copy(update={"resources": Resources(threads=3)}))
    assert keys(NGRAM) == keys(NGRAM.model_copy(update={"resources": Resources(threads=3)}))  # multiplies nothing
    assert keys(CASCADE) != keys(CASCADE, threads=3)  # in the target's process, with the target's threads
    assert keys(CASCADE)[0] == keys(NGRAM)[0]


# ---- keeping it


def test_a_profile_comes_back_as_it_was_stored(store: StateStore) -> None:
    profile = profile_of(config_of(NGRAM, MODEL))
    assert usable_profile(store, profile.identity) is None
    assert save_profile(store, profile) == 1
    assert usable_profile(store, profile.identity) == profile
    assert save_profile(store, profile) == 2


def test_measuring_again_keeps_drafters_that_were_not_there(store: StateStore) -> None:
    both, alone = profile_of(config_of(NGRAM, MODEL)), profile_of(config_of(MODEL), draft_s=0.008)
    save_profile(store, both)
    save_profile(store, alone)
    found = usable_profile(store, both.identity)
    assert found is not None
    assert set(found.drafters) == set(both.drafters)
    (model_key,) = alone.drafters
    assert found.drafters[model_key] == alone.drafters[model_key]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda value: "nonsense", "format is None"),
        (lambda value: {**value, "format": 1}, "format is 1"),
        (lambda value: {**value, "format": 99}, "format is 99"),
        (lambda value: {key: value[key] for key in value if key != "step"}, "step"),
        (lambda value: {**value, "step": {**value["step"], "fit": {"form": "cubic"}}}, "step.fit"),
        (lambda value: json.loads(json.dumps(value).replace("0.021001", "-1.0")), "step"),
        (lambda value: {**value, "surprise": 1}, "surprise"),
    ],
)
def test_a_damaged_profile_is_refused_and_set_aside_when_it_is_replaced(
    store: StateStore, damage: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(damage)
    profile = profile_of(config_of(MODEL))
    damaged = damage(profile.to_json())
    assert damaged != profile.to_json()
    store.put(profile.identity.key, damaged)
    with caplog.at_level(logging.WARNING):
        assert usable_profile(store, profile.identity) is None
    assert reason in caplog.text
    assert "outrider profile" in caplog.text
    known = store.get(profile.identity.key)
    assert known is not None
    assert known.value == damaged  # reading it changes nothing
    save_profile(store, profile)
    assert usable_profile(store, profile.identity) == profile
    (aside,) = store.keys(REFUSED_PREFIX)
    kept = store.get(aside)
    assert kept is not None
    assert kept.value == damaged


def test_a_profile_with_round_trips_of_an_earlier_version_is_read() -> None:
    profile, trip = profile_of(config_of(MODEL)), {"p50_s": 5e-5, "p99_s": 2e-4}
    assert isinstance(earlier := profile.to_json(), dict)
    assert read_profile({**earlier, "transport": {"unix_1kb": trip}}, profile.identity) == profile


def test_a_profile_of_other_hardware_is_refused_by_name() -> None:
    here, elsewhere = profile_of(config_of(MODEL)), profile_of(config_of(MODEL), "another machine")
    with pytest.raises(ProfileRefused, match="hardware 'another machine' instead of 'a machine'"):
        read_profile(elsewhere.to_json(), here.identity)


def test_two_that_measure_at_once_both_keep_what_they_found() -> None:
    first, second = profile_of(config_of(NGRAM)), profile_of(config_of(MODEL))

    class Busy(MemoryStateStore):
        """Somebody else is quicker, once."""

        was_quicker = False

        def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
            if not self.was_quicker:
                self.was_quicker = True
                super().put(key, first.to_json())
            return super().put(key, value, expected_version)

    store = Busy()
    assert save_profile(store, second) == 2
    found = usable_profile(store, second.identity)
    assert found is not None
    assert set(found.drafters) == {*first.drafters, *second.drafters}


def test_a_store_in_which_others_write_all_the_time_is_given_up() -> None:
    class Hostile(MemoryStateStore):
        def put(self, key: str, value: JsonValue, expected_version: int | None = None) -> int:
            raise StateConflict(key, 0, 1)

    with pytest.raises(StateConflict):
        save_profile(Hostile(), profile_of(config_of()))


# ---- what is read from it


def test_costs_go_by_the_names_of_the_configuration() -> None:
    config = config_of(NGRAM, MODEL)
    cost = ProfiledCost(profile_of(config), config)
    assert cost.step_s(8, 4) == pytest.approx(0.028, rel=0.01)
    assert cost.prefill_s(8, 4) == pytest.approx(0.024, rel=0.01)
    assert cost.draft_s("small", 4, 8) == pytest.approx(0.0052, rel=0.02)
    assert cost.draft_s("small/3", 4, 8) == cost.draft_s("small", 4, 8)  # a replica
    assert cost.catch_up_s("small", 15) == pytest.approx(0.015, rel=0.02)
    assert cost.catch_up_s("small", 0) == 0.0
    assert cost.catch_up_s("lookup", 100) == 0.0
    assert cost.draft_s("unheard-of", 1, 1) is None
    assert cost.catch_up_s("unheard-of", 1) is None


def test_a_pass_takes_time_whatever_a_profile_says() -> None:
    """Its coefficients may all be 0, and the loop divides by times."""
    config = config_of()
    profile, nothing = profile_of(config), Linear(Kind.PASS, 0.0, 0.0, 0.0)
    empty = {name: getattr(profile, name).model_copy(update={"fit": nothing}) for name in ("step", "prefill")}
    cost = ProfiledCost(profile.model_copy(update=empty), config)
    assert min(cost.step_s(1, 0), cost.prefill_s(1, 0), cost.table(0).at(1)) > 0.0
    assert with_measured_costs(config_of(CASCADE), profile_of(config_of(CASCADE)).model_copy(update=empty))


def test_a_drafter_with_other_options_than_were_measured_is_not_known() -> None:
    profile = profile_of(config_of(MODEL))
    other = MODEL.model_copy(update={"options": ModelOptions(model="smollm2-135m", num_layers=3)})
    assert ProfiledCost(profile, config_of(other)).draft_s("small", 1, 1) is None
    assert profile.unmatched(config_of(other, NGRAM)) == ["small", "lookup"]
    assert profile.unmatched(config_of(MODEL)) == []


def test_a_cascade_costs_what_its_dearest_member_does_and_is_known_only_with_all() -> None:
    config = config_of(CASCADE)
    profile = profile_of(config)
    cost = ProfiledCost(profile, config)
    assert cost.draft_s("all", 1, 8) == pytest.approx(0.0049, rel=0.02)
    assert pool_costs(config, cost)["all"] == pytest.approx(0.0049 / 8 / cost.step_s(1, 0), rel=0.02)
    lookups = profile.model_copy(update={"drafters": dict(list(profile.drafters.items())[:1])})
    assert pool_costs(config, ProfiledCost(lookups, config)) == {}
    assert with_measured_costs(config, lookups) == config


def test_a_cascade_is_told_what_its_members_cost_unless_it_knows() -> None:
    config = config_of(CASCADE)
    (drafter,) = with_measured_costs(config, profile_of(config)).drafters
    assert isinstance(drafter.options, CascadeOptions)
    assert drafter.options.costs == (0.0, pytest.approx(0.0049 / 0.021, rel=0.02))  # a lookup is asked every time
    named = CASCADE.model_copy(update={"options": CASCADE.options.costing((0.1, 0.2))})
    assert with_measured_costs(config_of(named), profile_of(config)) == config_of(named)


def test_told_costs_ascend_as_a_cascade_demands() -> None:
    backwards = CascadeOptions(members=(HiddenStateOptions(path="blocks"), SuffixOptions()))
    config = config_of(DrafterConfig(name="all", options=backwards))
    (drafter,) = with_measured_costs(config, profile_of(config)).drafters
    assert isinstance(drafter.options, CascadeOptions)
    assert drafter.options.costs is not None
    assert list(drafter.options.costs) == sorted(drafter.options.costs)


@pytest.mark.slow
def test_it_can_be_drawn(tmp_path: Path) -> None:
    plot_profile(profile_of(config_of(NGRAM, MODEL)), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
