"""Reads quantised weights from the files of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lightkv.integrations.weights.quantised import Format, QuantisedWeight, Wanted
from lightkv.router.model_files import StoredTensor, UnreadableWeights

_TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}


# Tensors beside those of a layer that change nothing in its product: inputs are rounded here, if at all.
_KNOWN = {"bias", "input_scale", "input_global_scale", "input_zero_point", "weight_shape", "g_idx"}
_KNOWN |= {f"{one}_scale" for one in ("k", "v", "q", "output")}
_OTHER_FORMAT = "give a checkpoint without them"


class OpenFiles:
    """The files of a checkpoint, each opened once, and the device that their tensors are read onto."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._files: dict[Path, Any] = {}

    def read(self, stored: StoredTensor) -> Tensor:
        """Returns a tensor in memory of its own: one that is read onto a CPU would be a view of the file."""
        if stored.path not in self._files:
            self._files[stored.path] = safe_open(stored.path, framework="pt", device=str(self.device))
        tensor: Tensor = self._files[stored.path].get_tensor(stored.name)
        return tensor.clone() if self.device.type == "cpu" else tensor


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight in the files. `found`: what is read, without its numbers (on the meta device). `cuts`:
    the parts of it that are read."""

    format: Format
    tensors: Mapping[str, StoredTensor]
    bias_of: StoredTensor | None
    found: QuantisedWeight
    cuts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()

    @property
    def shape(self) -> torch.Size:
        return self.found.shape

    @property
    def bias(self) -> Tensor | None:
        return self.found.bias

    def part(self, dim: int, spans: Any) -> "StoredWeight":
        """Returns what `QuantisedWeight.part` does, of which nothing is read yet."""
        return replace(self, found=self.found.part(dim, spans), cuts=(*self.cuts, (dim, tuple(spans))))

    def without_bias(self) -> "StoredWeight":
        """Returns the weight without its bias."""
        return replace(self, found=self.found.without_bias(), bias_of=None)

    def read(self, files: OpenFiles, dtype: torch.dtype) -> QuantisedWeight:
        """Reads the weight, to be multiplied in `dtype`."""
        if files.device.type == "meta":
            return self.found.like(self.found.tensors, self.found.bias)  # layers of one shape share `found`
        bias = None if self.bias_of is None else files.read(self.bias_of).to(dtype)
        tensors = {name: files.read(one) for name, one in self.tensors.items()}
        weight = self.format.weight(tensors, bias, dtype)
        if not bool(weight.tensors.scales.float().isfinite().all()):
            named = next(iter(self.tensors.values())).name
            raise ValueError(f"the scales of {named} are not all numbers")
        for dim, spans in self.cuts:
            weight = weight.part(dim, spans)
        return weight


@dataclass(frozen=True)
class StoredLayers:
    """The tensors of the checkpoint in `directory`, of which those of quantised layers are in `format`, and are
    multiplied in `dtype`."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    format: Format
    dtype: torch.dtype
    _made: dict[Any, QuantisedWeight] = field(default_factory=dict, compare=False)
    _beside: dict[str, set[str]] = field(default_factory=dict, compare=False)  # last names, by layer

    def __post_init__(self) -> None:
        for name in self.tensors:
            stem, _, last = name.rpartition(".")
            self._beside.setdefault(stem, set()).add(last)

    def weight(self, tensors: Mapping[str, StoredTensor], bias: StoredTensor | None) -> StoredWeight:
        """Returns the weight of the checked `tensors` of a layer."""
        every = (*tensors.values(), *(() if bias is None else (bias,)))
        kind = tuple((one.dtype, one.shape) for one in every), bias is None
        if kind not in self._made:
            empty = {name: _empty(one) for name, one in tensors.items()}
            of_bias = None if bias is None else _empty(bias)
            self._made[kind] = self.format.weight(empty, of_bias, self.dtype)
        return StoredWeight(self.format, tensors, bias, self._made[kind])

    def of_layer(self, stem: str, n: int, k: int) -> dict[str, StoredTensor]:
        """Returns the tensors of a layer of `n` outputs and `k` inputs. Raises UnreadableWeights for one that
        is missing or of another shape or type."""
        try:
            wanted = self.format.wanted(n, k)
        except ValueError as error:
            raise UnreadableWeights(self.directory, f"{stem}: {error}") from error
        if strange := sorted(self._beside[stem] - set(wanted) - _KNOWN):
            reason = f"has {', '.join(strange)} for {stem}, which is not read in {self.format.name}"
            raise UnreadableWeights(self.directory, reason, _OTHER_FORMAT)
        if "g_idx" in self._beside[stem]:
            self._require_order(self.tensors[f"{stem}.g_idx"], k)
        return self.checked(f"{stem}.", wanted)

    def _require_order(self, stored: StoredTensor, k: int) -> None:
        """Raises UnreadableWeights unless the groups of GPTQ's layers are of inputs in their order."""
        num_groups = self.format.wanted(8, k)["scales"][0][1][0][0]
        with safe_open(stored.path, framework="pt") as file:
            found = file.get_tensor(stored.name).flatten()
        if not torch.equal(found.long(), torch.arange(k) // (k // num_groups)):
            reason = f"has groups of inputs in another order ({stored.name}), which is not read"
            raise UnreadableWeights(self.directory, reason, _OTHER_FORMAT)

    def checked(self, before: str, wanted: Wanted) -> dict[str, StoredTensor]:
        """Returns the tensors whose names begin with `before`, and end as `wanted` says. Raises
        UnreadableWeights for one that is missing or of another shape or type."""
        found = {}
        for name, kinds in wanted.items():
            one = self.tensors.get(f"{before}{name}")
            if one is None or not any(one.dtype in types and one.shape in shapes for types, shapes in kinds):
                is_now = "is missing" if one is None else f"is {one.dtype} {list(one.shape)}"
                wants = " or ".join(
                    f"{' or '.join(types)} {' or '.join(str(list(shape)) for shape in shapes)}"
                    for types, shapes in kinds
                )
                reason = f"{before}{name} {is_now}, and has to be {wants} in {self.format.name}"
                raise UnreadableWeights(self.directory, reason)
            found[name] = one
        return found


def _empty(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, dtype=_TYPES.get(stored.dtype, torch.bfloat16), device="meta")
