"""Servers of tests, of real processes and of this one."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from pydantic import JsonValue

from benchmarks.embedded import EmbeddedCluster
from benchmarks.server import ServerProcess
from cluster.config import Config
from cluster.state import open_store
from deploy.api.app import create_app
from deploy.api.settings import ApiSettings
from deploy.api.tokenizer import Tokenizer
from engine.dtypes import resolve_dtypes
from engine.loading import PREFIX
from engine.models.prepare import ensure_model
from tests.support.api import listening

_known_costs: dict[str, JsonValue] = {}


@contextmanager
def served(config: Config, environment: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """As ``ServerProcess``. What a pass costs is measured by the first server of its kind, and known to those after it."""
    with closing(open_store(config.cluster.state, config.cluster.namespace)) as store:
        for key, value in _known_costs.items():
            store.put(key, value)
        with ServerProcess(config, environment) as server:
            for key in store.keys(f"{PREFIX}/"):
                if (document := store.get(key)) is not None:
                    _known_costs[key] = document.value
            yield server


@contextmanager
def served_without_ray(config: Config) -> Iterator[str]:
    """The address of the API over a configuration's target and drafters, all in this process."""
    with EmbeddedCluster.of(resolve_dtypes(config)) as cluster:
        app = create_app(cluster.client, Tokenizer.from_folder(ensure_model(config.model.name)), ApiSettings())
        with listening(app) as url:
            yield url
