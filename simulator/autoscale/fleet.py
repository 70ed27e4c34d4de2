"""A fleet as a fluid in steps of a second: prompts in one queue, decoding shared equally, replicas that start and drain.

Of each step of length h, with R targets that are ready and p the share of their time that prompts take:

    prompts     in order of arrival, at most R (1 - q) h seconds of them, where q is the share that decoding needs to keep
                its objective; none without a place (sequences, KV cache)
    refused     who would get the first token too late, as `router/planning/admission.py` refuses them
    decoding    every running request advances by the same v = h (1 - p) r(N / R, context, drafts) tokens

Since all advance alike, V = sum of v is a clock of tokens: a request that begins at V and has n tokens ends when the clock
shows V + n. So ends are found by one addition, and times per token exactly, however many requests there are.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from router.scaling.report import FleetReport, FleetSize, Replicas
from router.scaling.service_rates import TPOT_SHARE, Objectives, ServiceRates
from simulator.autoscale.arrivals import Arrivals, Floats

MAX_DRAIN_S = 120.0  # after which the requests of a replica that ends would be resumed on another
LAST_S = 600.0  # played after the last arrival
MIN_PROMPT_SHARE = (
    0.2  # of a target's time that prompts may take, however slow decoding is: prefill chunks are never starved
)
BIN_LEN = 8.0  # tokens of the clock that ends are counted by
ALONE_FACTOR = (
    2.0  # the first token may take so many times the prompt's own time on top of the objective: long prompts need longer
)
BUSY_WEIGHT = 0.1  # of the newest second in what is reported as busy


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds from the decision to the first request served; GPUs are paid meanwhile."""

    target_s: float
    drafter_s: float


class Group:
    """Replicas of one kind: ready, starting, draining. GPU time is counted from the decision to the end of draining."""

    def __init__(self, num: int, start_s: float, num_gpus: float) -> None:
        self.num_ready = num
        self.starting: list[float] = []  # when each will be ready
        self.draining: list[float] = []  # until when
        self.start_s = start_s
        self.num_gpus = num_gpus
        self.gpu_s = 0.0
        self.num_started = 0

    @property
    def num_wanted(self) -> int:
        return self.num_ready + len(self.starting)

    @property
    def num_paid(self) -> int:
        return self.num_ready + len(self.starting) + len(self.draining)

    @property
    def replicas(self) -> Replicas:
        return Replicas(self.num_ready, len(self.starting))

    def pass_time(self, now_s: float, step_s: float) -> None:
        if self.starting and self.starting[0] <= now_s:
            num = sum(1 for at_s in self.starting if at_s <= now_s)
            del self.starting[:num]
            self.num_ready += num
        if self.draining:
            self.draining = [at_s for at_s in self.draining if at_s > now_s]
        self.gpu_s += self.num_paid * self.num_gpus * step_s

    def resize(self, num: int, now_s: float, drain_s: float) -> None:
        """Begins to start or to end replicas; those that start last end first."""
        more = num - self.num_wanted
        if more > 0:
            self.starting += [now_s + self.start_s] * more
            self.num_started += more
        elif more < 0:
            cancelled = min(-more, len(self.starting))
            if cancelled:
                del self.starting[-cancelled:]
            ended = -more - cancelled
            self.num_ready -= ended
            if drain_s > 0.0:
                self.draining += [now_s + drain_s] * ended


@dataclass(frozen=True, slots=True)
class Sample:
    """For pictures and settling times."""

    at_s: float
    num_targets: int  # ready
    num_drafters: int
    num_gpus: float  # paid
    num_running: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run, from the end of the warm-up."""

    num_requests: float
    attainment: float  # share of requests with both objectives met; refused ones are not
    ttft_attainment: float
    refused: float  # share
    target_gpu_h: float
    drafter_gpu_h: float
    num_tokens: float  # of outputs
    num_starts: int  # of targets
    drafted_share: float  # of decoding
    samples: tuple[Sample, ...] = ()

    @property
    def gpu_h(self) -> float:
        return self.target_gpu_h + self.drafter_gpu_h


class Policy(Protocol):
    """Decides about sizes every ``period_s``."""

    period_s: float

    def decide(self, report: FleetReport) -> FleetSize: ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated, but for arrivals and policy."""

    rates: ServiceRates
    objectives: Objectives
    start_up: StartUp
    max_gpus: float
    warm_up_s: float = 0.0  # at the start of the arrivals, that counts for nothing

    @property
    def max_targets(self) -> int:
        return max(1, int(self.max_gpus / self.rates.target.num_gpus))


