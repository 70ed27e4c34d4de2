"""Placement: what sits where, what does not fit, and that no machine is promised twice."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import (
    Config,
    DrafterConfig,
    ModelOptions,
    NgramOptions,
    Resources,
    SuffixOptions,
    TargetConfig,
    load,
    parts_of,
)
from cluster.placement import PlacementError, PlacementPlan, Strategy, place, target_group
from cluster.resolve import Inventory, Node, resolve
from cluster.strict_yaml import parse
from tests.support.examples import EXAMPLES, MACHINES


def planned(config: Config, *nodes: Node) -> PlacementPlan:
    inventory = Inventory(nodes)
    return place(resolve(config, inventory), inventory)


def nodes_of(plan: PlacementPlan, group: str) -> list[str]:
    return [bundle.node for bundle in plan.group(group).bundles]


def with_target(tensor_parallel: int = 1, **fields: object) -> Config:
    """Placement knows tensor parallelism; files cannot ask for it, since the native engine has none."""
    return Config(target=TargetConfig(**fields).model_copy(update={"tensor_parallel": tensor_parallel}))


def drafter(name: str, replicas: int = 1, **resources: float) -> DrafterConfig:
    options = ModelOptions(model="x") if resources.get("gpus") else NgramOptions()
    return DrafterConfig(name=name, options=options, replicas=replicas, resources=Resources(**resources))


def test_a_laptop_holds_everything_by_shares() -> None:
    plan = planned(Config(), Node("laptop", 2))
    assert [group.name for group in plan.groups] == ["target-0", "drafter-cascade", "drafter-ngram", "drafter-suffix"]
    assert {bundle.node for group in plan.groups for bundle in group.bundles} == {"laptop"}
    assert [bundle.process for group in plan.groups for bundle in group.bundles] == [
        "target-0/0",
        "drafter-cascade/0",
        "drafter-ngram/0",
        "drafter-suffix/0",
    ]
    assert all(0 < bundle.cpus < 2 and bundle.gpus == 0 for group in plan.groups for bundle in group.bundles)


@pytest.mark.parametrize(("engine", "num_cores", "threads"), [("native", 4, 4), ("vllm", 4, 3), ("vllm", 1, 1)])
def test_vllm_leaves_a_core_to_its_scheduler(engine: str, num_cores: int, threads: int) -> None:
    config = resolve(with_target(engine=engine), Inventory((Node("laptop", num_cores),)))
    assert config.target.resources.threads == threads


def test_one_core_is_enough() -> None:
    assert len(planned(Config(), Node("small", 1)).groups) == 4


def test_the_ranks_of_a_target_that_joins_share_a_node() -> None:
    config = parse("target: {tensor_parallel: 2, max_replicas: 2, resources: {cpus: 1, gpus: 1}}", Config, "text")
    assert target_group(config, "target-1").strategy is Strategy.STRICT_PACK


def test_a_target_group_is_packed_on_one_node_and_takes_the_tightest() -> None:
    config = with_target(tensor_parallel=4)
    plan = planned(config, Node("eight", 64, 8), Node("four", 32, 4), Node("two", 32, 2))
    assert plan.group("target-0").strategy is Strategy.STRICT_PACK
    assert nodes_of(plan, "target-0") == ["four"] * 4
    assert [bundle.process for bundle in plan.group("target-0").bundles] == [f"target-0/{i}" for i in range(4)]


def test_one_bundle_holds_all_ranks_of_vllm() -> None:
    """Its executor starts them as children of the target's process, so they need one machine."""
    config = with_target(engine="vllm", device="cuda", tensor_parallel=4, resources=Resources(cpus=2))
    (bundle,) = planned(config, Node("two", 32, 2), Node("four", 32, 4)).group("target-0").bundles
    assert (bundle.process, bundle.node, bundle.cpus, bundle.gpus) == ("target-0/0", "four", 8, 4)
    with pytest.raises(PlacementError, match=r"needs 8 CPUs and 4 GPUs, .* no node has enough of it in one piece"):
        planned(config, Node("two", 32, 2), Node("three", 32, 3))


def test_a_group_larger_than_any_node_is_packed_on_few() -> None:
    plan = planned(with_target(tensor_parallel=6), Node("a", 16, 2), Node("b", 16, 4), Node("c", 16, 2))
    assert plan.group("target-0").strategy is Strategy.PACK
    assert Counter(nodes_of(plan, "target-0")).most_common(1) == [("b", 4)]
    assert len(set(nodes_of(plan, "target-0"))) == 2


def test_replicas_have_a_group_each() -> None:
    plan = planned(with_target(tensor_parallel=2, replicas=3), Node("a", 32, 4), Node("b", 32, 2))
    assert sorted(group.name for group in plan.groups if group.name.startswith("target")) == [
        "target-0",
        "target-1",
        "target-2",
    ]
    assert nodes_of(plan, "target-0") == ["b", "b"]
    assert nodes_of(plan, "target-1") == nodes_of(plan, "target-2") == ["a", "a"]


def test_drafters_are_spread_over_gpus_of_their_own() -> None:
    pool = (drafter("a", gpus=1, cpus=1), drafter("b", replicas=2, gpus=1, cpus=1))
    config = with_target(tensor_parallel=2).model_copy(update={"drafters": pool})
    plan = planned(config, Node("x", 16, 3), Node("y", 16, 2), Node("z", 16, 2))
    assert plan.group("drafter-b").strategy is Strategy.SPREAD
    assert nodes_of(plan, "target-0") == ["y", "y"]
    assert nodes_of(plan, "drafter-a") == ["x"]
    assert sorted(nodes_of(plan, "drafter-b")) == ["x", "z"]
    assert plan.group("drafter-a").strategy is Strategy.PACK


