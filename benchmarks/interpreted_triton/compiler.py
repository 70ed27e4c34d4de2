"""Compiles nothing."""

from triton.backends.compiler import BaseBackend


class NoCompiler(BaseBackend): ...  # type: ignore[misc]


NoCompiler.__abstractmethods__ = frozenset()  # Triton takes concrete classes only
