"""The manifest of a prepared model folder, which makes damage detectable."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from cluster.errors import ModelUnavailable

MANIFEST = "outrider.json"
_ENGINE = Path(__file__).parents[1]
TENSORS = "tensors.json"  # of a GGUF file: {name: [shape, bytes of a weight in memory, as shipped]}


@dataclass(frozen=True, slots=True)
class FileRecord:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The source, and sizes and checksums of all files of the folder but the manifest itself."""

    model: str
    source: str
    source_sha256: str  # "": the source is known by its size and time of change
    converted_by: str
    date: str
    files: Mapping[str, FileRecord]

    @classmethod
    def describe(cls, folder: Path, *, model: str, source: str, source_sha256: str, converted_by: str) -> "Manifest":
        files = {file.name: FileRecord(file.stat().st_size, sha256(file)) for file in sorted(folder.iterdir())}
        return cls(model, source, source_sha256, converted_by, datetime.now(UTC).isoformat(timespec="seconds"), files)

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises ModelUnavailable when it is missing or damaged."""
        try:
            content = json.loads((folder / MANIFEST).read_bytes())
            return cls(**{**content, "files": {name: FileRecord(**record) for name, record in content["files"].items()}})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelUnavailable(f"{folder / MANIFEST} is missing or damaged") from error

    def check_sizes(self, folder: Path) -> None:
        """Raises ModelUnavailable when a file is missing or has another length."""
        for name, record in self.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != record.num_bytes:
                raise ModelUnavailable(f"{file} is missing or cut off")

    def check_bytes(self, folder: Path) -> None:
        """Raises ModelUnavailable when a file differs in any byte. Reads all files: a third of a second for 270 MB."""
        self.check_sizes(folder)
        for name, record in self.files.items():
            if sha256(folder / name) != record.sha256:
                raise ModelUnavailable(f"{folder / name} is damaged: its checksum is wrong")


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def shipped_tensors(folder: Path) -> dict[str, tuple[list[int], float]]:
    """Shapes, and bytes of a weight in memory as shipped, of the GGUF file that a folder was made from. {}: of none."""
    path = folder / TENSORS
    return dict(json.loads(path.read_text())) if path.is_file() else {}


@cache
def code_version() -> str:
    """A digest of the engine's sources: changed kernels have other times, and changed code may pack weights otherwise."""
    digest = hashlib.sha256()
    for file in sorted(file for file in _ENGINE.rglob("*") if file.suffix in (".py", ".c", ".h")):
        digest.update(file.relative_to(_ENGINE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
