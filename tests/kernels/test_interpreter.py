"""The interpreter that tests run kernels in."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter


@triton.jit
def _next(x):
    return tl.maximum(x, 0) + 1


@triton.jit
def _next_of_each(xs, out):
    x = tl.load(xs + tl.program_id(0))
    tl.store(out + tl.program_id(0), _next(_next(x)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")
def test_a_launch_alone_replaces_the_language_and_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes, patch = [], interpreter._patch_lang

    def record(fn: Any) -> Any:
        scopes.append(patch(fn))
        return scopes[-1]

    restored = []
    restore = interpreter._LangPatchScope.restore

    def count(scope: Any) -> None:
        restored.append(len(scope._changes))
        restore(scope)

    monkeypatch.setattr(interpreter, "_patch_lang", record)
    monkeypatch.setattr(interpreter._LangPatchScope, "restore", count)
    xs = torch.tensor([-5, 7])
    for _ in range(2):
        out = torch.zeros_like(xs)
        _next_of_each[(2,)](xs, out)
        assert out.tolist() == [2, 9]
        assert tl.core.is_builtin(tl.load)
    assert len(scopes) == 2 * (1 + 2 * 2)  # of a launch, and of two calls in either program
    assert [len(scope._changes) for scope in scopes] == [0] * len(scopes)  # none is left behind
    assert restored[0] == restored[1] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")
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
