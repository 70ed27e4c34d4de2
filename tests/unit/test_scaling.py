"""Numbers of replicas: what a target serves, what is needed, what is kept ready, and the plan for targets and drafters."""

import random
from dataclasses import replace
from math import ceil

import pytest

from router.cost_model import TableCost
from router.scaling.demand import Demand
from router.scaling.forecast import DAY_S, SLOT_S, DayProfile, Forecast
from router.scaling.policy import RETRIAL_S, FleetLimits, FleetScaler
from router.scaling.report import FleetReport, FleetSize, Replicas
from router.scaling.service_rates import DrafterSize, Objectives, ServiceRates, TargetSize, Workload

# A pass costs the same up to 64 rows: drafts are free there, and cost what tokens cost beyond.
COST = TableCost((1, 64, 640), (0.010, 0.010, 0.100))
TARGET = TargetSize(num_gpus=2, max_num_sequences=16, kv_tokens=200_000)
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.05)
GOOD = DrafterSize(num_gpus=1, capacity=128, acceptance=0.8, max_draft_len=4)
USELESS = replace(GOOD, acceptance=0.0)
WORKLOAD = Workload(prompt_len=100.0, output_len=200.0)


def rates(**drafters: DrafterSize) -> ServiceRates:
    return ServiceRates(COST, TARGET, drafters)


def test_a_round_yields_the_expected_tokens_of_its_draft() -> None:
    # Four drafts of 0.8: 1 + 0.8 + 0.64 + 0.512 + 0.4096 tokens in a pass of 10 ms.
    assert rates(good=GOOD).drafted_tokens_per_s("good", 1, 0) == pytest.approx(336.16)
    assert rates().plain_tokens_per_s(1, 0) == pytest.approx(100.0)


def test_a_drafter_that_is_never_right_changes_nothing() -> None:
    one = rates(useless=USELESS)
    assert one.drafted_tokens_per_s("useless", 8, 0) == pytest.approx(one.plain_tokens_per_s(8, 0))
    assert one.service(WORKLOAD, OBJECTIVES, {"useless": 1.0}) == one.service(WORKLOAD, OBJECTIVES, {})


def test_drafts_are_shorter_where_rows_cost_time() -> None:
    one = rates(good=GOOD)
    gain = [one.drafted_tokens_per_s("good", b, 0) / one.plain_tokens_per_s(b, 0) for b in (1, 14, 16)]
    assert gain[0] > gain[1] > gain[2] >= 1.0


def test_a_target_is_filled_only_as_far_as_tokens_come_in_time() -> None:
    slower = ServiceRates(TableCost((1, 16), (0.010, 0.040)), TARGET, {})
    loose, tight = (slower.service(WORKLOAD, Objectives(2.0, tpot_s), {}) for tpot_s in (0.06, 0.02))
    assert loose.batch > 2 * tight.batch
    full = rates().service(WORKLOAD, OBJECTIVES, {})
    # One request needs 200 passes of 10 ms, shared by the batch, and its prompt.
    assert full.requests_per_s == pytest.approx(1.0 / (200 * 0.010 / full.batch + full.prefill_s))
    assert rates().service(Workload(50_000.0, 200.0), OBJECTIVES, {}).batch < 4.0  # the KV cache holds no more


def test_shares_never_exceed_the_requests() -> None:
    one = rates(a=GOOD, b=replace(GOOD, share=0.5))
    assert one.shares({"a": 1, "b": 9}, 256.0) == {"a": 0.5, "b": 0.5}
    assert one.shares({"a": 9, "b": 9}, 256.0) == {"a": 1.0, "b": 0.0}
    assert one.shares({}, 256.0) == {"a": 0.0, "b": 0.0}


# ---- demand


def arrivals(now_s: float, num: float, prompt_len: float = 100.0, output_len: float = 200.0) -> FleetReport:
    return FleetReport(
        now_s,
        Replicas(1),
        num_arrived=num,
        num_prompt_tokens=num * prompt_len,
        num_ended=num,
        num_output_tokens=num * output_len,
    )


def needed(num_each_s: float, seconds: int = 120) -> float:
    demand, need = Demand(rates(), OBJECTIVES), 0.0
    for second in range(seconds):
        need = demand.need(arrivals(float(second), num_each_s))
    return need


def test_the_need_grows_with_the_rate() -> None:
    service = rates().service(WORKLOAD, OBJECTIVES, {})
    assert needed(2 * service.requests_per_s) == pytest.approx(2.0, rel=0.15)
    assert needed(8 * service.requests_per_s) == pytest.approx(8.0, rel=0.15)


