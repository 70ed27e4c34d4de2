"""Models of a Hugging Face hub: their folders in its cache, and downloads into it.

``huggingface_hub`` reads HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE when it is imported.
"""

import glob
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.errors import ModelUnavailable
from cluster.model_name import GGUF, HubName

Progress = Callable[[str, float], None]  # the current step, and the fraction done


def no_progress(step: str, fraction: float) -> None:
    """Reports nothing."""


_SIGNAL_POLL_S = 0.2
_COMMIT, _PART = re.compile("[0-9a-f]{40}"), re.compile(r"-\d+-of-(\d+)\.gguf$")
_LISTED = 12  # files that a message names
HEADER_BYTES = 2**25  # of a GGUF file; a header with 150,000 tokens and their merges takes 6 MB
HEADERS, KEPT_HEADERS = "headers", 8  # the folder of headers, and commits of which they are kept
# What a causal language model needs, at the top of its repository. consolidated.safetensors holds the same weights again.
WEIGHTS = "*.safetensors"
WANTED = ("*.json", WEIGHTS, "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.npz", "*.py")
UNWANTED = ("*/*", "consolidated*.safetensors")


def cache_folder() -> Path:
    """Where models of the hub lie; it may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def local_folder(name_or_path: str) -> Path | None:
    """The absolute path of an existing folder or file; of a ``models--ORG--NAME`` folder its snapshot. None: there is none.

    Raises ModelUnavailable: such a folder without a snapshot to choose.
    """
    path = Path(name_or_path).expanduser().absolute()
    if not path.exists():
        return None
    snapshots = path / "snapshots"
    return _snapshot_of(path) if path.name.startswith("models--") and snapshots.is_dir() else path


def fetch(name: HubName, progress: Progress, *, with_weights: bool = True) -> Path:
    """The snapshot of a model, complete, or its GGUF file: downloads what the cache lacks. A commit that lies there whole
    asks no network; without one, the newest that lies there. Raises ModelUnavailable, which says what was tried."""
    if name.gguf is None:
        return _snapshot(name, progress, WANTED, [*UNWANTED, *([] if with_weights else [WEIGHTS])])
    if _COMMIT.fullmatch(name.revision or ""):
        with suppress(ModelUnavailable):
            return find(name)
    file = chosen_file(name, _listed(name))
    return _snapshot(name, progress, [glob.escape(file)]) / file


def fetch_header(name: HubName, folder: Path) -> Path:
    """A GGUF file in ``folder``, of which only the first bytes are read; the rest is a hole. Those of the last KEPT_HEADERS
    commits are kept. Raises ModelUnavailable."""
    import httpx2
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

    with suppress(ModelUnavailable):
        kept = folder / (name.revision or "")
        return kept / chosen_file(name, _gguf_files(kept) if name.revision else ())
    try:
        file = chosen_file(name, _listed(name))
        url, first = hf_hub_url(name.repo, file, revision=name.revision), f"bytes=0-{HEADER_BYTES - 1}"
        about = get_hf_file_metadata(url)
        path = folder / str(about.commit_hash) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            http_stream_backoff("GET", url, headers={**build_hf_headers(), "range": first}) as answer,
            tempfile.NamedTemporaryFile(dir=path.parent) as part,
        ):
            hf_raise_for_status(answer)
            for chunk in answer.iter_bytes():
                part.write(chunk)
                if part.tell() >= HEADER_BYTES:
                    break
            part.truncate(about.size)
            part.flush()
            with suppress(FileExistsError):
                os.link(part.name, path)
        os.utime(folder / str(about.commit_hash))
        for old in sorted(folder.iterdir(), key=lambda kept: kept.stat().st_mtime)[:-KEPT_HEADERS]:
            shutil.rmtree(old, ignore_errors=True)
        return path
    except (OSError, httpx2.HTTPError) as error:
        raise ModelUnavailable(_reason(name, error, asked=True)) from error


def find(name: HubName) -> Path:
    """As ``fetch``, of the cache alone."""
    if name.gguf is None:
        return _snapshot(name, None, WANTED, UNWANTED)
    snapshot, files = _cached(name)
    return snapshot / chosen_file(name, files)


def commit_of(path: Path) -> str:
    """That of a snapshot in the cache, or of a file in one."""
    return next(part.name for part in (path, *path.parents) if part.parent.name == "snapshots")


def chosen_file(name: HubName, files: Iterable[str]) -> str:
    """The GGUF file that ``name`` means. Raises ModelUnavailable: none, or several; lists what there is."""
    assert name.gguf is not None
    known = sorted(file for file in files if file.endswith(GGUF) and "mmproj" not in file.lower())
    before = r"(.*([-./]|(?<!Q\d)(?<!Q\d_K)_))?"  # not within a quantization, whose parts are joined by _
    tag = re.compile(rf"{before}{re.escape(name.gguf)}(-\d+-of-\d+|/[^/]*)?\.gguf", re.IGNORECASE)
    found = [file for file in known if file == name.gguf or tag.fullmatch(file)]
    if parts := [part[1] for file in found if (part := _PART.search(file))]:
        raise ModelUnavailable(
            f"{name} is stored in {int(parts[0])} parts, which are not read; download them, join them with "
            "`llama-gguf-split --merge`, and serve the file"
        )
    if len(found) == 1:
        return found[0]
    listed = ", ".join((found or known)[:_LISTED]) + (", ..." if len(found or known) > _LISTED else "")
    if found:
        raise ModelUnavailable(f"{name} names {len(found)} files: choose one as {name.repo}/FILE; they are {listed}")
    raise ModelUnavailable(f"{name}: {name.repo} has no such GGUF file; it has {listed or 'none'}")


def _cached(name: HubName) -> tuple[Path, list[str]]:
    """A snapshot that need not be complete, and its GGUF files, which are. Raises ModelUnavailable: it has none."""
    model = cache_folder() / f"models--{name.repo.replace('/', '--')}"
    revision = name.revision or "main"
    ref = model / "refs" / revision
    snapshot = model / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    if not (files := _gguf_files(snapshot)):
        raise ModelUnavailable(_reason(name, FileNotFoundError(snapshot), asked=False))
    return snapshot, files


def _gguf_files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob(f"*{GGUF}") if path.is_file()]


def _listed(name: HubName) -> list[str]:
    """The files of a repository; of a hub that cannot be asked those in the cache. Raises ModelUnavailable."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return list(HfApi().list_repo_files(name.repo, revision=name.revision))
    except HFValidationError as error:
        raise ModelUnavailable(f"{name}: no file here, and no name of a hub's model: {_first_line(error)}") from error
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelUnavailable(_reason(name, error, asked=True)) from error
    except (OSError, httpx2.HTTPError) as error:
        try:
            return _cached(name)[1]
        except ModelUnavailable:
            raise ModelUnavailable(_reason(name, error, asked=True)) from error


