"""Assignment policies on the same requests: against the best drafter of each in hindsight, and the best single one.

The bound of all is an oracle that changes the drafter in each round: the fewest rounds in which an answer can be committed
if each round has the draft of any drafter, cut to the tokens that are right, at no cost of drafting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.config import FixedPolicy, PolicyConfig
from router.drafter.policies import build_policy, keeps_in_step
from simulator.agreement import Agreement, AgreementAnswer, SimulatedRequest
from simulator.simulation import ClusterSpec, DrafterSpec, SimulationResult, in_turn, simulate

Floats = NDArray[np.float64]
ORACLE = "oracle"


@dataclass(frozen=True)
class Contest:
    """``single``: everybody with one drafter. ``best``: in hindsight, of each request. ``oracle``: see above; None: it was
    not asked for. ``policies``: by name."""

    single: Mapping[str, SimulationResult]
    best: Sequence[str]
    hindsight: SimulationResult
    policies: Mapping[str, SimulationResult]
    oracle: SimulationResult | None = None

    @property
    def best_single(self) -> str:
        return max(self.single, key=lambda name: self.single[name].goodput)

    def figures(self, prefix: str = "") -> dict[str, float]:
        best_single = self.single[self.best_single].goodput
        found = {f"{prefix}hindsight_over_best_single": self.hindsight.goodput / best_single}
        if self.oracle is not None:
            found[f"{prefix}switching_oracle_over_best_single"] = self.oracle.goodput / best_single
        for kind, outcome in self.policies.items():
            found[f"{prefix}goodput_over_hindsight.{kind}"] = outcome.goodput / self.hindsight.goodput
            found[f"{prefix}goodput_over_best_single.{kind}"] = outcome.goodput / best_single
        return found


def compete(
    spec: ClusterSpec,
    policies: Mapping[str, PolicyConfig],
    requests: Sequence[SimulatedRequest],
    concurrency: int,
    seed: int = 0,
    until_s: float | None = None,
    with_oracle: bool = False,
) -> Contest:
    """What is best for a request in hindsight is judged by runs in which all were with one drafter, in three ways: the least
    time per token that it took; the most tokens of a round, over what such a round takes beside the prompts, which are to be
    computed whoever drafts; or the best single drafter for all. Hindsight is whichever of the three commits most."""
    names = [drafter.name for drafter in spec.drafters]
    single = {name: _alone(spec, name, requests, concurrency, seed, until_s) for name in names}
    nobody = build_policy(FixedPolicy(chain=()))
    prompts_s = sum(spec.pass_timer.seconds([], [(one.prompt_len, one.prompt_len)]) for one in requests) / spec.num_targets
    found: list[tuple[SimulationResult, list[str]]] = []
    for speeds in (
        {name: _tokens_per_s(outcome) for name, outcome in single.items()},
        {name: _tokens_per_mean_round(outcome, prompts_s) for name, outcome in single.items()},
    ):
        best = [max(names, key=lambda name: speeds[name].get(request.id, 0.0)) for request in requests]
        fixed = [replace(request, chain=(name,)) for request, name in zip(requests, best, strict=True)]
        found.append((simulate(spec, nobody, in_turn(fixed, concurrency), seed, until_s), best))
    best_single = max(names, key=lambda name: single[name].goodput)
    found.append((single[best_single], [best_single] * len(requests)))
    hindsight, best = max(found, key=lambda one: one[0].goodput)
    outcomes: dict[str, SimulationResult] = {}
    for name, policy in policies.items():
        informed = replace(spec, keeps_in_step=keeps_in_step(policy))
        outcomes[name] = simulate(informed, build_policy(policy), in_turn(requests, concurrency), seed, until_s)
    oracle = None
    if with_oracle:
        max_len = max(drafter.max_draft_len for drafter in spec.drafters)
        known = replace(spec, drafters=(DrafterSpec(ORACLE, len(requests), max_len, companion=True),))
        told = [replace(request, answer=switching_oracle(request.answer, names, max_len)) for request in requests]
        oracle = _alone(known, ORACLE, told, concurrency, seed, until_s)
    return Contest(single, best, hindsight, outcomes, oracle)


def switching_oracle(answer: AgreementAnswer, drafters: Sequence[str], max_len: int) -> AgreementAnswer:
    """The answer with ORACLE, whose draft at each position leads along the fewest rounds to the end."""
    num = answer.output_len
    reach = [
        min(max_len, max(agreement.right[p] if p < len(agreement.right) else 0 for agreement in map(answer.of, drafters)))
        for p in range(num)
    ]
    num_rounds, draft_lens = [0] * (num + 1), bytearray(num)
    for p in range(num - 1, -1, -1):
        after = num_rounds[p + 1 : p + 2 + min(reach[p], num - p - 1)]  # by length of the draft
        draft_lens[p] = after.index(min(after))  # the shortest
        num_rounds[p] = 1 + min(after)
    draft = bytes(draft_lens)
    return AgreementAnswer(num, {ORACLE: Agreement(draft, draft, flat=(1.0,) * max_len)})


def regret(contest: Contest) -> dict[str, tuple[Floats, Floats]]:
    """Of each policy: when, in seconds, and how many tokens hindsight would have committed more by then."""
    times, tokens = _curve(contest.hindsight)
    found = {}
    for kind, outcome in contest.policies.items():
        at, have = _curve(outcome)
        at, have = at[at <= times[-1]], have[at <= times[-1]]
        found[kind] = (at, np.interp(at, times, tokens) - have)
    return found


def endless(request: SimulatedRequest, num_tokens: int) -> SimulatedRequest:
    """The same text over and over, its first token left out: a request whose drafters stay as good as they are."""
    answer = request.answer

    def again(agreement: Agreement) -> Agreement:
        num_times = -(-num_tokens // max(1, len(agreement.right) - 1))
        confidences = agreement.confidences
        if confidences is not None and len(confidences) > 1:
            confidences = np.tile(confidences[1:], (num_times, 1))
        part = slice(1, None) if len(agreement.right) > 1 else slice(None)
        return Agreement(agreement.drafted[part] * num_times, agreement.right[part] * num_times, confidences, agreement.flat)

    by_drafter = {name: again(agreement) for name, agreement in answer.by_drafter.items()}
    return replace(request, max_tokens=num_tokens, answer=AgreementAnswer(num_tokens, by_drafter))


def _alone(
    spec: ClusterSpec,
    drafter: str,
    requests: Sequence[SimulatedRequest],
    concurrency: int,
    seed: int,
    until_s: float | None,
) -> SimulationResult:
    alone = replace(spec, drafters=tuple(one for one in spec.drafters if one.name == drafter))
    policy = build_policy(FixedPolicy(chain=(drafter,)))
    return simulate(alone, policy, in_turn(requests, concurrency), seed, until_s)


def _tokens_per_s(outcome: SimulationResult) -> dict[str, float]:
    """Of each request that ended, after its first token; of one that was cut off what it had until then."""
    found = {
        one.request.id: (one.num_tokens - 1) / max(1e-9, one.end_s - one.first_token_s)
        for one in outcome.served
        if one.num_tokens > 1
    }
    return found | outcome.open_tokens_per_s


def _tokens_per_mean_round(outcome: SimulationResult, prompts_s: float) -> dict[str, float]:
    """Tokens of a round of each request that ended, over what a round of a request took of the run, its prompts left out."""
    ended = [one for one in outcome.served if one.num_rounds > 1]
    round_s = max(1e-9, outcome.end_s - prompts_s) / max(1, sum(one.num_rounds - 1 for one in ended))
    return {one.request.id: (one.num_tokens - 1) / (one.num_rounds - 1) / round_s for one in ended}


def _curve(outcome: SimulationResult) -> tuple[Floats, Floats]:
    points = [(0.0, 0), *outcome.slots]
    return np.array([when for when, _ in points]), np.array([float(tokens) for _, tokens in points])
