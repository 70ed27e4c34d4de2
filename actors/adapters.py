"""The LoRA adapters that calls may name, as the supervisor knows them."""

from dataclasses import replace
from math import inf

from actors.processes import Directory
from cluster.types import Adapter, ModelInfo


class AdapterRegistry:
    """Those of the file, until they are changed. Directories that it returns are new ones."""

    def __init__(self) -> None:
        self._adapters: tuple[Adapter, ...] | None = None  # None: those of the file
        self._recalled_version: float = -1  # of a directory of a former supervisor

    def applied(self, model: ModelInfo | None) -> ModelInfo | None:
        """The model as gateways learn it."""
        return model if model is None or self._adapters is None else replace(model, adapters=self._adapters)

    def recalled(self, directory: Directory, known: Directory) -> Directory:
        """With what a former supervisor told a gateway, unless another gateway has heard more. Else ``directory``."""
        if known.epoch == directory.epoch or known.model is None or known.version <= self._recalled_version:
            return directory
        return self._changed(directory, known.model.adapters, known.version)

    def swapped(self, directory: Directory, old: Adapter | None, new: Adapter | None) -> Directory | None:
        """With ``new`` in place of ``old``. None: ``old`` is gone, there is no room for ``new``, or its name is taken."""
        known, most = ((), 0) if directory.model is None else (directory.model.adapters, directory.model.max_adapters)
        left = tuple(one for one in known if one != old)
        if old is not None and old not in known:
            return None
        if new is not None and (len(left) >= most or new.name in [one.name for one in left]):
            return None
        return self._changed(directory, (*left, *([] if new is None else [new])), inf)

    def _changed(self, directory: Directory, adapters: tuple[Adapter, ...], recalled_version: float) -> Directory:
        self._adapters, self._recalled_version = adapters, recalled_version
        return directory.changed(model=self.applied(directory.model))
