"""The configuration of HAProxy: `rewrite` changes what Ray Serve 2.60 generates.

- Statistics listen at unix sockets of the cluster's own, not at ports that another program may hold.
- HAProxy's admin socket is one of the wrapper's (`deploy/haproxy_wrapper.py`), which answers at Serve's.
- A connection whose replica's host does not answer is closed after LOST_S: Serve sets no limit, and a host that loses its
  power says nothing, so that its streams would never end. A replica that is busy or hangs is not meant:
  its kernel answers; one that reads nothing of a long body for so long is lost, too.
- Splicing is off. With `option splice-request` HAProxy 2.8 misses a client's disconnect, and spins, if the request's body
  arrived in a segment of its own.
- Headers and the first 16 KiB of a body must arrive in time before a replica sees the request.
- Every error has OpenAI's shape, and every response one `x-request-id`: the client's if it is valid, else a new one.
- Headers and paths that control Ray Serve are blocked.

Clients reach a TCP frontend, whose filter (`haproxy.lua`) replaces the error pages of HAProxy's HTTP parser.
The wrapper imports this module with the standard library alone.
"""

import json
import re
from pathlib import Path

LUA = Path(__file__).with_name("haproxy.lua")
HEADER_TIMEOUT_S = 10
LOST_S = 12
# Connections beside the clients': statistics and management.
SPARE_CONNECTIONS = 100
MAX_CLIENTS = 10_000

# status: message, type, code. For HAProxy's own errors, and instead of plain text from Serve or uvicorn.
ERRORS = {
    400: ("the request is not valid HTTP/1.1", "invalid_request_error", "bad_request"),
    404: ("there is nothing at this URL", "invalid_request_error", "unknown_url"),
    405: ("the method is not allowed", "invalid_request_error", "method_not_allowed"),
    408: (f"the request was not complete within {HEADER_TIMEOUT_S} seconds", "invalid_request_error", "timeout"),
    429: ("too many requests; try again later", "rate_limit_error", "overloaded"),
    500: ("the server failed", "server_error", "internal_error"),
    502: ("the server ended while it answered", "server_error", "internal_error"),
    503: ("the server is not ready; try again later", "service_unavailable_error", "no_replica"),
    504: ("the server did not answer in time", "timeout_error", "timeout"),
}
OWN_ERRORS = (400, 408, 500, 502, 503, 504)
VALID_REQUEST_ID = "^[A-Za-z0-9._:-]{1,128}$"


class UnknownTemplate(ValueError):
    """The configuration is of another version of Ray Serve: it lacks an expected line."""


