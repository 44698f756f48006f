"""Triton's interpreter without work of which it makes no use, and without making what it has made before. This
more than halves the time of a kernel, and what the kernel computes stays the same."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def is_patched(fn: Any) -> bool:
    """Whether all of Triton's language that this function sees is the interpreter's at present."""
    core = tl.core
    seen = [tl, *(value for value in fn.__globals__.values() if value is core)]
    return not any(core.is_builtin(language.load) for language in seen)


def kept_by_name(find: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of a type, which Triton compares by its name, that finds a value once per name."""
    known: dict[str, Any] = {}

    def kept(of: tl.dtype, *args: Any) -> Any:
        if (value := known.get(of.name)) is None:
            value = known[of.name] = find(of, *args)
        return value

    return kept


def kept_blocks(make: Callable[..., None]) -> Callable[..., None]:
    """Returns block_type's `__init__`, which checks and names every shape of an element type once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = (element_ty.name, *[size.__index__() for size in shape])
        if (fields := known.get(key)) is None:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(fields)

    return init


def kept_tensors(make: Callable[..., None]) -> Callable[..., None]:
    """Returns tensor's `__init__`, which wraps the shape of every type once."""
    known: dict[str, dict[str, Any]] = {}

    def init(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        if (fields := known.get(type.name)) is None:
            make(self, handle, type)
            known[type.name] = dict(self.__dict__)
        else:
            self.__dict__.update(fields)
            self.handle = handle

    return init


def quick_unwrap(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns `_unwrap_if_constexpr`, which looks for a constexpr before it looks for lists of them."""

    def quick(value: Any) -> Any:
        if isinstance(value, tl.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | tl.tuple) else value

    return quick


def patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """Replaces a function of the language by the interpreter's, as `interpreter._patch_attr` does."""

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, interpreted)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Until the session ends, the language is replaced by the interpreter's once a launch, not again whenever
    one jit function calls another; types and shapes are made once; and integers are not looked at for an
    overflow, which the interpreter would report only with its option `debug`."""
    if torch.cuda.is_available():  # kernels are compiled there
        yield
        return
    patch, options = interpreter._patch_lang, interpreter.interpreter_builder.options
    assert not options.debug

    def patch_what_is_not(fn: Any) -> Any:
        return interpreter._LangPatchScope() if is_patched(fn) else patch(fn)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(interpreter, "_patch_lang", patch_what_is_not)
        changed.setattr(interpreter, "_patch_attr", patch_attr)
        changed.setattr(interpreter, "_get_np_dtype", kept_by_name(interpreter._get_np_dtype))
        changed.setattr(tl.block_type, "__init__", kept_blocks(tl.block_type.__init__))
        changed.setattr(tl.block_type, "to_ir", kept_by_name(tl.block_type.to_ir))
        changed.setattr(tl.core, "_unwrap_if_constexpr", quick_unwrap(tl.core._unwrap_if_constexpr))
        changed.setattr(tl.tensor, "__init__", kept_tensors(tl.tensor.__init__))
        quick = replace(options, sanitize_overflow=False)
        changed.setattr(interpreter.interpreter_builder, "options", quick)
        yield
