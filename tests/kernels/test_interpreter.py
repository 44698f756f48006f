"""The interpreter that tests run kernels in."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.support.interpreter import Language

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")


@triton.jit
def _halves(x):
    """Calls a jit function of Triton's own, whose module sees other parts of the language than this one."""
    return tl.cdiv(tl.maximum(x, 0), 2)


@triton.jit
def _halves_of_each(xs, out, HOOK: tl.constexpr):
    HOOK()
    x = tl.load(xs + tl.program_id(0))
    tl.store(out + tl.program_id(0), _halves(x) + _halves(x))


def launch(hook: Callable[[], object]) -> list[int]:
    """Launches two programs, each of which calls `hook` first, and returns what they stored."""
    xs = torch.tensor([-5, 7])
    out = torch.zeros_like(xs)
    _halves_of_each[(2,)](xs, out, hook)
    return out.tolist()


def is_replaced() -> set[bool]:
    """Returns whether the language is the interpreter's: both values, if only some of it is."""
    return {not tl.core.is_builtin(module.load) for module in (tl, tl.core)}


def test_a_launch_alone_replaces_the_language_and_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes: list[Any] = []
    set_attr = interpreter._LangPatchScope.set_attr

    def record(scope: Any, *change: Any) -> None:
        if scope not in scopes:
            scopes.append(scope)
        set_attr(scope, *change)

    monkeypatch.setattr(interpreter._LangPatchScope, "set_attr", record)
    during: list[set[bool]] = []
    for num in (1, 2):
        assert launch(lambda: during.append(is_replaced())) == [0, 8]
        assert is_replaced() == {False}
        assert len(scopes) == num  # of the launches, and none of the calls
    assert during == [{True}] * 4
    assert not any(scope._changes for scope in scopes)


def test_a_launch_that_fails_brings_the_language_back() -> None:
    with pytest.raises(interpreter.InterpreterError, match="ZeroDivisionError"):
        launch(lambda: 1 // 0)
    assert is_replaced() == {False}


def test_launches_of_two_threads_take_turns() -> None:
    events: list[str] = []
    found: list[list[int]] = []
    other = threading.Thread(target=lambda: found.append(launch(lambda: events.append("other"))))

    def start_other() -> None:
        events.append("first")
        if len(events) == 1:
            other.start()
        other.join(0.1)  # the other would come to its end here, were it let in

    found.append(launch(start_other))
    other.join()
    assert events == ["first", "first", "other", "other"]
    assert found == [[0, 8]] * 2
    assert is_replaced() == {False}


def test_what_stays_replaced_is_named_and_brought_back() -> None:
    language = Language()
    assert language.bring_back() == []
    changed = [(tl, "load"), (tl.core, "load"), (tl.math, "exp"), (tl.tensor, "__add__"), (tl.dtype, "to_ir")]
    for owner, name in changed:
        setattr(owner, name, None)
    assert language.bring_back() == [f"{owner.__name__}.{name}" for owner, name in changed]
    assert language.bring_back() == []
    assert launch(lambda: None) == [0, 8]


def test_what_is_kept_of_a_shape_is_kept_for_each_element_type() -> None:
    for shape in ([4, 8], [8, 4]):
        for _ in range(2):  # made, and kept
            for element in (tl.int32, tl.uint32, tl.float16, tl.pointer_type(tl.float16)):
                block = tl.block_type(element, shape)
                tensor = tl.tensor(None, block)
                assert (block.element_ty, list(block.shape), block.numel) == (element, shape, 32)
                assert (tensor.type, tensor.dtype, tensor.numel.value) == (block, element, 32)
                assert [size.value for size in tensor.shape] == shape
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [4, 9])
    assert interpreter._get_np_dtype(tl.int32) != interpreter._get_np_dtype(tl.uint32)
