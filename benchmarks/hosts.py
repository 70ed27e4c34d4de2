"""Hosts on one machine: network namespaces with addresses of their own on a bridge, and Ray started on each of them.

Each host has a monotonic clock of its own; the kernel cannot give it a wall clock, so that only Python code sees another one
(`WallClock`). Each has a second interface, which holds the default route and, on every host, the same address: whoever
advertises that address instead of the one that Ray was given calls itself. Needs root and Linux. What a killed process left
is removed by the next one.
"""

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

from benchmarks.disturbed import FaultBenchFailed
from benchmarks.interposer import WallClock
from benchmarks.link_forwarder import Impairment, forwarded
from benchmarks.server import JoinedServer
from cluster.config import Config
from deploy.local_ray import OBJECT_STORE_BYTES

PREFIX = "orh"  # of namespaces and interfaces, whose names have at most 15 characters
ELSEWHERE = "192.0.2.10"  # of the second interface of every host
HEAD_PORT = 6379
UP_S = 4000  # for how much longer each host seems to be up than the one before
JOIN_S, END_S = 90.0, 20.0
_OWNER = "of process "
# A host that is gone is found dead sooner than by default, and one that was cut off for ten seconds is not: TCP tries again
# only up to ten seconds after that.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "6",
    "RAY_health_check_timeout_ms": "4000",
}


