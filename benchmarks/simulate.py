"""``outrider simulate``: a scenario on a virtual clock; tables on stderr, a picture, and the figures as one JSON object."""

from difflib import get_close_matches
from pathlib import Path

from rich.console import Console

from benchmarks.report import BenchResult, Expectation, failures, print_result, write_json
from benchmarks.studies import specrouter, spin
from cluster.errors import InvalidField
from deploy.console import table_console
from simulator import serving
from simulator.scenario import ServingScenario, SpecRouterScenario, SpinScenario, read_scenario
from simulator.study import Study, plot

FOLDER = Path(__file__).parent / "scenarios"


def names() -> list[str]:
    """The shipped scenarios."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(scenario: str) -> Path:
    """A shipped scenario by name, any other by path.

    Raises:
        InvalidField: it does not exist; names the nearest.
    """
    if scenario in names():
        return FOLDER / f"{scenario}.yaml"
    path = Path(scenario)
    if path.suffix in (".yaml", ".yml"):
        return path
    near = get_close_matches(scenario, names(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names())}, and files that end with .yaml"
    raise InvalidField("scenario", scenario, f"no such scenario, {hint}")


def run(
    scenario: str, picture: Path | None, json: str, expectations: list[Expectation], quick: bool, data: Path | None = None
) -> bool:
    """Returns whether the figures meet the expectations.

    Args:
        picture: by default outrider-NAME.png.
        data: folder of the scenario's trace; without it arrivals are drawn.

    Raises:
        OutriderError: the scenario does not exist or cannot be used, or a file cannot be written.
    """
    path = find(scenario)
    console = table_console()
    study = simulated(path, console, quick, data)
    picture = picture or Path(f"outrider-{path.stem}.png")
    if study.panels:
        plot(study.panels, f"simulated: {path.stem}", picture)
    notes = (*study.notes, f"drawn in {picture}")
    result = BenchResult(f"simulate {path.stem}", study.figures, study.tables, notes)
    print_result(result, console)
    write_json(result, json)
    unmet = failures(result, expectations)
    for line in unmet:
        console.print(f"[bold red]not met:[/] {line}", highlight=False)
    return not unmet


def simulated(path: Path, console: Console, quick: bool, data: Path | None = None) -> Study:
    scenario = read_scenario(path)

    def said(what: str) -> None:
        console.print(f"simulating {path.stem}: {what}", highlight=False)

    match scenario:
        case SpinScenario():
            first = dict(list(scenario.targets.items())[:1])
            # Not less: lbss explores for half of the first two minutes.
            small = {"targets": first, "repeats": min(2, scenario.repeats)}
            return spin.run(scenario.model_copy(update=small) if quick else scenario, said)
        case SpecRouterScenario():
            small = {"batches": scenario.batches[:1], "case_batches": scenario.case_batches[-1:]}
            return specrouter.run(scenario.model_copy(update=small) if quick else scenario, said)
        case ServingScenario():
            small = {"duration_s": min(30.0, scenario.duration_s)}
            scenario = scenario.with_data(data)
            return serving.run(scenario.model_copy(update=small) if quick else scenario, said)
