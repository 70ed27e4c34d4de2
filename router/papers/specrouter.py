"""`chain`: SpecRouter's scheduling of model chains (section 4.2, algorithm 1), per request, with predicted times.

    Algorithm 1                                                      here
    1-4   generate candidate chains that end with the target         `router.drafter.chains.candidates`
    9-10  estimate acceptance between neighbours from SimScore       `router.papers.specrouter_estimates.Similarities`
    11-13 predict the effective time per target token                `router.drafter.chains.predict`
    14-18 take the chain of the least                                `ModelChains`
    W     window, configured; here learned by each level             `router.drafter.chains.LearnedWindow`

The models below the last drafter of a chain change the cost of its drafts, never their tokens. So each last drafter has one
fastest chain, independent of the request; the best last drafter depends on the request.
"""

from collections.abc import Mapping, Sequence
from itertools import count, pairwise

import numpy as np
from pydantic import JsonValue

from router.assignment import (
    NO_LEVELS,
    TARGET_ONLY,
    Chain,
    Levels,
    Observation,
    PoolMember,
    RequestView,
    ScoreCounts,
    drafter_of,
    lessons,
)
from router.cost_model import Floats, TableCost
from router.drafter.chains import Level, best_window, candidates, fastest, predict
from router.drafter.seats import FreeCapacity
from router.estimates.acceptance import MEMORY_ROUNDS, AcceptanceModel, AcceptanceSnapshot
from router.papers.specrouter_estimates import (
    SPREAD,
    ChainLenLimits,
    DrafterChoice,
    FillRates,
    FillSums,
    MappingSums,
    ObservedOverheads,
    OverheadSums,
    OverlapSums,
    PassTimeFactors,
    Similarities,
    prior_agreement,
    profiled_passes,
    seated,
)

HYSTERESIS = 0.1  # relative gain below which a request keeps its chain
CALM_SLOTS = 40  # without errors or eviction after which chains may grow by a level
MOST_TRIALS = 6  # slots in which a request tries a pair of drafters whose agreement is unknown
TRIALS_BUDGET = 24  # of these slots, times the requests that wait for the trial's drafts
REFRESH_SLOTS = 4  # between predictions of all chains; sooner when the pool changes
UNMEASURED = TableCost((1,), (1.0,))  # an unprofiled target


class ChainSnapshot(AcceptanceSnapshot):
    fills: FillSums
    overruns: OverheadSums
    overlaps: OverlapSums = ()
    mapping: MappingSums = (0.0, 0.0)