def test_half_a_gpu_here_and_half_a_gpu_there_hold_no_process() -> None:
    config = Config(target=TargetConfig(device="cpu"), drafters=(drafter("a", replicas=3, gpus=0.6, cpus=0.1),))
    with pytest.raises(PlacementError, match=r"scattered") as caught:
        planned(config, Node("x", 8, 2))
    assert "drafter-a/2 cannot be placed: it needs 0.1 CPUs and 0.6 GPUs, free are x" in str(caught.value)
    assert len(planned(config, Node("x", 8, 3)).group("drafter-a").bundles) == 3


def test_shared_gpus_are_filled_before_whole_ones_are_broken() -> None:
    config = Config(
        target=TargetConfig(device="cpu"),
        drafters=(drafter("half", replicas=2, gpus=0.5, cpus=0.1), drafter("whole", gpus=1, cpus=0.1)),
    )
    assert len(planned(config, Node("x", 8, 2)).groups) == 3


def test_what_is_missing_is_named() -> None:
    with pytest.raises(PlacementError, match=r"target-0 cannot be placed: it needs 4 times 1 CPUs and 1 GPUs") as caught:
        planned(with_target(device="cuda", tensor_parallel=4), Node("a", 8, 1), Node("b", 8, 2))
    assert "a 8 CPUs and 1 GPUs, b 8 CPUs and 2 GPUs; 1 GPUs are missing" in str(caught.value)
    with pytest.raises(PlacementError, match=r"no node is labelled \{'pool': 'x'\}"):
        planned(with_target(device="cuda", resources=Resources(node_labels={"pool": "x"})), Node("a", 8, 1))
    with pytest.raises(PlacementError, match=r"free are a 2 CPUs and 0 GPUs; 3\.5 CPUs are missing"):
        planned(with_target(replicas=3, resources=Resources(cpus=5.5)), Node("a", 2))


def test_an_unresolved_configuration_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="resolve first"):
        place(Config(), Inventory((Node("a", 2),)))


NODES = st.lists(st.tuples(st.integers(1, 32), st.integers(0, 8)), min_size=1, max_size=5)
SHARES = st.sampled_from([0.0, 0.25, 0.3333, 0.5, 1.0, 2.0])


@settings(deadline=None)  # a noisy machine is no failure
@given(
    nodes=NODES,
    ranks=st.integers(1, 8),
    replicas=st.integers(1, 3),
    pool=st.lists(st.tuples(st.integers(1, 3), SHARES, st.floats(0.1, 4)), max_size=5),
)
def test_no_machine_is_promised_twice(
    nodes: list[tuple[int, int]], ranks: int, replicas: int, pool: list[tuple[int, float, float]]
) -> None:
    drafters = tuple(drafter(f"d{i}", num, gpus=gpus, cpus=cpus) for i, (num, gpus, cpus) in enumerate(pool))
    config = with_target(ranks, replicas=replicas).model_copy(update={"drafters": drafters})
    inventory = Inventory(tuple(Node(f"n{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)))
    resolved = resolve(config, inventory)
    try:
        plan = place(resolved, inventory)
    except PlacementError:
        return
    bundles = [bundle for group in plan.groups for bundle in group.bundles]
    for node in inventory.nodes:
        here = [bundle for bundle in bundles if bundle.node == node.name]
        assert sum(bundle.cpus for bundle in here) <= node.num_cpus + 1e-6
        assert sum(bundle.gpus for bundle in here) <= node.num_gpus + 1e-6
    processes = [bundle.process for bundle in bundles]
    assert len(set(processes)) == len(processes) == ranks * replicas + sum(num for num, _, _ in pool)
    for group in plan.groups:
        if group.strategy is Strategy.STRICT_PACK:
            assert len({bundle.node for bundle in group.bundles}) == 1


def test_every_example_has_machines_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(MACHINES)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_an_example_loads_and_can_be_placed(name: str) -> None:
    inventory = MACHINES[name]
    config = resolve(load(EXAMPLES / f"{name}.yaml"), inventory)
    plan = place(config, inventory)
    assert len(plan.groups) == config.target.replicas + len(config.drafters)
    labels = {node.name: node.labels for node in inventory.nodes}
    for group in plan.groups:
        for bundle in group.bundles:
            assert bundle.node_labels.items() <= labels[bundle.node].items()
    for replica in range(config.target.replicas):
        assert plan.group(f"target-{replica}").strategy is Strategy.STRICT_PACK


@pytest.mark.parametrize(
    ("name", "num", "limit_mb"),
    [("laptop", 2, 30), ("one-node-8gpu", 1, 450), ("multi-node", 1, 450), ("vllm-4gpu", 1, 450)],
)
def test_what_an_example_remembers_of_answers_stays_within_what_it_says(name: str, num: int, limit_mb: float) -> None:
    memories = [
        options.max_shared_tokens
        for drafter in load(EXAMPLES / f"{name}.yaml").drafters
        for options in parts_of(drafter.options)
        if isinstance(options, SuffixOptions)
    ]
    assert len(memories) == num
    assert 450 * max(memories) <= limit_mb * 1e6  # bytes a token, which test_drafters_lookup.py measures


def test_the_laptop_example_is_the_default_written_out() -> None:
    """Its pool stands there as a comment, for what is shipped takes part in it only where nobody wrote one."""
    config = load(EXAMPLES / "laptop.yaml")
    assert config == Config()
    assert "drafters" not in config.model_fields_set
    lines = (EXAMPLES / "laptop.yaml").read_text().splitlines()
    start = lines.index("# drafters:")
    written_out = list(itertools.takewhile(lambda line: line.startswith("#"), lines[start:]))
    assert parse("\n".join(line[2:] for line in written_out), Config, "laptop.yaml") == Config()
