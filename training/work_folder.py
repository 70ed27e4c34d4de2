"""The work folder of training: which steps are done, with which settings, and how much time they took. It survives kills.
The folder of a drafter is replaced as a whole, and a model is known by the digest of its files."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from cluster.errors import InvalidField, ModelUnavailable
from drafters.shipped import kind_of
from engine.models.prepare import weights_file
from engine.models.weights import write_atomically

FILE = "manifest.json"
_FORMAT = 1
_SAVE_SPENT_S = 5.0  # between saves of the time spent: at most this much is lost in a kill
_FINISHED = "evaluation.json"  # in every finished drafter folder
# What determines tokens and logits besides the weights.
_TEXTS = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_NUM_SPOTS, _SPOT_BYTES = 16, 512  # of a tensor; one of up to twice as many bytes is read whole
_NUM_FILE_SPOTS = 1024


class WorkFolder:
    """``identity``: what its content depends on; ``writes``: in one process only. Raises InvalidField if that differs."""

    def __init__(self, path: Path, identity: Mapping[str, Any], writes: bool = True) -> None:
        self.path = path
        self._writes = writes
        path.mkdir(parents=True, exist_ok=True)
        self.identity = dict(identity)
        self._content = self._read()

    def begin(self, step: str, settings: Mapping[str, Any]) -> bool:
        """Returns whether the step can resume: it began before with the same settings. Of recorded options those that an
        older version had, and that were not given, do not count."""
        entry = self._content["steps"].get(step)
        same = entry is not None and _without_former(entry["settings"], settings) == dict(settings)
        if not same:
            self._content["steps"][step] = {"settings": dict(settings), "done": False, "spent_s": 0.0}
            self._write()
        return same

    def finish(self, step: str) -> None:
        self._content["steps"][step]["done"] = True
        self._write()

    def deadline(self, step: str, seconds: float | None) -> Callable[[], bool]:
        """Whether the time of a begun step is over, counted over all runs. A step that was done before gets no more."""
        if seconds is None:
            return lambda: False
        entry = self._content["steps"][step]
        saved_s = monotonic()
        began_s = saved_s - entry["spent_s"]
        end_s = began_s + (0.0 if entry["done"] else seconds)

        def is_over() -> bool:
            nonlocal saved_s
            now_s = monotonic()
            if now_s - saved_s >= _SAVE_SPENT_S or now_s >= end_s:
                entry["spent_s"], saved_s = now_s - began_s, now_s
                self._write()
            return now_s >= end_s

        return is_over

    def _read(self) -> dict[str, Any]:
        file = self.path / FILE
        if not file.exists():
            return {"format": _FORMAT, "identity": self.identity, "steps": {}}
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            known = content.get("identity", {})
        except (ValueError, AttributeError) as error:
            raise InvalidField("work", str(self.path), f"has a damaged {FILE} ({error}): choose another folder") from error
        missing = [key for key in self.identity if key not in known]
        if content.get("format") != _FORMAT or missing:
            reason = f"another version, which did not record its {', '.join(missing) or 'steps'}"
        elif differing := [key for key, value in self.identity.items() if known[key] != value]:
            reason = f"another {', '.join(differing)}"
        else:
            return content
        raise InvalidField("work", str(self.path), f"was begun with {reason}: choose another folder")

    def _write(self) -> None:
        if self._writes:
            text = json.dumps(self._content, indent=1) + "\n"
            write_atomically(self.path / FILE, lambda path: path.write_text(text, encoding="utf-8"))


def _without_former(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    known = settings.get("options", {})
    options = {key: value for key, value in recorded.get("options", {}).items() if key in known or value != "None"}
    return {**recorded, "options": options} if "options" in recorded else dict(recorded)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Locks a work folder for this process. Raises InvalidField if another run holds the lock."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidField("work", str(path), "is in use by another run: wait, or choose another folder") from None
        yield


def check_apart(out: Path, work: Path) -> None:
    """Raises InvalidField if one folder contains the other: ``out`` is replaced as a whole."""
    a, b = out.resolve(), work.resolve()
    if a.is_relative_to(b) or b.is_relative_to(a):
        raise InvalidField("out", str(out), f"must lie apart from the work folder {work}, as it is replaced as a whole")


def check_replaceable(out: Path) -> None:
    """Raises InvalidField if ``out`` is anything but absent, empty or a trained drafter."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise InvalidField("out", str(out), "must be a folder or not exist yet")
    content = list(out.iterdir())
    is_drafter = kind_of(out) is not None and (out / _FINISHED).is_file() and not any(path.is_dir() for path in content)
    if content and not is_drafter:
        raise InvalidField("out", str(out), "is not a trained drafter, so it is not replaced: name a new folder")


def replace_folder(part: Path, out: Path) -> None:
    """Renames ``part``, beside ``out``, to ``out``. The old folder is deleted last, so a kill loses neither."""
    check_replaceable(out)
    aside = out.with_name(f".{out.name}.old")
    if out.exists():
        shutil.rmtree(aside, ignore_errors=True)  # left by a killed run
        out.rename(aside)
    part.rename(out)
    shutil.rmtree(aside, ignore_errors=True)


def model_fingerprint(folder: Path) -> str:
    """A digest of settings, templates, and the names, shapes and samples of all tensors, or samples of a GGUF file. Training
    changes almost every number of a tensor, so eight thousand bytes of each suffice; 0.02 s for 135 million parameters.

    Raises ModelUnavailable: no weights, or unreadable ones.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in _TEXTS:
        path = folder / name
        if path.is_file():
            digest.update(f"{name} {path.stat().st_size} ".encode() + path.read_bytes())
    shipped = weights_file(folder)
    for path in sorted(folder.glob("*.safetensors")) if shipped is None else (shipped,):
        try:
            if path != shipped:
                _add_weights(digest, path)
                continue
            num_bytes = path.stat().st_size
            digest.update(f"{num_bytes} ".encode())
            with path.open("rb") as file:
                _add_spots(digest, file, 0, num_bytes, _NUM_FILE_SPOTS)
        except (OSError, SafetensorError) as error:
            raise ModelUnavailable(f"{path} cannot be read ({error!r}); it may be half-written") from error
    return digest.hexdigest()


def _add_weights(digest: "hashlib.blake2b", path: Path) -> None:
    with safe_open(path, framework="np"), path.open("rb") as file:  # the first checks the header
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(header)
        first = file.tell()
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                start, end = (first + offset for offset in tensor["data_offsets"])
                _add_spots(digest, file, start, end)


def _add_spots(digest: "hashlib.blake2b", file: BinaryIO, start: int, end: int, num: int = _NUM_SPOTS) -> None:
    """Samples, spread evenly over a tensor or a file."""
    stride, length = (end - start - _SPOT_BYTES) / (num - 1), _SPOT_BYTES
    if end - start <= num * _SPOT_BYTES * 2:
        num, length = 1, end - start
    for i in range(num):
        file.seek(start + int(i * stride))
        digest.update(file.read(length))
