"""Finds the quantised experts of a checkpoint in its files, and reads their weights."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightkv.integrations.weights.experts import QuantisedExperts
from lightkv.integrations.weights.float4 import Mxfp4Format
from lightkv.integrations.weights.quantised import CannotDivide, QuantisedWeight
from lightkv.router.model_files import UnreadableWeights

from .stored_weight import OpenFiles, StoredLayers, StoredWeight

# A layer of an expert, and in which order those of one input are joined.
_ORDER = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0}
_EXPERT = re.compile(rf"\.(\d{{1,5}})\.({'|'.join(_ORDER)})$")


class StrangeExperts(ValueError):
    """The files have other experts than the model; the message says which."""


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """The quantised weights of `num` experts in the files: those of an expert follow each other in `parts`, or
    one part has all of them. `is_transposed`: see `QuantisedExperts`."""

    parts: Sequence[StoredWeight]
    num: int
    is_transposed: bool

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter in the model."""
        num_rows = sum(part.shape[0] for part in self.parts) // self.num
        num_columns = self.parts[0].shape[1]
        rest = (num_columns, num_rows) if self.is_transposed else (num_rows, num_columns)
        return torch.Size((self.num, *rest))

    @property
    def layer_shape(self) -> tuple[int, int]:
        """The outputs and inputs of each layer of an expert."""
        n, k = self.parts[0].shape
        return n if len(self.parts) > 1 else n // self.num, k

    def some(self, begin: int, count: int) -> "StoredExperts":
        """Returns the experts from `begin` on."""
        if len(self.parts) == 1:
            rows = self.layer_shape[0]
            parts: Sequence[StoredWeight] = [self.parts[0].part(0, [(begin * rows, count * rows)])]
        else:
            each = len(self.parts) // self.num
            parts = self.parts[begin * each : (begin + count) * each]
        return replace(self, parts=parts, num=count)

    def part(self, dim: int, spans: Sequence[tuple[int, int]]) -> "StoredExperts":
        """Returns some outputs (`dim` 0) or inputs (1) of each layer of each expert."""
        if len(self.parts) == 1 and dim == 0:
            raise CannotDivide("experts that are stored in one piece are divided by whole experts")
        return replace(self, parts=[one.part(dim, spans) for one in self.parts])

    def read(self, files: OpenFiles, dtype: torch.dtype) -> QuantisedExperts:
        """Reads the weights, to be multiplied in `dtype`."""
        joined = QuantisedWeight.join([part.read(files, dtype) for part in self.parts])
        assert joined is not None  # by `require_whole`
        return QuantisedExperts(joined, self.num, self.is_transposed)

    def read_dense(self, files: OpenFiles, dtype: torch.dtype) -> Tensor:
        """Reads the weights, and returns what they stand for, in the shape of the parameter."""
        rows = torch.cat([part.read(files, dtype).dense() for part in self.parts])
        found = rows.view(self.num, -1, rows.shape[1])
        return found.transpose(1, 2) if self.is_transposed else found

    def require_whole(self, name: str) -> None:
        """Raises CannotDivide if the layers of `name` cannot be joined to one weight."""
        num_rows, block = self.layer_shape[0], self.parts[0].found.tensors.block[0]
        if len(self.parts) > 1 and block and num_rows % block:
            raise CannotDivide(
                f"{name} has experts of {num_rows} outputs with a scale for each {block}, which are not held "
                "in one piece; give --dequantise"
            )


def is_layer_of_expert(stem: str) -> bool:
    """Returns whether a layer is one of a numbered expert, by its name in the files."""
    return _EXPERT.search(stem) is not None


def experts_of_layers(
    stored: StoredLayers, modules: Mapping[str, nn.Module], stems: Iterable[tuple[str, str]]
) -> dict[str, StoredExperts]:
    """Returns the experts whose layers are stored one by one, by the name of the parameter in the model.

    `stems`: the name of such a parameter, and that of a layer in the files. Raises StrangeExperts.
    """
    parts = defaultdict[str, list[tuple[int, int, str]]](list)
    for name, stem in stems:
        match = _EXPERT.search(stem)
        assert match is not None
        parts[name].append((int(match[1]), _ORDER[match[2]], stem))
    found = {}
    for name, layers in parts.items():
        module, shape = _shape_of(modules, name)
        each = 2 if name.endswith("gate_up_proj") else 1
        is_plain = not getattr(module, "is_transposed", True) and not getattr(module, "has_bias", True)
        wanted = [(expert, part) for expert in range(shape[0] if shape else 0) for part in range(each)]
        if len(shape) != 3 or not is_plain or [one[:2] for one in sorted(layers)] != wanted:
            raise StrangeExperts(
                f"{name} of shape {list(shape)} is not made of the {len(layers)} experts' layers in the files"
            )
        tensors = [stored.of_layer(stem, shape[1] // each, shape[2]) for *_, stem in sorted(layers)]
        found[name] = StoredExperts([stored.weight(one, None) for one in tensors], shape[0], False)
    return found


def experts_in_one(
    stored: StoredLayers, modules: Mapping[str, nn.Module], names: Mapping[str, str]
) -> dict[str, StoredExperts]:
    """Returns the experts in MXFP4, by the name of the parameter in the model: those of `names`, which is the
    name in the files of each. Raises StrangeExperts."""
    found = {}
    assert isinstance(stored.format, Mxfp4Format)
    for name, stem in names.items():
        module, shape = _shape_of(modules, name)
        if len(shape) != 3:
            raise StrangeExperts(f"{stem} is stored in {stored.format.name}, and is no product of experts")
        is_transposed = bool(getattr(module, "is_transposed", False))
        num, n, k = (shape[0], shape[2], shape[1]) if is_transposed else shape
        try:
            wanted = stored.format.of_experts(num, n, k)
        except ValueError as error:
            raise UnreadableWeights(stored.directory, f"{stem}: {error}") from error
        weight = stored.weight(stored.checked(stem, wanted), None)
        found[name] = StoredExperts([weight], num, is_transposed)
    return found


def _shape_of(modules: Mapping[str, nn.Module], name: str) -> tuple[Any, tuple[int, ...]]:
    """Returns the module that has a parameter, and the parameter's shape; () if the model has none."""
    of, _, own = name.rpartition(".")
    parameter = getattr(modules.get(of), own, None)
    return modules.get(of), tuple(parameter.shape) if isinstance(parameter, torch.Tensor) else ()
