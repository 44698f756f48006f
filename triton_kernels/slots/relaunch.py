"""Launches without the search that a launch begins with: which compiled kernel is for these arguments.

Knows no kernel and no tensor: whoever launches says by a key what a compilation depends on.
"""

from collections.abc import Callable, Hashable
from typing import Any

import triton
from triton.compiler import CompiledKernel

_TRITONS = ("num_warps", "num_stages")  # options of a launch that are no arguments of the kernel


class Launches:
    """What kernels were compiled to, by key; held by whatever the rest of a compilation follows from."""

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
        """Run `grid` programs of the kernel with these arguments, its first.

        Args:
            key: names the kernel and all that its compilation depends on and the holder does not decide. Of
                the arguments no value and no alignment may be such: the kernel is to be told not to
                specialize on what differs between launches.
            options: the other arguments by name, constants in their order and then Triton's own options;
                asked for at the first launch with a key.
        """
        known = self._compiled.get(key)
        if known is not None:
            compiled, constants = known
            compiled[(grid, 1, 1)](*arguments, *constants)
            return
        named = options()
        compiled = kernel[(grid,)](*arguments, **named)
        if isinstance(compiled, CompiledKernel):  # the interpreter compiles none
            constants = tuple(value for name, value in named.items() if name not in _TRITONS)
            self._compiled[key] = compiled, constants