def clients_for(num_files: int) -> int:
    """The limit on clients for ``num_files`` open files: each client takes four."""
    return max(1, min(MAX_CLIENTS, num_files // 4 - SPARE_CONNECTIONS))


def maxconn_for(num_clients: int) -> int:
    """HAProxy's global ``maxconn``: each client counts in the TCP and in the HTTP frontend."""
    return 2 * num_clients + SPARE_CONNECTIONS


def rewrite(config: str, folder: Path, max_files: int | None = None) -> str:
    """The rewritten configuration.

    Args:
        folder: for the sockets of the statistics and between the frontends.
        max_files: limit of open files, beyond which HAProxy would not start; None: there is none.
    """
    config = move_statistics(config, folder)
    admin = admin_socket(config)
    config = config.replace(f"    stats socket {admin} ", f"    stats socket {inner_admin(admin)} ")
    config = re.sub(r"(?m)^    (option splice-\w+|errorfile .*)\n", "", config)
    asked = _find(r"(?m)^    maxconn (\d+)$", config)
    maxconn = int(asked[1])
    if max_files is not None:
        maxconn = min(maxconn, maxconn_for(clients_for(max_files)))
        config = config.replace(asked[0], f"    maxconn {maxconn}", 1)
    config = _insert_after(r"(?m)^global$", config, [f"lua-load-per-thread {LUA}"])
    # Wait for the headers and the start of the body, so that no replica does.
    waiting = [f"timeout http-request {HEADER_TIMEOUT_S}s", "option http-buffer-request"]
    idle_s = LOST_S // 2  # then three probes
    alive = ["option srvtcpka", f"srvtcpka-idle {idle_s}s", f"srvtcpka-intvl {idle_s // 3}s", "srvtcpka-cnt 3"]
    alive.append(f"default-server tcp-ut {LOST_S}s")  # of what was sent
    errors = [f"http-error {_reply(status)}" for status in OWN_ERRORS]
    config = _insert_after(r"(?m)^defaults\n    mode http$", config, waiting + alive + errors)
    public = _find(r"(?m)^frontend http_frontend\n    bind (\S+)$", config)
    http_socket = f"unix@{folder / 'http.sock'}"
    rules = [f"bind {http_socket} accept-proxy proto h1 mode 600", *_rules()]
    config = config.replace(public[0], _section("frontend http_frontend", rules))
    default = _find(r"(?m)^backend default_backend\n    http-request return .*$", config)[0]
    config = config.replace(default, _section("backend default_backend", [f"http-request return {_reply(503)}"]))
    num_clients = max(1, (maxconn - SPARE_CONNECTIONS) // 2)
    clients = [f"bind {public[1]}", f"maxconn {num_clients}", "filter lua.json_errors", "default_backend http_socket"]
    added = [
        _section("defaults", ["mode tcp", "timeout connect 5s", "timeout client 1h", "timeout server 1h"]),
        _section("frontend clients", clients),
        _section("backend http_socket", [f"server http_frontend {http_socket} send-proxy-v2"]),
    ]
    return config + "\n".join([*added, ""])


def admin_socket(config: str) -> Path:
    """HAProxy's, as Serve knows it."""
    return Path(_find(r"(?m)^    stats socket (\S+) ", config)[1])


def inner_admin(admin: Path) -> Path:
    """HAProxy's own admin socket, beside the one that Serve knows. The names are of one length, which is limited."""
    return admin.with_name("inner.sock")


def move_statistics(config: str, folder: Path) -> str:
    """Binds the frontends of statistics to unix sockets instead of ports."""
    for section in ("frontend prometheus", "listen stats"):
        found = _find(rf"(?m)^({section}\n *bind )\S+$", config)
        config = config.replace(found[0], f"{found[1]}unix@{folder / section.split()[1]}.sock mode 600")
    return config


def _rules() -> list[str]:
    """Rules of the HTTP frontend, before Serve's own."""
    new_id = "set-var-fmt(txn.request_id) req_%[uuid] if !{ var(txn.request_id) -m found }"
    foreign = "{ status ge 400 } !{ res.hdr(content-type) -m beg application/json }"
    unnamed = " ".join(f"!{{ status {status} }}" for status in ERRORS)
    return [
        "http-request set-var(txn.request_id) req.fhdr(x-request-id) "
        f"if {{ req.fhdr_cnt(x-request-id) eq 1 }} {{ req.fhdr(x-request-id) -m reg {VALID_REQUEST_ID} }}",
        f"http-request {new_id}",
        "http-request set-header x-request-id %[var(txn.request_id)]",
        f"http-after-response {new_id}",  # for responses to requests that no rule has seen
        "http-after-response set-header x-request-id %[var(txn.request_id)]",
        # Serve's own headers, which would let a client disable cancellation or get answers in plain text.
        *(
            f"http-request del-header {name}"
            for name in ("x-request-disconnect-disabled", "x-request-timeout-seconds", "x-session-id", "upgrade")
        ),
        "http-request del-header ^serve[-_] -m reg",
        f"http-request return {_reply(400)} if !HTTP_1.0 !HTTP_1.1",
        f"http-request return {_reply(400)} if HTTP_1.1 !{{ req.fhdr_cnt(host) eq 1 }}",
        f"http-request return {_reply(405)} if METH_CONNECT",
        f"http-request return {_reply(404)} if !{{ path_beg / }}",
        f"http-request return {_reply(404)} if {{ path,url_dec -m beg -i /-/ }}",
        *(f"http-response return {_reply(status)} if {{ status {status} }} {foreign}" for status in ERRORS),
        f"http-response return {_reply(400)} if {{ status lt 500 }} {unnamed} {foreign}",
        f"http-response return {_reply(500)} if {{ status ge 500 }} {unnamed} {foreign}",
    ]


def _reply(status: int) -> str:
    message, kind, code = ERRORS[status]
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    retry = ' hdr retry-after "1"' if status in (429, 503) else ""
    return f"status {status} content-type application/json string '{body}'{retry}"


def _section(head: str, lines: list[str]) -> str:
    return "\n".join([head, *(f"    {line}" for line in lines)])


def _find(pattern: str, config: str) -> re.Match[str]:
    found = re.search(pattern, config)
    if found is None:
        raise UnknownTemplate(f"Ray Serve's HAProxy configuration has no line {pattern!r}: this needs Ray Serve 2.60")
    return found


def _insert_after(pattern: str, config: str, lines: list[str]) -> str:
    end = _find(pattern, config).end()
    return config[:end] + "".join(f"\n    {line}" for line in lines) + config[end:]
