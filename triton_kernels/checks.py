"""States which tensors a function takes, and refuses all others."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.layout.strides import has_unit_stride


class _Wanted(NamedTuple):
    """A tensor as a text describes it."""

    text: str
    dtypes: tuple[torch.dtype, ...]
    of_floats: bool
    dims: tuple[tuple[str, int], ...]  # a name and what is added to its size; "", of size 0, for a number
    is_contiguous: bool
    has_unit_stride: bool

    @classmethod
    def parse(cls, text: str) -> "_Wanted":
        """Returns what a text of `Tensors` says."""
        found = re.fullmatch(r"(contiguous )?([\w ]*?) ?\[(.*)\]( with a last stride of 1)?", text)
        assert found is not None, text
        contiguous, dtypes, listed, unit_stride = found.groups()
        dims = []
        for one in listed.split(", "):
            name, _, more = one.partition(" + ")
            dims.append(("", int(name)) if name.isdigit() else (name, int(more or 0)))
        names = () if dtypes in ("", "floats") else dtypes.split(" or ")
        known = tuple(getattr(torch, one) for one in names)
        return cls(text, known, dtypes == "floats", tuple(dims), bool(contiguous), bool(unit_stride))

    def fits(self, tensor: Tensor, sizes: dict[str, int]) -> bool:
        """Returns whether it is a tensor that fits, and adds to `sizes` those that its dims give to new
        names."""
        if not isinstance(tensor, Tensor) or len(shape := tensor.shape) != len(self.dims):
            return False
        for (name, more), size in zip(self.dims, shape, strict=True):
            known = sizes.get(name)
            if known is None:
                sizes[name] = size - more
            elif known + more != size:
                return False
        if (self.dtypes and tensor.dtype not in self.dtypes) or (
            self.of_floats and not tensor.is_floating_point()
        ):
            return False
        return self.fits_layout(tensor)

    def fits_layout(self, tensor: Tensor) -> bool:
        """Returns whether a tensor lies in memory as it has to."""
        if self.is_contiguous:
            return tensor.is_contiguous()
        return not self.has_unit_stride or has_unit_stride(tensor)


class Tensors:
    """The tensors that a function takes, by name, in the order in which they are checked. A text says of each
    what it has to be, and is what an error says:

        Tensors(q="floats [T, H, D] with a last stride of 1", starts="contiguous int32 or int64 [B + 1]")

    First of all comes `contiguous`, or at the end that the last stride is 1. Types are those of torch, `floats`
    for any floating one, or left out for any. A dim is a number, or a name, which stands for one size wherever
    it occurs, or a name and what is added to its size.
    """

    def __init__(self, **texts: str) -> None:
        self._wanted = {name: _Wanted.parse(text) for name, text in texts.items()}

    def check(self, sizes: Mapping[str, int], **tensors: Tensor | None) -> dict[str, int]:
        """Returns the sizes of all dims by name. `sizes`: those that are known before. A tensor that is None is
        left out. Raises ValueError for the first tensor that does not fit."""
        known = {"": 0, **sizes}
        for name, wanted in self._wanted.items():
            tensor = tensors.get(name)
            if tensor is not None and not wanted.fits(tensor, known):
                raise ValueError(_refusal(name, wanted, tensor, known))
        return known


def _refusal(name: str, wanted: _Wanted, tensor: Tensor, sizes: Mapping[str, int]) -> str:
    named = dict.fromkeys(name for name, _ in wanted.dims if name and name in sizes)
    where = ", ".join(f"{one} {sizes[one]}" for one in named)
    found = repr(tensor)
    if isinstance(tensor, Tensor):
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        if not wanted.fits_layout(tensor):
            found += f" with strides {tensor.stride()}; make it contiguous"
    return f"{name} must be {wanted.text}{f', with {where}' if where else ''}; got {found}"
