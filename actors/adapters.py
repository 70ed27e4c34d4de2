"""The LoRA adapters that calls may name, as the supervisor knows them."""

from dataclasses import replace
from math import inf

from actors.processes import Directory
from cluster.types import Adapter, ModelInfo


class AdapterRegistry:
    """Those of the file, until they are changed."""

    def __init__(self) -> None:
        self._adapters: tuple[Adapter, ...] | None = None  # None: those of the file
        self._recalled_version: float = -1  # of a directory of a former supervisor

    def applied(self, model: ModelInfo | None) -> ModelInfo | None:
        """The model as gateways learn it."""
        return model if model is None or self._adapters is None else replace(model, adapters=self._adapters)

    def recall(self, former: Directory) -> bool:
        """Takes over what a former supervisor told a gateway, unless another gateway has heard more. Returns whether it
        did."""
        if former.model is None or former.version <= self._recalled_version:
            return False
        self._adapters, self._recalled_version = former.model.adapters, former.version
        return True

    def swap(self, model: ModelInfo, old: Adapter | None, new: Adapter | None) -> bool:
        """False: ``old`` is gone, or there is no room for ``new``, or its name is taken."""
        left = tuple(one for one in model.adapters if one != old)
        if old is not None and old not in model.adapters:
            return False
        if new is not None and (len(left) >= model.max_adapters or new.name in [one.name for one in left]):
            return False
        self._adapters, self._recalled_version = (*left, *([] if new is None else [new])), inf
        return True