def test_a_flood_of_prompts_is_seen_in_the_second_in_which_it_comes() -> None:
    demand = Demand(rates(), OBJECTIVES)
    before = 0.0
    for second in range(60):
        before = demand.need(arrivals(float(second), 1.0))
    after = demand.need(arrivals(60.0, 200.0, prompt_len=2000.0))
    calm = needed(1.0, 61)
    assert after > 10 * before
    assert calm == pytest.approx(before, rel=0.05)  # the control: without a flood nothing happens


def test_services_that_are_compared_are_of_one_workload() -> None:
    demand = Demand(rates(useless=USELESS), OBJECTIVES)
    demand.need(arrivals(0.0, 1.0, prompt_len=1000.0))
    plain = demand.service(0.0)
    for second in range(1, 10):
        demand.need(arrivals(float(second), 9.0, prompt_len=10.0, output_len=20.0))
    assert demand.service(9.0, {"useless": 0.5}) == plain
    assert demand.service(40.0, {"useless": 0.5}).requests_per_s > 2 * plain.requests_per_s  # later


def test_requests_that_run_need_their_places() -> None:
    demand = Demand(rates(), OBJECTIVES)
    demand.need(arrivals(0.0, 1.0))
    full = demand.service(0.0).batch
    assert demand.need(FleetReport(1.0, Replicas(1), num_running=5 * full)) == pytest.approx(5.0, rel=0.05)


# ---- forecast


def fed(needs: list[float], start_s: float = 40.0, least: int = 1) -> tuple[Forecast, float]:
    """By a fleet that has at once what is wanted, and misses nothing."""
    forecast, wanted = Forecast(start_s, 5.0, 0.005, least), 0.0
    for index, need in enumerate(needs):
        wanted = forecast.add(5.0 * index, need, ceil(wanted), 100.0 * need, 0.0)
    return forecast, wanted


def test_steady_load_gets_cheap_and_floods_are_kept_ready_for() -> None:
    steady = [10.0] * 4320  # six hours
    floods = ([2.0] * 60 + [20.0] * 12) * 60
    _, calm = fed(steady)
    forecast, ready = fed([*floods, *[2.0] * 60])  # in the silence before the next flood
    assert 10.0 <= calm <= 13.5
    assert ready >= 18.0
    assert "of 45 s" not in forecast.expert  # the control: a start-up's memory would have forgotten the last one


def test_little_evidence_is_not_trusted() -> None:
    _, early = fed([10.0] * 60)
    _, late = fed([10.0] * 4320)
    assert early > 1.3 * late


def test_without_any_request_the_prior_decides() -> None:
    forecast, _ = fed([0.0])
    assert forecast.expert == "2 x the most of 45 s"  # the least headroom that a doubling once an hour allows


def test_an_expert_is_judged_by_what_would_have_been_ready() -> None:
    # Floods of 30 s every six minutes: who wants replicas when they come has them only when starting takes no time.
    floods = ([2.0] * 66 + [20.0] * 6) * 60
    slow, _ = fed(floods, start_s=60.0)
    fast, _ = fed(floods, start_s=0.0)
    following = 6  # headroom 1.1, the shortest window, without season
    assert slow.refused_share[following] > 2 * fast.refused_share[following]


def test_misses_that_the_need_did_not_foresee_raise_what_is_kept() -> None:
    """Targets that serve as much as the need says, and targets that serve two thirds of it."""
    chance = random.Random(1)
    needs = [chance.gauss(10.0, 1.0) for _ in range(4320)]
    kept, late_share = {}, {}
    for served in (1.0, 0.67):
        forecast, wanted, late = Forecast(40.0, 5.0, 0.005), 30.0, 0.0
        for index, need in enumerate(needs):
            num_missed = 100.0 * max(0.0, need - served * ceil(wanted))
            late += num_missed if index >= 2160 else 0.0
            wanted = forecast.add(5.0 * index, need, ceil(wanted), 100.0 * need, num_missed)
        kept[served], late_share[served] = wanted, late / (100.0 * sum(needs[2160:]))
    assert kept[0.67] > 1.3 * kept[1.0]
    assert max(late_share.values()) < 0.01


def test_misses_that_no_replica_would_mend_do_not_grow_the_fleet() -> None:
    forecast, wanted = Forecast(40.0, 5.0, 0.005), 30.0
    for index in range(4320):
        wanted = forecast.add(5.0 * index, 10.0, 40.0, 1000.0, 50.0)  # with more ready than any expert wants
    assert wanted < 15.0


def test_replicas_that_never_end_are_no_merit_of_an_expert() -> None:
    floods = ([1.0] * 66 + [4.0] * 6) * 60
    following = 6  # headroom 1.1, the shortest window, without season
    assert fed(floods, start_s=60.0, least=4)[0].refused_share[following] < 0.005
    assert fed(floods, start_s=60.0)[0].refused_share[following] > 0.05  # the control