def why_not() -> str | None:
    """What prevents hosts here; None: nothing does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None or shutil.which("bridge") is None:
        return "the programs ip and bridge (Debian: iproute2) are missing"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else None


class Host:
    """A machine of the network. ``environment``: of the processes that are started on it."""

    def __init__(self, network: "Hosts", number: int) -> None:
        self.number = number
        self.address = f"{network.prefix}.{number + 1}"
        self.folder = network.folder / str(number)  # which its processes find at ``network.temporary``
        self.namespace = f"{network.name}-{number}"
        self.clock = WallClock(network.folder / f"clock-{number}")
        temporary = {"TMPDIR": str(network.temporary), "RAY_TMPDIR": str(network.temporary)}
        self.environment = network.environment | temporary | self.clock.environment
        self._port = f"{network.name}p{number}"  # of the bridge
        self._network = network
        self._ray: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process
        self._outer: subprocess.Popen[str]

    def add(self) -> None:
        """Plugs a new machine in at the address, with nothing of a former one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("link", "set", self._port, "master", self._network.name, "arp", "off", "up")
        for words in (
            "link set lo up",
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
            "link add eth1 type veth peer name nobody",
            "link set nobody up",
            f"address add {ELSEWHERE}/24 dev eth1",
            "link set eth1 up",
            "route add default dev eth1",
        ):
            _ip("-n", self.namespace, *words.split())
        self._init = self._start_init()

    def _start_init(self) -> psutil.Process:
        """The first process of the host, with whose end the kernel ends all others."""
        script = 'mount --bind "$0" "$1" && echo up && exec sleep infinity'
        words = ["ip", "netns", "exec", self.namespace, "unshare", "--mount-proc", "--pid", "--fork", "--kill-child"]
        words += _times("--time", f"--monotonic={self.number * UP_S}", f"--boottime={self.number * UP_S}")
        words += ["sh", "-c", script, str(self.folder), str(self._network.temporary)]
        with (self.folder / "init.log").open("ab") as log:
            outer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        assert outer.stdout is not None
        with outer.stdout as said:
            is_up = said.readline() == "up\n"
        if not is_up:
            raise FaultBenchFailed(f"{self.namespace} did not start: {(self.folder / 'init.log').read_text()}")
        self._outer = outer
        return psutil.Process(outer.pid).children()[0]

    def command(self, *words: str) -> list[str]:
        """That runs words on this host, as a child of another process."""
        return ["nsenter", f"--target={self._init.pid}", "--net", "--pid", "--mount", *_times("--time"), *words]

    def processes(self) -> list[psutil.Process]:
        return _processes(self.namespace)

    def start_ray(self, *words: str, environment: Mapping[str, str] = {}) -> None:
        """``ray start``, as a KubeRay pod does it: ``--block``, in the foreground. ``words``: further ones."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={self.address}"]
        ray += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats", *words]
        with (self.folder / "ray.log").open("ab") as log:
            self._ray = subprocess.Popen(
                self.command(*ray), env={**self.environment, **environment}, stdout=log, stderr=log, process_group=0
            )

    def start_head(self, *words: str, environment: Mapping[str, str] = {}) -> None:
        fixed = (
            "--head",
            f"--port={HEAD_PORT}",
            "--include-dashboard=false",
            f"--temp-dir={self._network.temporary / 'ray'}",
        )
        self.start_ray(*fixed, *words, environment=environment)

    def join(self, head: "Host", *words: str) -> None:
        self.start_ray(f"--address={head.address}:{HEAD_PORT}", *words)

    def drain(self, head: "Host", deadline_s: float) -> None:
        """Asks Ray as KubeRay's autoscaler does it. The machine runs on."""
        words = (sys.executable, "-c", _DRAIN, f"{head.address}:{HEAD_PORT}", self.address, str(deadline_s))
        _run(*head.command(*words), environment=head.environment)

    def wait_ray_ended(self) -> None:
        """Raises subprocess.TimeoutExpired: `ray start` runs on, JOIN_S later."""
        assert self._ray is not None
        self._ray.wait(JOIN_S)

    # ---- faults

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing passes to or from this host, and nobody is told."""
        _run("bridge", "link", "set", "dev", self._port, "state", "0")
        try:
            yield
        finally:
            _run("bridge", "link", "set", "dev", self._port, "state", "3")

    @contextmanager
    def impaired(self, how: Impairment) -> Iterator[None]:
        """Its frames pass a forwarder. ``deaf``: it hears nothing, but is heard."""
        near, far = f"{self._network.name}a{self.number}", f"{self._network.name}b{self.number}"
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        try:
            _ip("link", "set", near, "arp", "off", "up")
            _ip("link", "set", far, "master", self._network.name, "arp", "off", "up")
            _ip("link", "set", self._port, "nomaster")
            with forwarded(self._port, near, how):
                yield
        finally:
            _ip("link", "del", near)
            if self.namespace in _namespaces():
                _ip("link", "set", self._port, "master", self._network.name)

    def remove(self) -> None:
        """As by a power cut: nobody hears from it again."""
        if self.namespace not in _namespaces():
            return
        _ip("link", "del", self._port)
        self._init.kill()
        for started in (self._outer, self._ray):
            if started is not None:
                started.wait(END_S)
        _ip("netns", "del", self.namespace)


class Hosts:
    """A context manager: hosts that ``add`` gave, on a bridge at which this process has an address, too."""

    def __init__(self, environment: Mapping[str, str] = {}) -> None:
        self.name = self.prefix = ""
        self.folder = self.temporary = Path()
        self.hosts: list[Host] = []
        self.environment = dict(environment)

    def __enter__(self) -> Self:
        with Path("/tmp", f"{PREFIX}.lock").open("w") as lock:  # of several that start at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_stale()
            self._make_bridge()
            self.folder = Path("/tmp", self.name)  # sockets need a short path
            shutil.rmtree(self.folder, ignore_errors=True)
        self.temporary = self.folder / "t"
        self.temporary.mkdir(parents=True)
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        ray = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_kill_worker_timeout_milliseconds": "500",
            "OMP_NUM_THREADS": "1",
        }
        others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # of other clusters
        self.environment = others | ray | HEALTH | self.environment
        return self

    def _make_bridge(self) -> None:
        for number in range(1, 255):
            self.name = f"{PREFIX}{number}"
            if not subprocess.run(["ip", "link", "add", self.name, "type", "bridge"], capture_output=True).returncode:
                break
        else:
            raise FaultBenchFailed("no name is free for a bridge")
        _ip("link", "set", self.name, "alias", f"{_OWNER}{os.getpid()}")
        self.prefix = f"10.213.{number}"
        # Else the lowest of its ports' addresses, which changes with them: hosts would lose this process for seconds.
        _ip("link", "set", self.name, "address", f"02:00:00:00:fe:{number:02x}")
        _ip("address", "add", f"{self.own_address}/24", "dev", self.name)
        _ip("link", "set", self.name, "up")

    @property
    def own_address(self) -> str:
        """At which hosts reach this process."""
        return f"{self.prefix}.254"

    def add(self) -> Host:
        host = Host(self, len(self.hosts))
        self.hosts.append(host)
        host.add()
        return host

    def wait_joined(self, head: Host, num_hosts: int) -> None:
        """Raises FaultBenchFailed: so many were not alive within JOIN_S."""
        words = (sys.executable, "-c", _WAIT_ALIVE, f"{head.address}:{HEAD_PORT}", str(num_hosts), str(JOIN_S))
        waited = subprocess.run(head.command(*words), env=head.environment, capture_output=True, text=True)
        if waited.returncode:
            logs = "\n".join(log.read_text()[-600:] for log in self.folder.glob("*/ray.log"))
            raise FaultBenchFailed(f"{waited.stderr[-600:]}\n{logs}")

    def __exit__(self, *_: object) -> None:
        try:
            for host in self.hosts:
                host.remove()
        finally:
            _ip("link", "del", self.name)
            shutil.rmtree(self.folder, ignore_errors=True)


class HostedServer(JoinedServer):
    """`outrider serve` on a host, which joins the Ray cluster there. ``entry``: the host that its clients enter at."""

    def __init__(self, config: Config, host: Host, entry: Host) -> None:
        super().__init__(config, host.environment)
        self._host, self._entry, self._words_of_host = host, entry, tuple(self._command)
        self.enter_at(entry)

    def of(self, config: Config) -> "HostedServer":
        """Another one at the same hosts."""
        return HostedServer(config, self._host, self._entry)

    def start(self) -> None:
        """Also once more, after the machine is lost."""
        if self._process is not None:
            self.wait_end()
        self._words.clear()
        self._command = self._host.command(*self._words_of_host)
        super().start()

    def signal(self, number: signal.Signals = signal.SIGINT) -> None:
        """To the server itself, the child of what entered the host."""
        for process in psutil.Process(self.pid).children():
            process.send_signal(number)

    def enter_at(self, host: Host) -> None:
        self.url = f"http://{host.address}:{self.config.api.port}"


_WAIT_ALIVE = """
import sys, time
from ray._raylet import GcsClient
address, num, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end_s, found, error = time.monotonic() + timeout_s, 0, None
while found != num:
    if time.monotonic() > end_s:
        sys.exit(f"{found} hosts of {num} are alive: {error}")
    try:
        found = sum(node.state == 0 for node in GcsClient(address=address).get_all_node_info(timeout=5).values())
    except Exception as failed:  # the head is on its way
        error = failed
    time.sleep(0.1)