def run(
    fleet: Fleet, arrivals: Arrivals, policy: Policy, step_s: float, initial: FleetSize, sample_s: float = 0.0
) -> Outcome:
    """Plays all arrivals and until the last has ended. ``sample_s``: between samples; 0: none."""
    return _Run(fleet, arrivals, step_s, initial).play(policy, sample_s)


class _Run:
    def __init__(self, fleet: Fleet, arrivals: Arrivals, step_s: float, initial: FleetSize) -> None:
        rates, weight = fleet.rates, arrivals.weight
        self._fleet, self._arrivals, self._step_s = fleet, arrivals, step_s
        self._targets = Group(initial.num_targets, fleet.start_up.target_s, rates.target.num_gpus)
        self._drafters = {
            name: Group(initial.num_drafters.get(name, 0), fleet.start_up.drafter_s, size.num_gpus)
            for name, size in rates.drafters.items()
        }
        self._prefill_s = arrivals.prompt_len * rates.prompt_token_s
        self._context_len = arrivals.prompt_len + arrivals.output_len / 2
        # Sums over all entries before one.
        self._work = _sums(self._prefill_s * weight)
        self._contexts = _sums(self._context_len * weight)
        self._counts = _sums(weight)
        self._prompt_tokens = _sums(arrivals.prompt_len * weight)
        self._first_s = np.full(len(weight), np.inf)  # when its first token came
        self._end_clock = np.zeros(len(weight))  # what the clock shows at its last token
        num_bins = int(arrivals.output_len.max(initial=1.0) / BIN_LEN) + 2048
        # Rings: what ends.
        self._ends, self._end_contexts, self._end_tokens = (np.zeros(num_bins) for _ in range(3))
        self._weighted_contexts, self._weighted_tokens = self._context_len * weight, arrivals.output_len * weight
        self._head = 0  # the first request whose prompt's turn has not come
        self._work_done = 0.0  # of all prompts before, and of the part of the next one that is done
        self._running = self._context = 0.0
        self._clock, self._num_passed = 0.0, 0
        self._speed = rates.plain_tokens_per_s(1.0, 0.0)  # of the clock, in the last step in which any request ran
        self._mean_len = float(np.average(arrivals.output_len, weights=weight)) if len(weight) else 1.0
        self._num_ended = self._num_output_tokens = self._num_missed = 0.0
        self._drafted_s = self._running_s = self._busy = 0.0

    def play(self, policy: Policy, sample_s: float) -> Outcome:
        fleet, step_s, arrivals = self._fleet, self._step_s, self._arrivals
        num_steps = int((arrivals.duration_s + LAST_S) / step_s) + 1
        starts_s = step_s * np.arange(num_steps)
        tails = np.searchsorted(arrivals.arrival_s, starts_s + step_s).tolist()
        expired = np.searchsorted(arrivals.arrival_s, starts_s - fleet.objectives.ttft_s).tolist()
        clocks = np.zeros(num_steps + 1)
        groups = [self._targets, *self._drafters.values()]
        reported, decide_s, paid, samples, sampled_s = 0, 0.0, [0.0] * len(groups), [], 0.0
        for index in range(num_steps):
            now_s, tail = index * step_s, tails[index]
            if now_s == fleet.warm_up_s:
                paid = [group.gpu_s for group in groups]
            if now_s >= arrivals.duration_s and self._head == tail and self._running == 0.0:
                clocks[index + 1 :] = self._clock
                break
            for group in groups:
                group.pass_time(now_s, step_s)
            self._step(now_s, tail, expired[index])
            clocks[index + 1] = self._clock
            if now_s >= decide_s:
                decide_s = now_s + policy.period_s
                size = policy.decide(self._report(now_s + step_s, reported, tail))
                reported = tail
                self._resize(size, now_s)
            if sample_s and now_s >= sampled_s:
                sampled_s = now_s + sample_s
                drafters = sum(group.num_ready for group in groups[1:])
                gpus = sum(group.num_paid * group.num_gpus for group in groups)
                samples.append(Sample(now_s, self._targets.num_ready, drafters, gpus, self._running))
        hours = [(group.gpu_s - before) / 3600.0 for group, before in zip(groups, paid, strict=True)]
        times: Floats = step_s * np.arange(num_steps + 1, dtype=np.float64)
        return self._outcome(times, clocks, hours[0], sum(hours[1:]), tuple(samples))

    def _step(self, now_s: float, tail: int, expired: int) -> None:
        rates, targets, step_s = self._fleet.rates, self._targets, self._step_s
        num_ready, num_decoding = targets.num_ready, max(1, targets.num_ready + len(targets.draining))
        shares = self._shares()
        prompt_share, rate = 1.0, 0.0
        if self._running:
            rate = rates.tokens_per_s(self._running / num_decoding, self._context / num_decoding, shares)
            prompt_share = max(MIN_PROMPT_SHARE, 1.0 - 1.0 / (rate * TPOT_SHARE * self._fleet.objectives.tpot_s))
        if expired > self._head:  # refused: they would be late
            self._num_missed += float(self._counts[expired] - self._counts[self._head])
            self._head = expired
        busy_s = self._compute_prompts(now_s, tail, num_ready, prompt_share) if self._head < tail and num_ready else 0.0
        share = busy_s / (num_ready * step_s) if num_ready else 0.0
        if self._running:
            rate = rate or rates.tokens_per_s(self._running / num_decoding, self._context / num_decoding, shares)
            self._speed = rate * (1.0 - share)
            self._clock += self._speed * step_s
            self._running_s += self._running * step_s
            self._drafted_s += self._running * step_s * sum(shares.values())
        places = num_decoding * rates.target.max_num_sequences
        used = max(share, self._running / places, self._context / (num_decoding * rates.target.kv_tokens))
        self._busy += (1.0 - (1.0 - BUSY_WEIGHT) ** step_s) * (used - self._busy)
        if self._running:
            self._end()

    def _compute_prompts(self, now_s: float, tail: int, num_ready: int, prompt_share: float) -> float:
        """Returns the seconds of targets that it takes."""
        head, target = self._head, self._fleet.rates.target
        begun = max(self._work_done, float(self._work[head]))
        budget_s = num_ready * prompt_share * self._step_s
        places = max(0.0, num_ready * target.max_num_sequences - self._running)
        tokens = max(0.0, num_ready * target.kv_tokens - self._context)
        work, counts, contexts = self._work, self._counts, self._contexts
        until = tail
        if work[tail] - begun > budget_s:
            until = int(work.searchsorted(begun + budget_s, "right")) - 1
        if counts[until] - counts[head] > places:
            until = min(until, int(counts.searchsorted(counts[head] + places, "right")) - 1)
        if contexts[until] - contexts[head] > tokens:
            until = min(until, int(contexts.searchsorted(contexts[head] + tokens, "right")) - 1)
        if until <= head:
            fits = counts[head + 1] - counts[head] <= places and contexts[head + 1] - contexts[head] <= tokens
            if not fits and self._running:
                return 0.0
            if work[head + 1] - begun > budget_s:  # longer than a step: a part of it is computed
                self._work_done = begun + budget_s
                return budget_s
            until = head + 1
        arrivals, entries = self._arrivals, slice(head, until)
        turn_s = np.maximum(now_s + (work[entries] - begun) / (num_ready * prompt_share), arrivals.arrival_s[entries])
        first_s = self._first_s[entries] = turn_s + self._prefill_s[entries] / prompt_share
        end_clock = self._clock + self._speed * (first_s - now_s) + arrivals.output_len[entries]
        self._end_clock[entries] = end_clock
        bins = (end_clock / BIN_LEN).astype(np.int64) % len(self._ends)
        np.add.at(self._ends, bins, arrivals.weight[entries])
        np.add.at(self._end_contexts, bins, self._weighted_contexts[entries])
        np.add.at(self._end_tokens, bins, self._weighted_tokens[entries])
        self._running += float(counts[until] - counts[head])
        self._context += float(contexts[until] - contexts[head])
        self._head, self._work_done = until, float(self._work[until])
        return self._work_done - begun

    def _end(self) -> None:
        """Requests whose last token the clock has passed."""
        last, num_bins = int(self._clock / BIN_LEN), len(self._ends)
        while self._num_passed < last:
            at = self._num_passed % num_bins
            num = float(self._ends[at])
            if num:
                self._running -= num
                self._context -= float(self._end_contexts[at])
                self._num_ended += num
                self._num_output_tokens += float(self._end_tokens[at])
                if self._speed * self._fleet.objectives.tpot_s < 1.0:
                    self._num_missed += num
                self._ends[at] = self._end_contexts[at] = self._end_tokens[at] = 0.0
            self._num_passed += 1
        if self._running < 1e-6:
            self._running = self._context = 0.0

    def _shares(self) -> dict[str, float]:
        num_ready = {name: group.num_ready for name, group in self._drafters.items()}
        return self._fleet.rates.shares(num_ready, self._running)

    def _report(self, now_s: float, reported: int, tail: int) -> FleetReport:
        ended, tokens, missed = self._num_ended, self._num_output_tokens, self._num_missed
        self._num_ended = self._num_output_tokens = self._num_missed = 0.0
        return FleetReport(
            now_s=now_s,
            targets=self._targets.replicas,
            drafters={name: group.replicas for name, group in self._drafters.items()},
            num_waiting=float(self._counts[tail] - self._counts[self._head]),
            num_running=self._running,
            busy=self._busy,
            num_arrived=float(self._counts[tail] - self._counts[reported]),
            num_prompt_tokens=float(self._prompt_tokens[tail] - self._prompt_tokens[reported]),
            num_missed=missed,
            num_ended=ended,
            num_output_tokens=tokens,
        )

    def _resize(self, size: FleetSize, now_s: float) -> None:
        """Within the GPUs of the fleet: targets come before drafters."""
        fleet, targets = self._fleet, self._targets
        rate = 0.0
        if self._running:
            num = max(1, targets.num_ready)
            rate = fleet.rates.tokens_per_s(self._running / num, self._context / num, {})
        drain_s = min(MAX_DRAIN_S, self._mean_len / rate) if rate else 0.0
        targets.resize(min(max(1, size.num_targets), fleet.max_targets), now_s, drain_s)
        free = fleet.max_gpus - (targets.num_wanted + len(targets.draining)) * targets.num_gpus
        for name, group in self._drafters.items():
            num = min(size.num_drafters.get(name, 0), max(0, int(free / group.num_gpus + 1e-9)))
            group.resize(num, now_s, 0.0)
            free -= group.num_wanted * group.num_gpus

    def _outcome(
        self, times: Floats, clocks: Floats, target_gpu_h: float, drafter_gpu_h: float, samples: tuple[Sample, ...]
    ) -> Outcome:
        arrivals, objectives = self._arrivals, self._fleet.objectives
        counted = arrivals.arrival_s >= self._fleet.warm_up_s
        weight, arrival_s, first_s = arrivals.weight[counted], arrivals.arrival_s[counted], self._first_s[counted]
        served = np.isfinite(first_s)
        due_s = objectives.ttft_s + ALONE_FACTOR * self._prefill_s[counted]
        in_time = served & (first_s - arrival_s <= due_s)
        output_len = arrivals.output_len[counted]
        first = np.where(served, first_s, 0.0)
        num_tokens = np.maximum(1.0, self._end_clock[counted] - np.interp(first, times, clocks))
        ended_s = np.interp(self._end_clock[counted], clocks, times)
        met = in_time & (ended_s - first <= objectives.tpot_s * num_tokens)
        num = max(1e-9, float(weight.sum()))
        return Outcome(
            num_requests=num,
            attainment=float(weight[met].sum()) / num,
            ttft_attainment=float(weight[in_time].sum()) / num,
            refused=float(weight[~served].sum()) / num,
            target_gpu_h=target_gpu_h,
            drafter_gpu_h=drafter_gpu_h,
            num_tokens=float((weight * output_len)[served].sum()),
            num_starts=self._targets.num_started,
            drafted_share=self._drafted_s / self._running_s if self._running_s else 0.0,
            samples=samples,
        )


def _sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))
