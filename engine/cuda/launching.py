"""How Triton kernels are launched."""

from typing import Any, Protocol


class Launch(Protocol):
    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> object:
        """Launches a Triton kernel over a grid. ``constants``: its constexprs and compiler options."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, **constants)
