"""A pytest plugin that imports the mutated source of one module: ``-p mutant`` with MUTANT=MODULE:FILE."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType


class _Finder(MetaPathFinder):
    def __init__(self, module: str, file: str) -> None:
        self._module, self._file = module, file

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self._file) if name == self._module else None


sys.meta_path.insert(0, _Finder(*os.environ["MUTANT"].split(":", 1)))
