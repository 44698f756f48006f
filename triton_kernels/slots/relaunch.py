"""Launches kernels again without Triton's search for the compiled kernel that fits the arguments.

The caller's key names everything that the compilation depends on.
"""

from collections.abc import Callable, Hashable
from typing import Any

import triton
from triton.compiler import CompiledKernel

_TRITONS = ("num_warps", "num_stages")  # options of a launch that are not arguments of the kernel


class Launches:
    """Compiled kernels by key, kept by the object that decides the rest of their compilation (`SlotState`)."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, tuple[CompiledKernel, tuple[object, ...]]] = {}

    def launch(
        self,
        kernel: "triton.JITFunction[Any]",
        key: Hashable,
        grid: int,
        arguments: tuple[object, ...],
        options: Callable[[], dict[str, Any]],
    ) -> None:
        """Runs `grid` programs of the kernel.

        Args:
            key: names the kernel and everything that its compilation depends on, except what the owner of this
                object decides. The kernel must not specialize on the value or alignment of an argument that
                differs between launches with the same key.
            arguments: the kernel's first arguments.
            options: returns its other arguments by name, constants in their order and then Triton's own
                options. It is called at the first launch with a key.
        """
        known = self._compiled.get(key)
        if known is not None:
            compiled, constants = known
            compiled[(grid, 1, 1)](*arguments, *constants)
            return
        named = options()
        compiled = kernel[(grid,)](*arguments, **named)
        if isinstance(compiled, CompiledKernel):  # the interpreter compiles nothing
            constants = tuple(value for name, value in named.items() if name not in _TRITONS)
            self._compiled[key] = compiled, constants
