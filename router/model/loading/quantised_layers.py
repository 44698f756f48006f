"""Finds the quantised layers of a checkpoint from the headers of its files, and reads their weights.

transformers loads the model without them: a `WeightPart` stands in the place of each, and its weight is read
once all else is loaded, and divided among ranks. Layers that the checkpoint leaves out are plain, and stay so.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.experts.mixture import run_quantised_experts
from lightkv.integrations.weights.config import UnknownQuantisation, weight_format
from lightkv.integrations.weights.float4 import Mxfp4Format
from lightkv.integrations.weights.quantised import Format, kinds
from lightkv.integrations.weights.weight_part import WeightPart
from lightkv.router.model_files import StoredTensor, UnreadableWeights, list_some

from .stored_experts import (
    StoredExperts,
    StrangeExperts,
    experts_in_one,
    experts_of_layers,
    is_layer_of_expert,
)
from .stored_weight import OpenFiles, StoredLayers, StoredWeight
from .text_half import TextHalf, stored_names

_FEW_BITS = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")  # of which a plain tensor cannot be made without scales


@dataclass(frozen=True)
class QuantisedLayers:
    """The quantised layers of a checkpoint. `weights` and `experts`: by the name in the model of a layer, or of
    the parameter of experts. `names`: of their tensors in the files."""

    format: Format
    weights: Mapping[str, StoredWeight]
    experts: Mapping[str, StoredExperts]
    names: frozenset[str]

    @property
    def needs_library(self) -> bool:
        """Whether a GPU multiplies some of the weights by the library alone: those of experts always."""
        return bool(self.experts) or self.format.needs_library

    def model_class(self, base: Any) -> Any:
        """Returns a subclass of a class of models, in whose models a WeightPart without numbers stands in the
        place of each layer. Name and module are those of `base`: by them transformers finds what to do with
        names."""
        weights, experts = self.weights, self.experts

        def init(model: Any, config: PreTrainedConfig) -> None:
            base.__init__(model, config)
            for name, weight in weights.items():
                model.set_submodule(name, WeightPart(weight, 0, weight.shape[0]))
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
                if isinstance(one, StoredExperts) and dense:
                    delattr(module, name)
                    setattr(module, name, nn.Parameter(one.read_dense(files, dtype), requires_grad=False))
                elif isinstance(one, StoredExperts):
                    setattr(module, name, one.read(files, dtype))
        run_quantised_experts(model)

    def num_bytes(self, itemsize: int) -> int:
        """Returns the bytes of the weights as plain ones of `itemsize` bytes, and those of the largest one,
        which is in memory twice while it is made."""
        shapes = [one.shape for one in self.weights.values()] + [one.shape for one in self.experts.values()]
        sizes = [shape.numel() for shape in shapes]
        return (sum(sizes) + max(sizes)) * itemsize

    def require_whole(self) -> None:
        """Raises CannotDivide for experts that would not be held in one piece."""
        for name, experts in self.experts.items():
            experts.require_whole(name)


def quantised_layers(
    directory: Path,
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
    half: TextHalf | None,
    dtype: torch.dtype,
) -> QuantisedLayers | None:
    """Returns the quantised layers of the checkpoint in `directory`, of which the model builds the tensors
    `stored`, for products in `dtype`; None if it has none.

    Raises:
        UnsupportedModel: the format is unknown, or a layer of the model has none that is read here.
        UnreadableWeights: the tensors do not fit the format that the configuration names.
    """
    try:
        format = weight_format(config)
    except UnknownQuantisation as error:
        raise UnsupportedModel(_architecture(config), str(error)) from error
    if format is None:
        if strange := sorted(_in_few_bits(stored)):
            reason = f"stores {list_some(strange)} in fp8, and config.json has no quantization_config for it"
            raise UnreadableWeights(directory, reason)
        return None
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM if half is None else half.model_class
        model = auto.from_config(config, dtype=torch.bfloat16)
    left_out = {} if half is None else half.places(stored)
    known = StoredLayers(
        directory,
        {name: one for name, one in stored.items() if name not in left_out},
        format,
        dtype,
    )
    stems = sorted(name.removesuffix(format.marker) for name in known.tensors if name.endswith(format.marker))
    if not stems:
        reason = (
            f"has no tensor …{format.marker[1:]}, though config.json says that its weights are {format.name}"
        )
        raise UnreadableWeights(directory, reason)
    modules = dict(cast(nn.Module, model).named_modules())
    try:
        if isinstance(format, Mxfp4Format):
            places = stored_names(model, stems)
            ends = "_blocks", "_scales"
            names = {name for name in known.tensors if name.endswith(ends)}
            alone = [one for one in names if one.endswith(ends[1]) and one.removesuffix(ends[1]) not in stems]
            if alone:
                raise UnreadableWeights(directory, f"has no {ends[0][1:]} for {list_some(sorted(alone))}")
            experts = experts_in_one(known, modules, {places[stem]: stem for stem in stems})
            return QuantisedLayers(format, {}, experts, frozenset(names))
        return _of_layers(known, model, modules, stems)
    except StrangeExperts as error:
        raise UnsupportedModel(_architecture(config), str(error)) from error


def _of_layers(
    known: StoredLayers, model: PreTrainedModel, modules: Mapping[str, nn.Module], stems: list[str]
) -> QuantisedLayers:
    """Returns the layers `stems` in the files, each of which has tensors of its own."""
    directory, format, tensors = known.directory, known.format, known.tensors
    places = stored_names(model, [f"{stem}.weight" for stem in stems])
    owns = {stem: places[f"{stem}.weight"].removesuffix(".weight") for stem in stems}
    names = {name for name in tensors if name.rpartition(".")[0] in owns}
    own_ends = set(format.wanted(128, 128)) - {"weight"}
    if alone := sorted(one for one in tensors if one.rpartition(".")[2] in own_ends and one not in names):
        raise UnreadableWeights(directory, f"has no {format.marker[1:]} for {list_some(alone)}")
    of_experts = {stem: own for stem, own in owns.items() if is_layer_of_expert(stem) and own != stem}
    weights = {}
    for stem, own in owns.items():
        if stem in of_experts:
            continue
        module = modules.get(own)
        if type(module) is not nn.Linear:
            what = f"{stem} is stored in {format.name}, and is no linear layer of the model"
            raise UnsupportedModel(_architecture(model.config), what)
        if module is model.get_output_embeddings() and model.config.get_text_config().tie_word_embeddings:
            reason = f"stores {stem} in {format.name}, and config.json ties it to the embedding"
            raise UnreadableWeights(directory, reason, 'set "tie_word_embeddings": false in config.json')
        found = known.of_layer(stem, module.out_features, module.in_features)
        bias = tensors.get(f"{stem}.bias")
        if bias is not None:
            known.checked(f"{stem}.", {"bias": kinds(("BF16", "F16", "F32"), (module.out_features,))})
        if (bias is None) == (module.bias is not None):
            reason = f"has {'no' if bias is None else 'a'} {stem}.bias, unlike the model of config.json"
            raise UnreadableWeights(directory, reason)
        weights[own] = known.weight(found, bias)
    experts = experts_of_layers(known, modules, [(own, stem) for stem, own in of_experts.items()])
    if strange := sorted(_in_few_bits(tensors) - names):
        raise UnreadableWeights(directory, f"has no {format.marker[1:]} for {list_some(strange)}")
    return QuantisedLayers(format, weights, experts, frozenset(names | set(of_experts.values())))


def _in_few_bits(tensors: Mapping[str, StoredTensor]) -> set[str]:
    """Returns the names of weights in few bits. Queries and K/V that are quantised have zero points in fp8."""
    names = {name for name, one in tensors.items() if one.dtype in _FEW_BITS}
    return {name for name in names if not name.endswith("_zero_point")}


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
