"""Triton's interpreter, as tests run kernels in it: one launch at a time, for which all of the language is the
interpreter's, and without making again what it has made before. What a kernel computes stays the same."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


class Language:
    """All that the interpreter replaces for a launch, as it was when this was made."""

    OWNERS = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)

    def __init__(self) -> None:
        self._members = [(owner, dict(vars(owner))) for owner in self.OWNERS]

    def bring_back(self) -> list[str]:
        """Returns the names of what is no longer as it was, and puts all of it back."""
        changed = []
        for owner, members in self._members:
            now = vars(owner)
            for name, member in members.items():
                if now.get(name) is not member:
                    setattr(owner, name, member)
                    changed.append(f"{owner.__name__}.{name}")
        return changed


def one_at_a_time(
    launch: Callable[..., None], patch: Callable[[Any], interpreter._LangPatchScope]
) -> Callable[..., None]:
    """Returns `GridExecutor.__call__`, which replaces the language for the launch and brings it back.

    Triton would replace only the modules that the kernel's own module names, and others whenever the kernel
    calls a jit function of a module that names those; it never brings the latter back. Threads take turns,
    because they share the language and the index of the program that runs.
    """
    every_module = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    turn = threading.RLock()

    def launch_alone(self: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        with turn:
            scope = patch(every_module)
            try:
                launch(self, *args, **kwargs)
            finally:
                scope.restore()

    return launch_alone


def patch_nothing(_fn: Any) -> interpreter._LangPatchScope:
    """Stands in for `interpreter._patch_lang` during a launch, for which all is replaced already."""
    return interpreter._LangPatchScope()


def kept_by_name(find: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """Returns `_get_np_dtype`, which finds the dtype of a type, which Triton compares by its name, once."""
    known: dict[str, Any] = {}

    def kept(of: tl.dtype) -> Any:
        if (dtype := known.get(of.name)) is None:
            dtype = known[of.name] = find(of)
        return dtype

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


def indexing(patch: Callable[..., None]) -> Callable[..., None]:
    """Returns `_patch_lang_tensor`, after which a tensor of one element may bound a loop. Triton 3.6 gives its
    array of one dimension to `int`, which numpy refuses from 2.4 on."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[Language | None]:
    """Until the session ends, the language is replaced by the interpreter's once a launch; types and shapes are
    made once; and integers are not looked at for an overflow, which the interpreter would report only with its
    option `debug`. Gives the language outside of launches; None on a GPU, where kernels are compiled."""
    if torch.cuda.is_available():
        yield None
        return
    patch, options = interpreter._patch_lang, interpreter.interpreter_builder.options
    assert not options.debug
    executor = interpreter.GridExecutor
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(executor, "__call__", one_at_a_time(executor.__call__, patch))
        changed.setattr(interpreter, "_patch_lang", patch_nothing)
        changed.setattr(interpreter, "_patch_lang_tensor", indexing(interpreter._patch_lang_tensor))
        changed.setattr(interpreter, "_get_np_dtype", kept_by_name(interpreter._get_np_dtype))
        changed.setattr(tl.block_type, "__init__", kept_blocks(tl.block_type.__init__))
        changed.setattr(tl.tensor, "__init__", kept_tensors(tl.tensor.__init__))
        quick = replace(options, sanitize_overflow=False)
        changed.setattr(interpreter.interpreter_builder, "options", quick)
        yield Language()


@pytest.fixture(autouse=True)
def language_is_brought_back(quick_interpreter: Language | None) -> Iterator[None]:
    """Fails a test that leaves Triton's language replaced, and brings it back for the next one."""
    yield
    if quick_interpreter is not None and (changed := quick_interpreter.bring_back()):
        pytest.fail(f"of Triton's language stayed replaced: {', '.join(changed[:5])}")