def test_what_is_ready_beyond_the_load_serves_its_doubling() -> None:
    following = 6  # headroom 1.1, the shortest window, without season
    few, many = (fed([need] * 120, least=4)[0].refused_share[following] for need in (2.0, 20.0))
    assert few < 0.001 < many


def test_bursts_that_came_are_not_diluted_by_the_prior() -> None:
    floods, following = [2.0] * 30 + [20.0] * 6, 6
    early, late = (fed(floods * num, start_s=60.0)[0].refused_share[following] for num in (6, 200))
    assert early > 0.8 * late > 0.05


def test_the_day_before_foretells_the_morning() -> None:
    profile = DayProfile()
    night, morning = 6 * 3600.0, 6 * 3600.0 + SLOT_S
    for now_s, need in ((night, 2.0), (morning, 6.0), (morning + SLOT_S, 6.0)):
        profile.add(now_s, need)
    assert profile.growth(DAY_S + night) == pytest.approx(3.0)
    assert profile.growth(DAY_S + morning) == 1.0


# ---- the plan


class Driven:
    """A scaler under constant load, with a fleet that does at once what it decides unless a test holds it."""

    def __init__(self, limits: FleetLimits, **drafters: DrafterSize) -> None:
        self.rates = rates(**drafters)
        self.scaler = FleetScaler(self.rates, OBJECTIVES, limits, 40.0)
        self.now_s = 0.0
        self.targets, self.drafters = int(limits.max_gpus / TARGET.num_gpus), dict.fromkeys(drafters, 0)
        self.num_running = self.extra_running = 0.0
        self.acceptance: dict[str, float] = {}

    def play(self, load: float, seconds: int, follow: bool = True) -> FleetSize:
        """``load``: in targets without drafts."""
        per_s = load * self.rates.service(WORKLOAD, OBJECTIVES, {}).requests_per_s
        self.num_running = load * self.rates.service(WORKLOAD, OBJECTIVES, {}).batch + self.extra_running
        size = FleetSize(self.targets)
        for _ in range(seconds):
            report = arrivals(self.now_s, per_s, WORKLOAD.prompt_len, WORKLOAD.output_len)
            drafters = {name: Replicas(num) for name, num in self.drafters.items()}
            report = replace(report, targets=Replicas(self.targets), drafters=drafters, num_running=self.num_running)
            report = replace(report, acceptance=self.acceptance)
            size = self.scaler.decide(report)
            if follow:
                self.targets, self.drafters = size.num_targets, dict(size.num_drafters)
            self.now_s += 1.0
        return size


MANY = FleetLimits(max_gpus=128)


def test_drafters_are_wanted_where_they_save_targets() -> None:
    good = Driven(MANY, good=GOOD).play(8.0, 1800)
    useless = Driven(MANY, useless=USELESS).play(8.0, 1800)
    assert good.num_drafters["good"] > 0
    assert useless.num_drafters["useless"] == 0  # the control
    assert 2 * good.num_targets + good.num_drafters["good"] < 2 * useless.num_targets


def test_drafters_scale_to_zero_without_load() -> None:
    driven = Driven(MANY, good=GOOD)
    assert driven.play(8.0, 900).num_drafters["good"] > 0
    assert driven.play(0.0, 2400) == replace(driven.play(0.0, 1), num_targets=1, num_drafters={"good": 0})


def test_drafters_follow_a_fall_of_the_load_within_a_minute() -> None:
    driven = Driven(MANY, good=GOOD)
    before = driven.play(40.0, 1200).num_drafters["good"]
    after = driven.play(4.0, 60).num_drafters["good"]
    settled = driven.play(4.0, 600).num_drafters["good"]
    assert before > 2 * settled
    assert after <= settled + 1


def test_a_spike_of_requests_that_run_starts_no_drafters() -> None:
    """Such as a queue leaves behind when targets become ready."""
    driven = Driven(MANY, good=GOOD)
    usual = driven.play(8.0, 1200)
    driven.extra_running = 1000.0
    assert driven.play(8.0, 30).num_drafters == usual.num_drafters
    assert driven.play(8.0, 300).num_drafters["good"] > usual.num_drafters["good"]  # the control: it lasts


def test_targets_stay_until_the_drafters_that_replace_them_are_ready() -> None:
    driven = Driven(MANY, good=GOOD)
    driven.drafters = {"good": 0}
    held = driven.play(8.0, 1800, follow=False)  # nothing that it decides happens
    assert held.num_drafters["good"] > 0
    before = held.num_targets
    driven.drafters = dict(held.num_drafters)
    assert driven.play(8.0, 10, follow=False).num_targets < before
    driven.drafters = {"good": 0}  # they die
    assert driven.play(8.0, 10, follow=False).num_targets == before


