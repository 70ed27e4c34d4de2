"""What a process of Ray Serve does before it listens. `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `prepare`."""

from typing import Any

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica

from cluster.transport import bracketed
from deploy.api.middleware import drop_trailers


def prepare() -> list[Any]:
    """Drops trailers of requests, and binds the gRPC server of a replica to its node's address instead of all.

    Serve 2.60 starts that server in each replica, for calls between deployments, and unpickles what arrives; no option of
    Serve changes its address. Returns the middlewares that Serve asks for: none.
    """
    drop_trailers()
    assert hasattr(replica, "add_port_to_grpc_server"), "another version of Ray Serve: see what its replicas listen at"
    replica.add_port_to_grpc_server = _add_port_at_node
    return []


def _add_port_at_node(server: Any, address: str) -> int:
    return int(add_port_to_grpc_server(server, address.replace("[::]", bracketed(ray.util.get_node_ip_address()))))