"""


_DRAIN = """
import sys, time
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
gcs, host, deadline_s = GcsClient(address=sys.argv[1]), sys.argv[2], float(sys.argv[3])
nodes = gcs.get_all_node_info(timeout=5).values()
(node,) = [one for one in nodes if one.node_manager_address == host and one.state == 0]
reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
accepted, why = gcs.drain_node(node.node_id.hex(), reason, "it leaves", int((time.time() + deadline_s) * 1e3))
sys.exit(0 if accepted else why)
"""


def _times(*words: str) -> list[str]:
    """Nothing where the kernel has no namespaces of time."""
    return list(words) if Path("/proc/self/ns/time").exists() else []


def _remove_stale() -> None:
    """Networks of processes that are gone."""
    links = json.loads(_ip("-json", "link", "show", "type", "bridge") or "[]")
    for link in links:
        pid = link.get("ifalias", "").removeprefix(_OWNER)
        if link["ifname"].startswith(PREFIX) and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            for namespace in _namespaces():
                if namespace.startswith(f"{link['ifname']}-"):
                    _end(_processes(namespace))
                    _ip("netns", "del", namespace)
            _ip("link", "del", link["ifname"])
            shutil.rmtree(Path("/tmp", link["ifname"]), ignore_errors=True)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line]


def _processes(namespace: str) -> list[psutil.Process]:
    found = []
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def _end(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """What it wrote. Raises FaultBenchFailed."""
    run = subprocess.run(words, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise FaultBenchFailed(f"{' '.join(words)}: {run.stderr.strip()}")
    return run.stdout
