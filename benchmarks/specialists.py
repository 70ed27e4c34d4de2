"""Part of ``outrider bench routing``: the shipped block drafter with its adapters as members of the cascade.

Answers of the target are replayed with the cascade of the pool, with the same and all specialists, and with each specialist
alone. A round costs one step, and each model's draft the share of it that it costs beside the scenario's target. Figures:

- ``specialists_gain.<scenario>``: tokens per time of the cascade with them over the cascade without;
- ``specialist_gain.<adapter>``: accepted length over the generalist's, both alone; ``.<domain>``: of a domain.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from benchmarks.fixtures import Fixtures
from benchmarks.pool import pool
from benchmarks.prompts import choose_prompts
from benchmarks.report import BenchOptions, Cell, Table
from benchmarks.rounds import MIN_CASES, mean_accepted_len
from benchmarks.routing_costs import SHARES
from cluster.config import CascadeOptions, DrafterConfig, DSparkOptions
from drafters.cascade import CascadeDrafter, CascadeMember
from drafters.protocol import Demand, Draft, Drafter
from drafters.replay import Round, replay
from drafters.shipped import adapters_of

NUM_PROMPTS, NUM_QUICK = 156, 39
NUM_NEW_TOKENS = 128
DRAFT_LEN = 7


class _Counted:
    """A drafter whose drafts are counted."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.num_drafts = 0
        self.capabilities = drafter.capabilities
        self.open, self.extend, self.release = drafter.open, drafter.extend, drafter.release
        self.check_integrity = drafter.check_integrity

    def propose(self, demands: Sequence[Demand]) -> list[Draft]:
        self.num_drafts += len(demands)
        return self._drafter.propose(demands)


@dataclass(slots=True)
class _Arm:
    drafter: Drafter
    models: tuple[_Counted, ...] = ()
    rounds: list[Round] = field(default_factory=list)

    def speed(self, share: float) -> float:
        """Tokens a step."""
        num_drafts = sum(model.num_drafts for model in self.models)
        return sum(one.num_committed for one in self.rounds) / (len(self.rounds) + share * num_drafts)


def run(options: BenchOptions) -> tuple[dict[str, float], tuple[Table, ...]]:
    """Nothing if the pool has no specialists."""
    configs = pool(options.model)
    cascade = next(one.options for one in configs if isinstance(one.options, CascadeOptions))
    block = next((one for one in cascade.members if isinstance(one, DSparkOptions)), None)
    names = () if block is None else adapters_of(block.path)
    if block is None or not names:
        return {}, ()
    specialists = {name: block.model_copy(update={"adapter": name}) for name in names}
    fixtures = Fixtures(options.model, configs, NUM_NEW_TOKENS)
    alone = {name: _Arm(_made(fixtures, one)) for name, one in ({"generalist": block} | specialists).items()}
    arms = {
        (share, has_all): _cascade(fixtures, cascade, tuple(specialists.values()) if has_all else (), share)
        for share in SHARES.values()
        for has_all in (False, True)
    }
    prompts = choose_prompts(options.prompts or options.data_prompts, NUM_QUICK if options.quick else NUM_PROMPTS)
    for answers in fixtures.record(prompts, (0.0,)):
        with fixtures.holding(answers[0.0]):
            for arm in chain(alone.values(), arms.values()):
                arm.rounds += replay(arm.drafter, answers[0.0], DRAFT_LEN, batch=1)
    return _result(alone, arms)


def _made(fixtures: Fixtures, options: DSparkOptions) -> Drafter:
    return fixtures.make(DrafterConfig(name="one", options=options))


def _cascade(fixtures: Fixtures, options: CascadeOptions, added: Sequence[DSparkOptions], share: float) -> _Arm:
    members, models = [], []
    for i, one in enumerate((*options.members, *added)):
        drafter = fixtures.make(DrafterConfig(name=f"m{i}", options=one))
        if one.traits.has_model:
            drafter = _Counted(drafter)
            models.append(drafter)
        members.append(CascadeMember(f"m{i}", drafter, share if one.traits.has_model else 0.0, not one.traits.has_model))
    return _Arm(CascadeDrafter(members), tuple(models))


def _result(alone: dict[str, _Arm], arms: dict[tuple[float, bool], _Arm]) -> tuple[dict[str, float], tuple[Table, ...]]:
    figures: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    for scenario, share in SHARES.items():
        without, having = arms[share, False], arms[share, True]
        figures[f"specialists_gain.{scenario}"] = having.speed(share) / without.speed(share)
        for name, arm in (("without", without), ("with", having)):
            per_round = [model.num_drafts / len(arm.rounds) for model in arm.models]
            cells = " ".join(f"{num:.2f}" for num in per_round)
            rows.append((f"{scenario}, {name}", mean_accepted_len(arm.rounds), cells, arm.speed(share)))
    lens: dict[str, dict[str, float]] = {}
    for name, arm in alone.items():
        lens[name] = {domain: mean_accepted_len(rounds) for domain, rounds in _by_domain(arm.rounds)}
        lens[name]["all"] = mean_accepted_len(arm.rounds)
    for name in [name for name in lens if name != "generalist"]:
        for domain, accepted_len in lens[name].items():
            key = f"specialist_gain.{name}" + ("" if domain == "all" else f".{domain}")
            figures[key] = accepted_len / lens["generalist"][domain]
    domains = list(lens["generalist"])
    by_domain: list[tuple[Cell, ...]] = [
        (domain, *(lens[name].get(domain, float("nan")) for name in lens)) for domain in domains
    ]
    return figures, (
        Table(
            "cascades, a round one step", ("", "accepted length", "drafts a round by model", "tokens a step"), tuple(rows)
        ),
        Table(f"accepted length alone, K = {DRAFT_LEN}, temperature 0", ("domain", *lens), tuple(by_domain)),
    )


def _by_domain(rounds: Iterable[Round]) -> list[tuple[str, list[Round]]]:
    found: dict[str, list[Round]] = defaultdict(list)
    for one in rounds:
        found[one.domain].append(one)
    return [(domain, of_domain) for domain, of_domain in sorted(found.items()) if len(of_domain) >= MIN_CASES]
