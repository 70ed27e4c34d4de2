"""What drafts of a recorded pool cost beside a target that is not here: for ``outrider bench routing``.

The target is a roofline of a shipped scenario. Lookups run on CPUs wherever the target is, and keep the times that were
measured on this machine. Drafters with weights take a share of the target's time, as a DSpark drafter of a few layers does:
at a 70B target less than at a 32B one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulate import FOLDER
from cluster.config import DrafterConfig
from router.cost_model import CostModel, TableCost
from simulator.scenario import ServingScenario, read_scenario

LOOKUPS = ("ngram", "suffix", "table")  # kinds of options
SHARES = {"h100-32b": 0.03, "a100-70b": 0.02}  # of a pass over as many rows, by scenario


@dataclass(frozen=True, slots=True)
class SharedCost:
    """A `router.cost_model.CostModel`.

    Args:
        target: its passes.
        lookups: draft times of these drafters, measured.
        share: of a pass over a draft's rows, that all other drafters take.
    """

    target: CostModel
    lookups: CostModel
    lookup_names: frozenset[str]
    share: float

    def step_s(self, num_rows: int, num_context: int) -> float:
        return self.target.step_s(num_rows, num_context)

    def prefill_s(self, num_rows: int, num_context: int) -> float:
        return self.target.prefill_s(num_rows, num_context)

    def table(self, num_context: int) -> TableCost:
        return self.target.table(num_context)

    def draft_s(self, drafter: str, batch: int, draft_len: int) -> float | None:
        if drafter in self.lookup_names:
            return self.lookups.draft_s(drafter, batch, draft_len)
        return self.share * self.target.step_s(batch * draft_len, 0)

    def catch_up_s(self, drafter: str, num_tokens: int) -> float | None:
        if drafter in self.lookup_names:
            return self.lookups.catch_up_s(drafter, num_tokens)
        return self.share * (self.target.step_s(1 + num_tokens, 0) - self.target.step_s(1, 0))


def gpu_costs(measured: CostModel, configs: Sequence[DrafterConfig]) -> Mapping[str, CostModel]:
    """By scenario."""
    lookups = frozenset(config.name for config in configs if config.options.kind in LOOKUPS)
    found: dict[str, CostModel] = {}
    for name, share in SHARES.items():
        scenario = read_scenario(FOLDER / f"{name}.yaml")
        assert isinstance(scenario, ServingScenario)
        found[name] = SharedCost(scenario.cost(scenario.target), measured, lookups, share)
    return found
