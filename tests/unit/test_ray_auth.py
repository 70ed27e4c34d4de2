"""Whether a Ray cluster that is joined asks for a token."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from deploy.deployment import ALIVE, asks_for_token
from deploy.local_ray import LaunchError, free_port

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray Serve's import


@pytest.mark.parametrize(
    ("answer", "asks"), [(None, False), (grpc.StatusCode.UNAUTHENTICATED, True), (grpc.StatusCode.INTERNAL, None)]
)
def test_a_call_without_a_token_shows_it(answer: grpc.StatusCode | None, asks: bool | None) -> None:
    def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
        if answer is not None:
            context.abort(answer, "no")
        return b""

    server = grpc.server(ThreadPoolExecutor(1))
    _, service, method = ALIVE.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        if asks is None:
            with pytest.raises(LaunchError, match="does not answer"):
                asks_for_token(f"127.0.0.1:{port}")
        else:
            assert asks_for_token(f"127.0.0.1:{port}") is asks
    finally:
        server.stop(None)


def test_a_port_that_wants_a_certificate_asks_for_more_than_a_token() -> None:
    """A plain connection is not answered."""
    assert asks_for_token(f"127.0.0.1:{free_port()}")
