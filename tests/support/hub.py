"""A Hugging Face hub on loopback, of folders on disk: listings, metadata, redirects to storage, ranges, and its faults."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from tests.support.waiting import DEADLINE_S

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")
TOKEN = "hf_of_a_test"
HOSTS = "127.0.0.1,localhost"


@dataclass
class TestHub:
    """What the server has. ``asked`` counts requests by kind: api, head, file, range; and bytes that storage sent."""

    __test__ = False

    repos: dict[str, Path]
    gated: frozenset[str] = frozenset()  # listed and sent only with TOKEN
    cut_after: int | None = None  # bytes after which the first transfer of each longer file breaks
    pause_after: int | None = None  # bytes after which transfers of longer files wait for ``goes_on``
    goes_on: threading.Event = field(default_factory=threading.Event)
    asked: Counter[str] = field(default_factory=Counter)
    cut: set[str] = field(default_factory=set)
    url: str = ""
    is_down: bool = False

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repo.encode()).hexdigest()

    @property
    def storage_url(self) -> str:
        """Of another host, as that of large files is."""
        return self.url.replace("127.0.0.1", "localhost") + "/storage"

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """For a process that uses this hub and ``cache`` alone."""
        named = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return {**named, "NO_PROXY": HOSTS, "no_proxy": HOSTS, **more}


@contextmanager
def running_hub(repos: Mapping[str, Path], **options: object) -> Iterator[TestHub]:
    hub = TestHub(dict(repos), **options)  # type: ignore[arg-type]
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: TestHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test's output clean."""

    def _answer(self, *, body: bool) -> None:
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        if self.hub.is_down:
            self._send(503, b"{}", {})
        elif parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[0] == "storage":
            self._storage("/".join(parts[1:3]), "/".join(parts[3:]))
        else:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body=body)

    def _refused(self, repo: str) -> bool:
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in self.hub.repos:  # as the hub answers, to hide what is private
            self._send(404 if has_token else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repo in self.hub.gated and not has_token:
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        else:
            return False
        return True

    def _wrong_revision(self, repo: str, revision: str) -> bool:
        if revision in ("main", self.hub.commit(repo)):
            return False
        self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        return True

    def _api(self, repo: str, rest: list[str]) -> None:
        self.hub.asked["api"] += 1
        if self._refused(repo) or (len(rest) > 1 and self._wrong_revision(repo, rest[1])):
            return
        files = dict(_files(self.hub.repos[repo]))
        answer: object = {"id": repo, "sha": self.hub.commit(repo), "siblings": [{"rfilename": name} for name in files]}
        if rest and rest[0] == "tree":
            answer = [_entry(name, path) for name, path in files.items()]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, revision: str, name: str, *, body: bool) -> None:
        self.hub.asked["file" if body else "head"] += 1
        if self._refused(repo) or self._wrong_revision(repo, revision):
            return
        path = self.hub.repos[repo] / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        common = {"X-Repo-Commit": self.hub.commit(repo), "ETag": f'"{_etag(path)}"'}
        if path.suffix in LFS_SUFFIXES:
            linked = {"X-Linked-Etag": common["ETag"], "X-Linked-Size": str(path.stat().st_size)}
            self._send(302, b"", {**common, **linked, "Location": f"{self.hub.storage_url}/{repo}/{name}"})
        else:
            self._send(200, path.read_bytes() if body else path.stat().st_size, common)

    def _storage(self, repo: str, name: str) -> None:
        content = (self.hub.repos[repo] / name).read_bytes()
        status, headers, start, total = 200, {}, 0, len(content)
        if (asked := self.headers.get("Range")) is not None:
            self.hub.asked["range"] += 1
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, content = int(first), content[: int(last or total) + 1]
            status, headers = 206, {"Content-Range": f"bytes {start}-{len(content) - 1}/{total}"}
        part = content[start:]
        self.hub.asked["bytes"] += len(part)
        if self.hub.cut_after is not None and len(part) > self.hub.cut_after and name not in self.hub.cut:
            self.hub.cut.add(name)
            self.send_response(200)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: self.hub.cut_after])
            self.close_connection = True
            return
        if (pause := self.hub.pause_after) is not None and len(part) > pause:
            self._send(status, part[:pause], headers, num_bytes=len(part))
            self.wfile.flush()
            self.hub.goes_on.wait(DEADLINE_S)
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(part[pause:])
            return
        self._send(status, part, headers)

    def _send(self, status: int, body: bytes | int, headers: Mapping[str, str], num_bytes: int | None = None) -> None:
        """``body``: or its length, for HEAD. ``num_bytes``: of a body of which more follows."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(num_bytes or (body if isinstance(body, int) else len(body))))
        self.end_headers()
        if isinstance(body, bytes) and self.command == "GET":
            self.wfile.write(body)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry(name: str, path: Path) -> dict[str, object]:
    size = path.stat().st_size
    entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": _etag(path)[:40]}
    if path.suffix in LFS_SUFFIXES:
        entry["lfs"] = {"oid": _etag(path), "size": size, "pointerSize": 130}
    return entry
