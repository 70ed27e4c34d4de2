"""Where Ray's part places what it starts."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from actors import ray_groups, ray_pool
from actors.ray_pool import Deployment, RaySpawner
from actors.resizer import first_targets
from cluster.config import Config, TargetConfig


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("CREATED", "CREATED"), "target-0"),
        (("RESCHEDULING", "CREATED"), "target-1"),
        (("RESCHEDULING", "PENDING"), "target-0"),
    ],
)
async def test_the_router_is_placed_with_a_target_whose_node_is_there(
    states: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: dict[str, Any] = {
        f"target-{i}": SimpleNamespace(bundle_specs=[{"CPU": 1}], state=s) for i, s in enumerate(states)
    }
    monkeypatch.setattr(ray_groups, "placement_group_table", lambda group: {"state": group.state})
    monkeypatch.setattr(ray_pool, "PlacementGroupSchedulingStrategy", lambda group, **_: group)
    spawner = RaySpawner(Deployment(Config(target=TargetConfig(replicas=2)), groups, "/folder", "token"))
    made: list[dict[str, Any]] = []

    def options_of(**options: Any) -> SimpleNamespace:
        made.append(options)
        return SimpleNamespace(remote=lambda *args: MagicMock())

    def nobody(name: str) -> None:
        raise ValueError(name)

    kind = SimpleNamespace(options=options_of)
    monkeypatch.setattr(ray_pool, "ray", SimpleNamespace(get_actor=nobody, remote=lambda **_: lambda _: kind))
    await spawner.control("router")
    (options,) = made
    assert options["scheduling_strategy"] is groups[expected]
    assert options["num_cpus"] == 0


def test_groups_that_wait_for_room_are_found_by_a_new_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [
        {"name": "target-0", "state": "CREATED"},
        {"name": "target-1", "state": "PENDING"},
        {"name": "target-2", "state": "REMOVED"},
        {"name": "target-3", "state": "CREATED"},  # of another namespace
        {"name": "", "state": "CREATED"},
    ]

    def find(name: str) -> object:
        if name == "target-3":
            raise ValueError(name)
        return object()

    monkeypatch.setattr(ray_groups, "placement_group_table", lambda: dict(enumerate(table)))
    monkeypatch.setattr(ray_groups, "get_placement_group", find)
    monkeypatch.setattr(ray_pool, "named_actors", lambda: ["target-0", "supervisor"])
    spawner = RaySpawner(Deployment(Config(), {}, "/folder", "token"))
    assert spawner.running() == {"target-0": True, "target-1": False, "supervisor": True}
    config = TargetConfig(replicas=1, max_replicas=4)
    assert first_targets(config, spawner.running()) == ["target-0", "target-1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Serve's import
@pytest.mark.parametrize(
    ("level", "runtime_env"), [("avx2", {"env_vars": {"OUTRIDER_CPU": "avx2"}}), (None, None), ("", None)]
)
def test_the_cpu_level_reaches_the_actors_of_a_cluster_that_is_joined(
    level: str | None, runtime_env: dict[str, Any] | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy import deployment

    if level is None:
        monkeypatch.delenv("OUTRIDER_CPU", raising=False)
    else:
        monkeypatch.setenv("OUTRIDER_CPU", level)
    asked: list[dict[str, Any]] = []
    ray = SimpleNamespace(init=lambda **options: asked.append(options), get_runtime_context=MagicMock())
    monkeypatch.setattr(deployment, "ray", ray)
    monkeypatch.setattr(deployment, "asks_for_token", lambda _: True)
    config = Config()
    joined = config.model_copy(update={"cluster": config.cluster.model_copy(update={"ray_address": "10.0.0.1:6379"})})
    deployment.connect(joined, tmp_path)
    assert [options["runtime_env"] for options in asked] == [runtime_env]