class ModelChains:
    """Chains by expected time per token."""

    def __init__(
        self, max_levels: int = 4, time_weight: float = 0.1, hysteresis: float = HYSTERESIS, calm_slots: int = CALM_SLOTS
    ) -> None:
        self._max_levels, self._time_weight = max_levels, time_weight
        self._hysteresis, self._calm_slots = hysteresis, calm_slots
        self._acceptance = AcceptanceModel()
        self._fills = FillRates(MEMORY_ROUNDS)
        self._overheads = ObservedOverheads()
        self._target = UNMEASURED
        self._reset()

    def _reset(self) -> None:
        """Resets the state that snapshots do not hold, except the target's times, and SimScores."""
        self._similarities = Similarities(MEMORY_ROUNDS)
        self._pass_factors = PassTimeFactors(self._time_weight)
        self._max_lens = ChainLenLimits(self._max_levels, self._calm_slots)
        self._passes: dict[str, TableCost] = {}  # of the drafters, by their profiles
        self._below: dict[str, Chain] = {}  # last drafter -> the drafters below it
        self._round_s: dict[str, float] = {}  # with each last drafter, at its best
        self.per_token_s: dict[Chain, float] = {}  # predicted, of every candidate chain, if all live requests had it
        self._choice = DrafterChoice()
        self._chain_round_s: dict[Chain, float] = {}  # of every candidate chain, with its overhead
        self._trials: dict[Chain, int] = {}  # of pairs of drafters: slots in which a request tried them
        self._predicted: dict[str, tuple[Chain, float]] = {}  # chains that requests stayed with, and seconds per token
        self._predicted_for: Chain | None = SPREAD  # what all of them were with
        self._decoding: frozenset[str] = frozenset()  # requests that had tokens in the last slot
        self._observations: list[Observation] = []  # in this slot
        self._known: tuple[object, ...] = ()  # what the predictions rest on
        self._slots = count()

    def observe(
        self, observations: Sequence[Observation], scores: Sequence[ScoreCounts] = (), levels: Levels = NO_LEVELS
    ) -> None:
        self._observe_levels(levels)
        drafted = list(lessons(observations))
        self._fills.observe(drafted)
        self._observations = drafted
        self._acceptance.observe(drafted, scores)

    def _observe_levels(self, levels: Levels) -> None:
        self._target = levels.target or self._target
        failed = []
        for report in levels.reports:
            passes = self._passes.get(report.drafter)
            if passes is not None and report.num_passes:
                self._pass_factors.observe(report, passes.at(report.num_rows / report.num_passes))
            for verified in report.verified:
                self._similarities.observe(report.drafter, verified)
            if report.num_lost:  # caches thrash
                for last in [last for last, below in self._below.items() if report.drafter in (*below, last)]:
                    self._max_lens.note_failure(last, len(self._below[last]) + 1)
                    failed.append(last)
        self._max_lens.next_slot(failed)

    def scores(self, chain: Chain) -> tuple[float | None, ...]:
        """SimScore of each pair of neighbours among the drafters; None where it is not known."""
        return tuple([self._similarities.score(*pair) for pair in pairwise(chain)])

    def snapshot(self) -> JsonValue:
        found = {**self._acceptance.snapshot(), "overruns": self._overheads.to_json(), **self._similarities.to_json()}
        if not any(found[name] for name in ("acceptance", "in_time", "overruns", "overlaps")):
            return None
        return {**found, "fills": self._fills.snapshot()}

    def restore(self, snapshot: JsonValue) -> None:
        found = ChainSnapshot.model_validate(snapshot)
        self._acceptance.restore(found)
        self._fills.sums = dict(found.fills)
        self._overheads.sums = dict(found.overruns)
        self._reset()
        self._similarities.restore(found.overlaps, found.mapping)

    def assign(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> Mapping[str, Chain]:
        self._acceptance.next_slot([request.request_id for request in requests])
        self._note_failures(requests, pool)
        self._compare_times(requests)
        room = FreeCapacity(pool)
        batch = max(1, sum(not request.is_placeholder for request in requests))
        self._predict(room.members, batch)
        chains: dict[str, Chain] = {}
        if requests:
            ids = [request.request_id for request in requests]
            live = [i for i, request in enumerate(requests) if not request.is_placeholder] or list(range(len(requests)))
            predicted_s = self._per_token_s(ids, live, room.members, batch)
            overheads = self._overheads.factors()
            per_token_s = predicted_s * [overheads.get((*self._below[name], name), 1.0) for name in room.drafters]
            seconds = self._with_hysteresis(requests, per_token_s, batch, room)
            names, places = ("", *room.drafters), (len(requests), *map(room.num_free, room.drafters))
            choice = self._choice.choose(names, seconds[live], places, overheads.get(SPREAD, 1.0))
            if not self._are_known(room.members):
                self._choice.release()
            last = [i for i, request in enumerate(requests) if request.is_placeholder]
            columns = seated(seconds, places, None if choice is SPREAD else names.index(choice), last)
            trial = self._trial(requests, columns, places, room)
            chains = self._seat(requests, columns, room, trial)
            if trial is None:
                self._note_predictions(requests, chains, room.drafters, predicted_s, per_token_s)
        return chains

    def _compare_times(self, requests: Sequence[RequestView]) -> None:
        """Compares measured with predicted seconds per token of requests that stayed with their chain. The time of prompts
        in the slot is subtracted, down to the prediction at most. Without a comparison nothing decays, except where all
        requests were with the target alone, which could otherwise never be left."""
        observations, self._observations = self._observations, []
        decoding = {request.request_id: request.prompt_len for request in requests if _is_decoding(request)}
        new_lens = [num for request_id, num in decoding.items() if request_id not in self._decoding]
        prompts_s = sum(self._target.at(1 + num) - self._target.at(1) for num in new_lens)
        predicted, self._predicted, self._decoding = self._predicted, {}, frozenset(decoding)
        predicted_s = measured_s = 0.0
        for seen in observations:
            noted = predicted.get(seen.request_id)
            if noted is not None and noted[0][-1] == drafter_of(seen.drafter):
                expected_s = seen.num_committed * noted[1]
                predicted_s += expected_s
                measured_s += max(seen.elapsed_s - prompts_s, min(seen.elapsed_s, expected_s))
        if predicted_s > 0.0:
            self._overheads.observe({self._predicted_for: (predicted_s, measured_s)})
        elif decoding and self._predicted_for == TARGET_ONLY:
            self._overheads.observe({})

    def _note_predictions(
        self, views: Sequence[RequestView], chains: Mapping[str, Chain], drafters: Chain, alone_s: Floats, spread_s: Floats
    ) -> None:
        """Records predictions for requests that stay where they are. New ones are still catching up; those without a first
        token share no pass yet."""
        live = {r.request_id: _drafters_of(chains[r.request_id]) for r in views if _is_decoding(r)}
        with_one = len(set(live.values())) == 1
        self._predicted_for = next(iter(live.values())) if with_one else SPREAD
        per_token_s = alone_s if with_one else spread_s
        for i, request in enumerate(views):
            chain = live.get(request.request_id)
            if chain and chain == _drafters_of(request.chain):
                column = drafters.index(chain[-1])
                self._predicted[request.request_id] = chain, float(per_token_s[i, column])

    def _note_failures(self, requests: Sequence[RequestView], pool: Sequence[PoolMember]) -> None:
        """A drafter unhealthy while it had requests failed: its chains get shorter."""
        unhealthy = {member.name for member in pool if not member.healthy}
        failed = {drafter_of(r.chain[-1]): len(r.chain) for r in requests if r.chain and r.chain[-1] in unhealthy}
        for drafter, chain_len in failed.items():
            if self._max_lens.of(drafter) >= chain_len > 1:
                self._max_lens.note_failure(drafter, chain_len)

    def _predict(self, drafters: Sequence[PoolMember], batch: int) -> None:
        """Computes the fastest chain below each last drafter, and the seconds of a round with it."""
        names = [drafter_of(member.name) for member in drafters]
        limits = tuple(map(self._max_lens.of, names))
        period = next(self._slots) // REFRESH_SLOTS
        known = (tuple(names), limits, batch.bit_length(), self._target is UNMEASURED, self._are_known(drafters), period)
        if known == self._known:
            return
        self._known = known
        self._passes = {name: profiled_passes(member, self._target) for name, member in zip(names, drafters, strict=True)}
        passes = {name: self._pass_factors.corrected(name, base) for name, base in self._passes.items()}
        rates = {name: self._acceptance.mean_rates(member) for name, member in zip(names, drafters, strict=True)}
        by_name = dict(zip(names, drafters, strict=True))
        fills = {name: self._fills.of(name, by_name[name].max_draft_len) for name in names}
        overheads = self._overheads.factors()
        round_s: dict[Chain, float] = {}
        verifiers = [name for name in names if by_name[name].verifies]
        for chain in candidates(names, verifiers, self._max_levels):
            is_short = chain and len(chain) <= max(1, self._max_lens.of(chain[-1]))
            if not is_short or not all(by_name[one].leads for one in chain[:-1]):
                continue
            levels = []
            for lower, upper in pairwise(chain):
                agreement = self._similarities.rates(lower, upper, prior_agreement(rates[lower], rates[upper]))
                fill = self._similarities.fill(lower, upper, fills[lower])
                levels.append(Level(lower, passes[lower], 1, agreement, fill))
                levels[-1] = best_window(levels, passes[upper], batch)
            last = chain[-1]
            levels.append(Level(last, passes[last], by_name[last].max_draft_len, rates[last], fills[last]))
            round_s[chain] = predict(levels, self._target, batch).round_s
        self._chain_round_s = {chain: seconds * overheads.get(chain, 1.0) for chain, seconds in round_s.items()}
        for last in names:
            rounds = [(chain[:-1], seconds) for chain, seconds in self._chain_round_s.items() if chain[-1] == last]
            below = self._below[last] = fastest(rounds, self._below.get(last), self._hysteresis)
            self._round_s[last] = round_s[(*below, last)]

    def _per_token_s(self, ids: Sequence[str], live: Sequence[int], drafters: Sequence[PoolMember], batch: int) -> Floats:
        """(requests, drafters) seconds per token with the fastest chain below each. A round whose draft is late is a plain
        one: one token, and no longer, as the planner bounds holds. Sets ``self.per_token_s``, of ``live`` requests."""
        if not drafters:
            return np.zeros((len(ids), len(drafters)))
        names = [drafter_of(member.name) for member in drafters]
        lens, _ = self._acceptance.expected_lens(ids, drafters)
        on_time = self._acceptance.on_time.shares(names)
        round_s = on_time * [self._round_s[name] for name in names] + (1.0 - on_time) * self._target.at(batch)
        num_tokens = 1.0 + on_time * (lens - 1.0)
        # Each request has a round in every pass, so the mean over requests counts, not that over drafts.
        means = dict(zip(names, num_tokens[live].mean(axis=0).tolist(), strict=True))
        self.per_token_s = {chain: seconds / means[chain[-1]] for chain, seconds in self._chain_round_s.items()}
        per_token_s: Floats = round_s / num_tokens
        closed = [j for j, name in enumerate(names) if self._max_lens.of(name) == 0]
        per_token_s[:, closed] = np.inf
        return per_token_s

    def _with_hysteresis(
        self, requests: Sequence[RequestView], per_token_s: Floats, batch: int, room: FreeCapacity
    ) -> Floats:
        """(requests, 1 + drafters), the target alone first, with hysteresis for the present drafter."""
        seconds = np.hstack([np.full((len(requests), 1), self._target.at(batch)), per_token_s])
        names = ("", *room.drafters)
        for i, request in enumerate(requests):
            here = drafter_of(request.chain[-1]) if request.chain else ""
            if here in names and (here or _is_decoding(request)):
                seconds[i, names.index(here)] *= 1.0 - self._hysteresis
        return seconds

    def _are_known(self, drafters: Sequence[PoolMember]) -> bool:
        """Whether drafts of each drafter that is kept in step were judged."""
        return all(self._acceptance.num_drafts(one) for one in drafters if one.leads)

    def _trial(
        self, requests: Sequence[RequestView], columns: list[int], places: Sequence[int], room: FreeCapacity
    ) -> tuple[str, Chain] | None:
        """A request, and the drafter ahead of its drafter in this slot: a pair that no chain has shown the agreement of.
        Changes its column. Agreement is the same at all batch sizes, so each pair is tried for a few slots alone, each by
        another request if there are several; never while a choice is on trial."""
        decoding = [i for i, request in enumerate(requests) if _is_decoding(request)]
        if not decoding or not self._choice.is_settled or not self._are_known(room.members):
            return None
        most = min(MOST_TRIALS, TRIALS_BUDGET // len(decoding))
        for lower, last in [chain for chain in self._chain_round_s if len(chain) == 2]:
            num_slots, column = self._trials.get((lower, last), 0), 1 + room.drafters.index(last)
            i = decoding[num_slots % len(decoding)]
            has_room = columns[i] == column or columns.count(column) < places[column]
            if num_slots < most and has_room and not self._similarities.is_known(lower, last):
                self._trials[lower, last] = num_slots + 1
                columns[i] = column
                return requests[i].request_id, (lower,)
        return None

    def _seat(
        self, requests: Sequence[RequestView], columns: Sequence[int], room: FreeCapacity, trial: tuple[str, Chain] | None
    ) -> dict[str, Chain]:
        chains = dict.fromkeys([request.request_id for request in requests], TARGET_ONLY)
        for request, column in zip(requests, columns, strict=True):
            if column:
                last = room.drafters[column - 1]
                seat = room.seat(last, request.chain[-1:])
                assert seat is not None, f"more requests than places for {last}"
                below = trial[1] if trial is not None and trial[0] == request.request_id else self._below[last]
                chains[request.request_id] = (*below, *seat)
        return chains


def _drafters_of(chain: Chain) -> Chain:
    return tuple(map(drafter_of, chain))


def _is_decoding(request: RequestView) -> bool:
    """Whether it has a committed output token."""
    return request.committed_len > request.prompt_len
