"""Names of models: an embedded one, a folder, a GGUF file, or of a hub ``ORG/MODEL[@REVISION]``, ``ORG/MODEL:Q4_K_M`` or
``ORG/MODEL/FILE.gguf``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

GGUF = ".gguf"
_HUB_NAME = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([A-Za-z0-9][\w.-]*)|/([\w./+ -]+\.gguf))?(?:@([^\s@]+))?", re.ASCII
)
_CACHED = re.compile(r"models--(.+?)--(.+)")  # a model's folder in the hub's cache


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of a hub. ``revision``: a branch, tag or commit; None: the main branch. ``gguf``: one of a repository of GGUF
    files, by its path or the name of its quantization; None: a Hugging Face model."""

    repo: str
    revision: str | None = None
    gguf: str | None = None

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """None for a name of another form. A folder may have a name of this form, too."""
        matched = _HUB_NAME.fullmatch(name)
        if matched and {"", ".", ".."} & {*(matched[4] or "main").split("/"), *(matched[3] or "a").split("/")}:
            return None  # a part of a path that leaves its folder
        return cls(matched[1], matched[4], matched[2] or matched[3]) if matched else None

    @property
    def public(self) -> str:
        """Without the revision."""
        if self.gguf is None:
            return self.repo
        return f"{self.repo}/{self.gguf}" if self.gguf.endswith(GGUF) else f"{self.repo}:{self.gguf}"

    def __str__(self) -> str:
        return self.public if self.revision is None else f"{self.public}@{self.revision}"


def public_name(name_or_path: str) -> str:
    """What clients call the model: ``ORG/MODEL`` of a hub, also from a path into its cache, and with ``:Q4_K_M`` as it was
    named; else a folder's last part, or a GGUF file's name."""
    named = HubName.parse(name_or_path)
    if name_or_path.endswith(GGUF) or (named is not None and (named.gguf or "").endswith(GGUF)):
        return Path(named.gguf if named is not None and named.gguf else name_or_path).stem
    if named is not None:
        return named.public
    path = Path(name_or_path)
    for part in reversed(path.parts):
        if cached := _CACHED.fullmatch(part):
            return f"{cached[1]}/{cached[2]}"
    return path.name or name_or_path
