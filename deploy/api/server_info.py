"""``/load`` and ``/server_info``, which vLLM's clients and routers ask."""

from collections.abc import Mapping
from dataclasses import asdict

from cluster.client import ClusterStatus
from cluster.types import ModelInfo
from deploy.api.settings import ApiSettings


def server_load(status: ClusterStatus, num_queued: int) -> Mapping[str, object]:
    """``num_queued``: calls that wait in this replica of the API."""
    at_targets = sum(target.num_running + target.num_waiting for target in status.targets)
    return {"server_load": at_targets + num_queued}


def server_info(version: str, info: ModelInfo, settings: ApiSettings) -> Mapping[str, object]:
    """What a client may want to know before it calls. It names no file of the server."""
    return {
        "version": version,
        "model": asdict(info) | {"adapters": [adapter.name for adapter in info.adapters]},
        "sampling_defaults": dict(settings.sampling_defaults),
        "max_n": settings.max_n,
        "max_sequences": settings.max_sequences,
        "max_request_bytes": settings.max_request_bytes,
        "request_timeout_s": settings.request_timeout_s,
        "tool_call_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser,
        "slo_classes": sorted(settings.slo.classes),
    }
