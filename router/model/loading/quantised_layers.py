"""Finds the quantised layers of a checkpoint from the headers of its files, and reads their weights.

transformers loads the model without them: a `WeightPart` stands in the place of each, and its weight is read
once all else is loaded, and divided among ranks. Layers that the checkpoint leaves out are plain, and stay so.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lightkv.errors import LightKVError, UnsupportedModel
from lightkv.integrations.model.experts.mixture import run_quantised_experts
from lightkv.integrations.weights.config import UnknownQuantisation, weight_format
from lightkv.integrations.weights.experts import QuantisedExperts
from lightkv.integrations.weights.quantised import Format, QuantisedWeight
from lightkv.integrations.weights.weight_part import WeightPart
from lightkv.router.model_files import StoredTensor, UnreadableWeights, list_some

from .text_half import TextHalf, stored_names

_TYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
# A layer of an expert, and in which order those of one input are joined.
_ORDER = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 0, "w2": 0}
_EXPERT = re.compile(rf"\.(\d{{1,5}})\.({'|'.join(_ORDER)})$")
_FEW_BITS = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")  # of which a plain tensor cannot be made without scales


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

    @classmethod
    def of(
        cls, format: Format, tensors: Mapping[str, StoredTensor], bias: StoredTensor | None
    ) -> "StoredWeight":
        """Returns the weight of the checked `tensors` of a layer."""
        empty = {name: _empty(one) for name, one in tensors.items()}
        of_bias = None if bias is None else _empty(bias)
        return cls(format, tensors, bias, format.weight(empty, of_bias, torch.bfloat16))

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
            return self.found
        bias = None if self.bias_of is None else files.read(self.bias_of).to(dtype)
        tensors = {name: files.read(one) for name, one in self.tensors.items()}
        weight = self.format.weight(tensors, bias, dtype)
        for dim, spans in self.cuts:
            weight = weight.part(dim, spans)
        return weight


@dataclass(frozen=True)
class StoredExperts:
    """The quantised weights of `num` experts in the files: those of an expert follow each other in `parts`."""

    parts: Sequence[StoredWeight]
    num: int

    def read(self, files: OpenFiles, dtype: torch.dtype) -> QuantisedExperts:
        """Reads the weights, to be multiplied in `dtype`."""
        joined = QuantisedWeight.join([part.read(files, dtype) for part in self.parts])
        if joined is None:
            raise LightKVError(
                "experts whose outputs are no whole blocks of scales are not held in one piece"
            )
        return QuantisedExperts(joined, self.num)


@dataclass(frozen=True)
class QuantisedLayers:
    """The quantised layers of a checkpoint. `weights` and `experts`: by the name in the model of a layer, or of
    the parameter of experts. `names`: of their tensors in the files."""

    format: Format
    weights: Mapping[str, StoredWeight]
    experts: Mapping[str, StoredExperts]
    names: frozenset[str]

    def model_class(self, base: Any) -> Any:
        """Returns a subclass of a class of models, in whose models a WeightPart without numbers stands in the
        place of each layer. Name and module are those of `base`: by them transformers finds what to do with
        names."""
        weights, experts = self.weights, self.experts

        def init(model: Any, config: PreTrainedConfig) -> None:
            base.__init__(model, config)
            for name, weight in weights.items():
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, WeightPart(weight, 0, weight.shape[0]))
            for name, stored in experts.items():
                parent, _, own = name.rpartition(".")
                module = model.get_submodule(parent)
                delattr(module, own)
                setattr(module, own, stored)
                module._is_hf_initialized = True  # it has nothing that transformers could fill with noise

        def from_config(cls: Any, config: PreTrainedConfig, **arguments: Any) -> Any:
            return cls._from_config(copy.deepcopy(config), **arguments)  # which writes into it

        body = {"__init__": init, "__module__": base.__module__, "from_config": classmethod(from_config)}
        return type(base.__name__, (base,), body)

    def read(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, dense: bool) -> None:
        """Reads the weights of the layers of a loaded `model` onto `device`. `dense`: as plain linear
        layers."""
        files = OpenFiles(device)
        for parent in list(cast(nn.Module, model).modules()):
            for name, part in list(parent.named_children()):
                if isinstance(part, WeightPart) and isinstance(part.of, StoredWeight):
                    part.of = part.of.read(files, dtype)
                    if dense:
                        setattr(parent, name, _dense(part))
        for module in cast(nn.Module, model).modules():
            for name, one in list(vars(module).items()):
                if isinstance(one, StoredExperts):
                    delattr(module, name)
                    read = one.read(files, dtype)
                    setattr(module, name, nn.Parameter(read.dense(), requires_grad=False) if dense else read)
        run_quantised_experts(model)

    def num_bytes(self, itemsize: int) -> int:
        """Returns the bytes of the weights as plain ones of `itemsize` bytes."""
        parts = [*self.weights.values(), *(part for one in self.experts.values() for part in one.parts)]
        return sum(weight.shape.numel() for weight in parts) * itemsize


def quantised_layers(
    directory: Path, config: PreTrainedConfig, stored: Mapping[str, StoredTensor], half: TextHalf | None
) -> QuantisedLayers | None:
    """Returns the quantised layers of the checkpoint in `directory`, whose tensors are `stored`; None if it has
    none.

    Raises:
        UnsupportedModel: the format is unknown, or a layer of the model has none that is read here.
        UnreadableWeights: the tensors do not fit the format that the configuration names.
    """
    try:
        format = weight_format(config)
    except UnknownQuantisation as error:
        raise UnsupportedModel(_architecture(config), str(error)) from error
    if format is None:
        if strange := sorted(name for name, one in stored.items() if one.dtype in _FEW_BITS):
            reason = f"stores {list_some(strange)} in fp8, and config.json has no quantization_config for it"
            raise UnreadableWeights(directory, reason)
        return None
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM if half is None else half.model_class
        model = auto.from_config(config, dtype=torch.bfloat16)
    left_out = {} if half is None else half.places(stored)
    known = {name: one for name, one in stored.items() if name not in left_out}
    ends = {name.rpartition(".")[0] for name in known if name.endswith(f".{format.marker}")}
    if not ends:
        reason = f"has no tensor …{format.marker}, though config.json says that its weights are {format.name}"
        raise UnreadableWeights(directory, reason)
    weights, names, parts = {}, set[str](), defaultdict[str, list[tuple[int, int, str]]](list)
    modules = dict(cast(nn.Module, model).named_modules())
    places = stored_names(model, [f"{stem}.weight" for stem in ends])
    for stem in sorted(ends):
        own = places[f"{stem}.weight"].removesuffix(".weight")
        names |= {name for name in known if name.rpartition(".")[0] == stem}
        module, expert = modules.get(own), _EXPERT.search(stem)
        if expert is not None and own != stem:
            names.add(own)
            parts[own].append((int(expert[1]), _ORDER[expert[2]], stem))
            continue
        if type(module) is not nn.Linear:
            what = f"{stem} is stored in {format.name}, and is no linear layer of the model"
            raise UnsupportedModel(_architecture(config), what)
        tensors = _checked(directory, known, stem, (module.out_features, module.in_features), format)
        bias = known.get(f"{stem}.bias")
        if (bias is None) == (module.bias is not None):
            reason = f"has {'no' if bias is None else 'a'} {stem}.bias, unlike the model of config.json"
            raise UnreadableWeights(directory, reason)
        weights[own] = StoredWeight.of(format, tensors, bias)
    experts = {}
    for own, stems in parts.items():
        module = modules.get(own.rpartition(".")[0])
        shape = tuple(getattr(module, own.rpartition(".")[2], torch.empty(0)).shape)
        each = 2 if own.endswith("gate_up_proj") else 1
        is_plain = not getattr(module, "is_transposed", True) and not getattr(module, "has_bias", True)
        if (
            len(shape) != 3
            or not is_plain
            or [one[:2] for one in sorted(stems)]
            != [(expert, part) for expert in range(shape[0]) for part in range(each)]
        ):
            what = (
                f"{own} of shape {list(shape)} is not made of the {len(stems)} experts' layers in the files"
            )
            raise UnsupportedModel(_architecture(config), what)
        found = [
            _checked(directory, known, stem, (shape[1] // each, shape[2]), format)
            for *_, stem in sorted(stems)
        ]
        experts[own] = StoredExperts([StoredWeight.of(format, one, None) for one in found], shape[0])
    if strange := sorted(name for name, one in known.items() if one.dtype in _FEW_BITS and name not in names):
        raise UnreadableWeights(directory, f"has no {format.marker} for {list_some(strange)}")
    return QuantisedLayers(format, weights, experts, frozenset(names))


def _checked(
    directory: Path, stored: Mapping[str, StoredTensor], stem: str, shape: tuple[int, int], format: Format
) -> dict[str, StoredTensor]:
    """Returns the tensors of a layer. Raises UnreadableWeights for one that is missing or of another shape."""
    try:
        wanted = format.wanted(*shape)
    except ValueError as error:
        raise UnreadableWeights(directory, f"{stem}: {error}") from error
    found = {}
    for name, (types, shapes) in wanted.items():
        one = stored.get(f"{stem}.{name}")
        if one is None or one.dtype not in types or one.shape not in shapes:
            is_now = "is missing" if one is None else f"is {one.dtype} {list(one.shape)}"
            wants = f"{' or '.join(types)} {' or '.join(str(list(shape)) for shape in shapes)}"
            reason = f"{stem}.{name} {is_now}, and has to be {wants} in {format.name}"
            raise UnreadableWeights(directory, reason)
        found[name] = one
    return found


def _dense(part: WeightPart) -> nn.Linear:
    """Returns a plain linear layer with the weight of `part`."""
    bias = part.bias
    with torch.device("meta"):
        linear = nn.Linear(part.in_features, part.out_features, bias=bias is not None)
    linear.weight = nn.Parameter(part.weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _architecture(config: PreTrainedConfig) -> str:
    return (getattr(config, "architectures", None) or [config.model_type])[0]


def _empty(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, dtype=_TYPES.get(stored.dtype, torch.bfloat16), device="meta")
