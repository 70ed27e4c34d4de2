"""One drafter in a process of its own, for vLLM servers that are not of a deployment (`drafters/vllm_plugin`)."""

from pathlib import Path
from urllib.parse import urlsplit

from actors.drafter import DrafterActor
from actors.processes import ProcessEnded
from actors.worker import set_threads
from cluster.config import Config, DrafterConfig
from cluster.errors import InvalidField, ModelUnavailable
from cluster.model_name import GGUF, HubName, public_name
from cluster.resolve import resolve
from cluster.transport.stream import read_secret
from cluster.types import ModelInfo
from deploy.console import shown_progress
from deploy.model_files import drafter_files
from deploy.stop import stoppable
from drafters.shipped import with_shipped
from drafters.speculator_search import shape_of
from engine.models.hub import fetch, local_folder
from engine.models.prepare import ensure_model
from engine.models.tokenizer import fingerprint
from profiler.hardware import here, num_cores

_POLL_S = 1.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1", None)


def serve_drafter(config: Config, name: str | None, address: str) -> None:
    """Serves a drafter of ``config.drafters`` for servers of ``config.model`` until SIGINT or SIGTERM; those with its secret
    connect to ``address``. For the main thread.

    Raises InvalidField: no such drafter, or it cannot run alone; other machines could connect without a secret.
    ModelUnavailable, IncompatibleTokenizer: as `drafters.registry.make_drafter`. ProcessEnded: it failed.
    """
    drafter = _chosen(config, name)
    if config.cluster.token_file is None and address.startswith("grpc://") and urlsplit(address).hostname not in _LOOPBACK:
        raise InvalidField("--listen", address, "other machines could connect: set cluster.token_file")
    token = "" if config.cluster.token_file is None else read_secret(config.cluster.token_file)
    with stoppable() as stop:
        set_threads(num_cores())  # before torch is imported
        target = _target(config.model.name)
        drafter = drafter.changed(options=drafter_files(drafter.options))
        alone = config.changed(drafters=(drafter,), target={"device": "cpu"})  # the GPUs are the drafter's
        resolved = resolve(alone, here()).drafters[0]
        threads = num_cores() if drafter.resources.threads == "auto" else drafter.resources.threads
        resolved = resolved.changed(resources={"threads": threads})
        actor = DrafterActor(resolved, drafter.name, target, (), token, tls=config.cluster.tls, listens=address)
        actor.start()
        stop.listen()
        print(f"Outrider drafts for {target.name} by {drafter.name} at {actor.address}", flush=True)
        try:
            while (reason := actor.wait_end(_POLL_S)) is None:
                stop.check()
        finally:
            actor.stop()
        raise ProcessEnded(f"the drafter ended: {reason}")


def _chosen(config: Config, name: str | None) -> DrafterConfig:
    drafters = {one.name: one for one in with_shipped(config).drafters}
    if name is None and len(drafters) == 1:
        (name,) = drafters
    if name not in drafters:
        raise InvalidField("--name", name, f"must be one of the drafters {', '.join(drafters)}")
    if drafters[name].options.traits.reads_hidden_states:
        raise InvalidField("--name", name, "reads hidden states, which vLLM's own server does not send")
    return drafters[name]


def _target(name: str) -> ModelInfo:
    """What a drafter asks of the model that it drafts for. Its weights are not read."""
    folder, on_hub = local_folder(name), HubName.parse(name)
    with shown_progress(name) as progress:
        if (folder or Path(name)).suffix == GGUF or (folder is None and (on_hub is None or on_hub.gguf is not None)):
            folder = ensure_model(name, progress)
        elif folder is None and on_hub is not None:
            folder = fetch(on_hub, progress, with_weights=False)
    assert folder is not None
    vocab_size = shape_of(folder).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelUnavailable(f"{Path(folder, 'config.json')} tells no vocab_size")
    return ModelInfo(public_name(name), vocab_size, 2**31 - 1, (), fingerprint(folder))
