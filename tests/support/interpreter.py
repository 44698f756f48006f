"""Triton's interpreter without work of which it makes no use. This halves the time of a kernel, and what the
kernel computes stays the same."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def is_patched(fn: Any) -> bool:
    """Whether all of Triton's language that this function sees is the interpreter's at present."""
    seen = [tl, *(value for value in fn.__globals__.values() if value is tl.core)]
    return not any(tl.core.is_builtin(language.load) for language in seen)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Until the session ends, the language is replaced by the interpreter's once a launch, not again whenever
    one jit function calls another; and integers are not looked at for an overflow, which the interpreter would
    report only with its option `debug`."""
    if torch.cuda.is_available():  # kernels are compiled there
        yield
        return
    patch, options = interpreter._patch_lang, interpreter.interpreter_builder.options
    assert not options.debug

    def patch_what_is_not(fn: Any) -> Any:
        return interpreter._LangPatchScope() if is_patched(fn) else patch(fn)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(interpreter, "_patch_lang", patch_what_is_not)
        quick = replace(options, sanitize_overflow=False)
        changed.setattr(interpreter.interpreter_builder, "options", quick)
        yield
