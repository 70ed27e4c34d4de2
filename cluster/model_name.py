"""Names of models: an embedded one, a folder, or ``ORG/MODEL[@REVISION]`` of a hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([^\s@]+))?")
_CACHED = re.compile(r"models--(.+?)--(.+)")  # a model's folder in the hub's cache


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of a hub. ``revision``: a branch, tag or commit; None: the main branch."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """None for a name of another form. A folder may have a name of this form, too."""
        matched = _HUB_NAME.fullmatch(name)
        return cls(matched[1], matched[2]) if matched else None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def public_name(name_or_path: str) -> str:
    """What clients call the model: ``ORG/MODEL`` of a hub, also from a path into its cache, else a folder's last part."""
    if (named := HubName.parse(name_or_path)) is not None:
        return named.repo
    path = Path(name_or_path)
    for part in reversed(path.parts):
        if cached := _CACHED.fullmatch(part):
            return f"{cached[1]}/{cached[2]}"
    return path.name or name_or_path
