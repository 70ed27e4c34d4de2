"""SPIN's evaluation with its assumptions varied one at a time: where the order of figures 10 and 11 holds, and where not.

- spread: of each drafter's acceptance over requests, in logits. Without it there is nothing to choose per request.
- epsilon: with which epsilon-greedy explores; the paper's is 0.8.
- kv_traffic: times that attention of the target moves keys and values, which padding multiplies and packing saves.
- places: of each drafter, for ``batch`` requests; with few of them matching binds.
- finite: requests have the text's lengths, so that what is learned of one is lost when it ends; else they never end.

``order_holds.figure_10``, ``.figure_11``: share of all settings in which the order holds.
"""

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean

from benchmarks.studies.spin import PARTS, best_vanilla, goodputs_of, parts_in_order, selection_in_order
from simulator.scenario import SpinScenario, SpinVariations
from simulator.study import Cell, Said, Study, StudyTable

Setting = tuple[str, str, SpinScenario]  # what is varied, its value, the scenario


def run(varied: SpinVariations, base: SpinScenario, said: Said = lambda what: None) -> Study:
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {}
    held: dict[str, list[bool]] = {"figure_10": [], "figure_11": []}
    for name, value, scenario in settings(varied, base):
        said(f"{name} {value}")
        found = goodputs_of(scenario, varied.target, varied.text)
        orders = {"figure_10": parts_in_order(found), "figure_11": selection_in_order(found)}
        best = best_vanilla(found)
        ratios = {
            "first_part_over_best_vanilla": found[PARTS[0]] / best,
            "packed_over_padded": found[PARTS[1]] / found[PARTS[0]],
            "pipeline_over_packed": found[PARTS[2]] / found[PARTS[1]],
            "lbss_over_epsilon_greedy": found["lbss"] / found["epsilon-greedy"],
            "outrider_over_spin": found["outrider"] / found["spin"],
        }
        for figure, holds in orders.items():
            held[figure].append(holds)
            figures[f"order_holds.{figure}.{name}_{value}"] = float(holds)
        figures |= {f"{key}.{name}_{value}": ratio for key, ratio in ratios.items()}
        rows.append((name, value, *ratios.values(), *("yes" if holds else "no" for holds in orders.values())))
    figures |= {f"order_holds.{figure}": fmean(holds) for figure, holds in held.items()}
    columns = (
        *("varied", "value", "lbss over best vanilla", "packed over padded", "pipeline over packed"),
        *("lbss over epsilon-greedy", "outrider over spin", "figure 10", "figure 11"),
    )
    title = f"goodput, {varied.text}, {varied.target}: one assumption varied at a time"
    note = "simulated: costs by a roofline; acceptance by families that were chosen by hand."
    return Study("spin-varied", figures, (StudyTable(title, columns, tuple(rows)),), (), (note,))


def settings(varied: SpinVariations, base: SpinScenario) -> Iterator[Setting]:
    """Of all variations; the others of each are those of ``base``."""
    changes: Mapping[str, tuple[tuple[float, ...], Callable[[float], SpinScenario]]] = {
        "spread": (varied.spread, lambda value: _with_spread(base, varied.text, value)),
        "epsilon": (varied.epsilon, lambda value: _with_epsilon(base, value)),
        "kv_traffic": (varied.kv_traffic, lambda value: _with_traffic(base, varied.target, value)),
        "places": (varied.places, lambda value: _with_places(base, int(value))),
        "finite": (tuple(map(float, varied.finite)), lambda value: base.model_copy(update={"finite": bool(value)})),
    }
    for name, (values, change) in changes.items():
        for value in values:
            yield name, f"{value:g}", change(value)


def _with_spread(base: SpinScenario, text: str, spread: float) -> SpinScenario:
    of = base.texts[text]
    drafters = {name: one.model_copy(update={"spread": spread}) for name, one in of.family.drafters.items()}
    changed = of.model_copy(update={"family": of.family.model_copy(update={"drafters": drafters})})
    return base.model_copy(update={"texts": {**base.texts, text: changed}})


def _with_epsilon(base: SpinScenario, epsilon: float) -> SpinScenario:
    return base.model_copy(update={"epsilon_greedy": base.epsilon_greedy.model_copy(update={"epsilon": epsilon})})


def _with_traffic(base: SpinScenario, target: str, kv_traffic: float) -> SpinScenario:
    device = base.targets[target].device
    changed = base.devices[device].model_copy(update={"kv_traffic": kv_traffic})
    return base.model_copy(update={"devices": {**base.devices, device: changed}})


def _with_places(base: SpinScenario, places: int) -> SpinScenario:
    drafters = {name: one.model_copy(update={"capacity": places}) for name, one in base.drafters.items()}
    return base.model_copy(update={"drafters": drafters})