def test_drafters_stay_until_the_targets_that_replace_them_are_ready() -> None:
    driven = Driven(MANY, good=GOOD)
    driven.play(8.0, 1800)
    assert driven.drafters["good"] > 0
    num_ready = driven.drafters["good"]
    driven.rates.set_acceptance("good", 0.0)
    waiting = driven.play(8.0, 120, follow=False)
    assert waiting.num_targets > driven.targets
    assert waiting.num_drafters["good"] == num_ready
    driven.targets = waiting.num_targets
    assert driven.play(8.0, 60, follow=False).num_drafters["good"] == 0


def test_a_burst_sheds_drafting_before_requests() -> None:
    limits = FleetLimits(max_gpus=16, num_reserved_gpus=16)
    driven = Driven(limits, good=replace(GOOD, acceptance=0.05))
    idle = driven.play(2.0, 2400)
    assert idle.num_drafters["good"] > 0  # on GPUs that are paid anyway
    burst = driven.play(9.0, 10)
    assert burst.num_targets == 8
    assert burst.num_drafters["good"] == 0


def test_drafters_that_saved_targets_end_with_the_load_on_gpus_that_are_paid_anyway() -> None:
    driven = Driven(FleetLimits(max_gpus=16, num_reserved_gpus=16), good=GOOD)
    assert driven.play(6.0, 900).num_drafters["good"] > 0
    assert driven.play(0.0, 2400).num_drafters["good"] == 0


def test_idle_gpus_that_are_not_paid_do_not_draft() -> None:
    driven = Driven(FleetLimits(max_gpus=16), good=replace(GOOD, acceptance=0.05, num_gpus=2))
    assert driven.play(2.0, 2400).num_drafters["good"] == 0


def test_the_fleet_is_never_exceeded() -> None:
    for load in (1.0, 20.0, 200.0):
        size = Driven(FleetLimits(max_gpus=16, min_targets=2), good=GOOD).play(load, 600)
        assert size.num_targets >= 2
        assert 2 * size.num_targets + size.num_drafters["good"] <= 16


def test_replicas_are_bounded_and_what_targets_may_not_take_drafts() -> None:
    """The control: the same load without bounds takes more of both."""
    bounded = FleetLimits(max_gpus=128, max_targets=3, max_drafters={"good": 2})
    size, free = Driven(bounded, good=GOOD).play(40.0, 900), Driven(MANY, good=GOOD).play(40.0, 900)
    assert (size.num_targets, size.num_drafters) == (3, {"good": 2})
    assert free.num_targets > 3
    assert free.num_drafters["good"] > 2


def test_a_drafter_is_wanted_by_the_acceptance_that_was_measured() -> None:
    driven = Driven(MANY, good=USELESS)
    driven.play(8.0, 1800)
    assert driven.drafters["good"] == 0
    driven.acceptance = {"good": 0.8}
    assert driven.play(8.0, 120).num_drafters["good"] > 0


def trial_times(driven: Driven, seconds: int, acceptance_of_trial: float, load: float = 8.0) -> list[int]:
    """Seconds at which replicas of "good" appear, while the targets keep reporting what was last measured of it."""
    starts, ran = [], False
    for second in range(seconds):
        driven.play(load, 1)
        runs = driven.drafters["good"] > 0
        if runs and not ran:
            starts.append(second)
        elif runs:  # drafts are judged
            driven.acceptance = {"good": acceptance_of_trial + 1e-12 * second}
        ran = runs
    return starts


@pytest.mark.slow
def test_a_drafter_that_was_not_worth_it_is_tried_again_with_growing_pauses() -> None:
    driven = Driven(MANY, good=GOOD)
    driven.play(8.0, 900)
    driven.acceptance = {"good": 0.0}
    driven.play(8.0, 300)
    assert driven.drafters["good"] == 0
    first, second, third = trial_times(driven, 6000, acceptance_of_trial=0.0)[:3]
    assert first <= RETRIAL_S
    assert third - second > 1.5 * (second - first)


def test_a_trial_that_succeeds_brings_the_drafter_back() -> None:
    driven = Driven(MANY, good=GOOD)
    driven.play(8.0, 900)
    driven.acceptance = {"good": 0.0}
    driven.play(8.0, 300)
    assert len(trial_times(driven, 3000, acceptance_of_trial=0.8)) == 1
    assert driven.drafters["good"] > 0


def test_without_load_nothing_is_tried() -> None:
    driven = Driven(MANY, good=GOOD)
    driven.play(8.0, 900)
    driven.acceptance = {"good": 0.0}
    driven.play(0.0, 300)
    assert trial_times(driven, 3000, acceptance_of_trial=0.0, load=0.0) == []
    assert trial_times(driven, 300, acceptance_of_trial=0.0) != []  # the control
