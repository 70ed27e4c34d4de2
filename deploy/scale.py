"""``outrider scale``: another number of replicas for a deployment on a Ray cluster."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.ray_pool import SUPERVISOR
from cluster.config import Config
from cluster.errors import InvalidField, OutriderError
from deploy.local_ray import LaunchError
from router.scaling.report import FleetSize

ANSWER_S = 10.0


def parse_drafters(texts: Sequence[str]) -> dict[str, int]:
    """``NAME=NUMBER`` each. Raises InvalidField."""
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not (name and number.isdecimal()):
            raise InvalidField("drafter", text, "must be NAME=NUMBER, such as ngram=2")
        found[name] = int(number)
    return found


def scale(config: Config, num_targets: int, num_drafters: Mapping[str, int]) -> FleetSize:
    """What the running deployment will have, within the bounds of its own configuration. Returns before it is reached.

    Raises LaunchError: there is no such deployment; InvalidField: the deployment's own file does not allow it.
    """
    namespace, address = config.cluster.namespace, config.cluster.ray_address
    if address is None:
        raise LaunchError("cluster.ray_address must name the Ray cluster of the deployment: others cannot be reached")
    try:
        ray.init(address=address, namespace=namespace, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise LaunchError(f"no Ray cluster answers at {address} (cluster.ray_address): {error}") from error
    try:
        supervisor: Any = ray.get_actor(SUPERVISOR)
        size: FleetSize = ray.get(supervisor.scale.remote(FleetSize(num_targets, num_drafters)), timeout=ANSWER_S)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, OutriderError) else error) from None
    except (ValueError, RayActorError, GetTimeoutError) as error:
        raise LaunchError(f"no deployment answers in the namespace {namespace}: {error}") from error
    finally:
        ray.shutdown()
    return size