def _snapshot(name: HubName, progress: Progress | None, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
    """``progress`` None: of the cache alone."""
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    stopped = threading.Event()
    more: dict[str, Any] = {"local_files_only": True} if progress is None else {"tqdm_class": _bar(progress, stopped)}
    more |= {"allow_patterns": list(wanted), "ignore_patterns": list(unwanted)}
    try:
        return Path(_stoppable(stopped, lambda: snapshot_download(name.repo, revision=name.revision, **more)))
    except HFValidationError as error:
        raise ModelUnavailable(f"{name}: no folder here, and no name of a hub's model: {_first_line(error)}") from error
    except (OSError, httpx2.HTTPError) as error:
        raise ModelUnavailable(_reason(name, error, asked=progress is not None)) from error


def _stoppable(stopped: threading.Event, work: Callable[[], str]) -> str:
    """Of ``work``, in a thread, since snapshot_download answers a signal only when the files under way are complete. What
    interrupts this sets ``stopped``, which ends them at their next part."""
    outcome: Future[str] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name="download", daemon=True).start()
    try:
        while not wait([outcome], timeout=_SIGNAL_POLL_S).done:  # a signal may be handed to another thread than this one
            pass
        return outcome.result()
    finally:
        stopped.set()


def _reason(name: HubName, error: Exception, *, asked: bool) -> str:
    """One line. ``asked``: whether the hub was to be asked."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    match error:
        case RevisionNotFoundError():
            return f"{name.repo} has no revision {name.revision!r} on {hub}"
        case GatedRepoError():
            token = "HF_TOKEN's account has no access" if get_token() else "set HF_TOKEN"
            return f"{name.repo} is gated on {hub}: accept its terms there; {token}"
        case RepositoryNotFoundError():
            private = "is hidden from HF_TOKEN's account" if get_token() else "is private: set HF_TOKEN"
            return f"{name.repo}: no folder here, and {hub} has no such model, or it {private}"
    missing = "is incomplete" if isinstance(error, IncompleteSnapshotError) else "is not"
    here = f"{name}: no folder here, and it {missing} in the cache {cache}"
    if not asked:
        return f"{here}; `outrider models prepare {name}` downloads it"
    if constants.is_offline_mode():
        return f"{here}, while HF_HUB_OFFLINE=1 forbids to download it"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"{name}: {hub} answers {error.response.status_code}: {_first_line(error)}"
    if isinstance(error, LocalEntryNotFoundError):
        return f"{here}; asking {hub} failed: {_first_line(error.__cause__ or error)}"
    return f"{name} could not be downloaded from {hub}: {_first_line(error)}; complete files are kept: try again"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _snapshot_of(model: Path) -> Path:
    """Of a model's folder in a cache: that of its main branch, or its only one."""
    snapshots = model / "snapshots"
    main = model / "refs" / "main"
    if main.is_file() and (snapshot := snapshots / main.read_text().strip()).is_dir():
        return snapshot
    found = [snapshot for snapshot in snapshots.iterdir() if snapshot.is_dir()]
    if len(found) == 1:
        return found[0]
    raise ModelUnavailable(f"{model} has {len(found)} snapshots and no main branch: name one of the folders in {snapshots}")


def _bar(progress: Progress, stopped: threading.Event) -> type:
    """The class of progress bars that ``snapshot_download`` makes. One of them counts the bytes of all files, in the threads
    that load them, and raises there when ``stopped``."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = str(kwargs.get("desc")).startswith("Reconstructing")
            super().__init__(*args, **{**kwargs, "gui": True})  # gui: nothing is written to the terminal

        def update(self, n: float | None = 1) -> bool | None:
            if stopped.is_set():
                raise InterruptedError("the download was stopped")
            shown = super().update(n)
            if self._counts_bytes and self.total:  # once in 10 MiB
                progress(f"downloading {self.total / 1e9:.2f} GB", min(1.0, self.n / self.total))
            return bool(shown)

        def display(self, *args: Any, **kwargs: Any) -> None:
            """Nothing is drawn, and nothing may raise here, where tqdm holds its lock."""

        def clear(self, *args: Any, **kwargs: Any) -> None:
            """Nothing was written."""

    return Bar
