"""Imports in place of torchvision, whose builds for GPUs do not load beside PyTorch for CPUs: vLLM imports the image
processors of models that also see. It computes nothing."""

import sys
from types import ModuleType
from typing import Any

__version__ = "0.0"


class _Names(ModuleType):
    """Has every public name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name)


for _name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops", "models"):
    _module = sys.modules[f"{__name__}.{_name}"] = _Names(f"{__name__}.{_name}")
    _module.__path__ = []
    _parent, _, _leaf = f"{__name__}.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _leaf, _module)
