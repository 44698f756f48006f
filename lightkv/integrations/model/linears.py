"""The linear layers of a model, made ready in one pass and told in one report.

    prepare_linears
      join      layers of one input become one product, whose weight holds the weights of the parts
      compute   each product picks its way by the number of tokens; large weights on a CPU are packed

Whatever changes the products of a loaded model is a step of this pass, so that the steps see each other: what
was joined is packed as one. The division among ranks is no step of it, because it comes earlier: a rank reads
its part of each weight only (`integrations/ranks/sharded.py`).
"""

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightkv.integrations.weights import onednn
from lightkv.integrations.weights.experts import QuantisedExperts
from lightkv.integrations.weights.plain import PlainWeight
from lightkv.integrations.weights.quantised import QuantisedWeight
from lightkv.integrations.weights.weight import Weight
from lightkv.integrations.weights.weight_part import WeightPart


@dataclass
class Linears:
    """What `prepare_linears` did.

    `joined`, `names`: the weight of the layers that were joined in a module, and how they are called there.
    `num_placed`: the weights that were packed. `lines`: what to report.
    """

    joined: dict[nn.Module, Weight] = field(default_factory=dict)
    names: dict[nn.Module, Sequence[str]] = field(default_factory=dict)
    num_placed: int = 0
    lines: list[str] = field(default_factory=list)


def prepare_linears(
    model: nn.Module,
    one_input: Mapping[nn.Module, Mapping[nn.Module, Sequence[str]]] | None = None,
    *,
    packed: bool = False,
    few_tokens: bool = False,
) -> Linears:
    """Joins linear layers of `model` and gives each product the way in which it runs.

    `one_input`: by decoder layer, in the order in which they run, and by a module in it, the names of the
    linear layers of this module that get the same input: these are joined. `packed`: whether float32 layers on
    a CPU are packed. `few_tokens`: whether layers on a GPU compute few tokens by kernels of ours.

    Only layers of exactly the type nn.Linear, without hooks and with the forward pass of their class, are
    changed: another one may compute something else. At most one decoder layer's weights are in memory twice at
    a time. A model that was prepared before keeps the memory that its weights are in.
    """
    linears = Linears()
    shared, layers = shared_parameters(model), one_input or {}
    # Else a weight could come to lie in large memory that a pass has freed, which torch could not give back.
    torch.cuda.empty_cache()
    moved: list[nn.Module] = []
    for layer, groups in layers.items():
        joined, has_moved = _join_in(layer, groups, shared)
        linears.joined |= joined
        linears.names |= groups
        moved += [layer] if has_moved else []
    for layer in moved[:1]:
        move_by_cpu(one for one in layer.parameters() if type(one) is nn.Parameter and one.is_cuda)
    if packed:
        _pack(model, linears)
    if few_tokens:
        _place(model, linears)
    for module in model.modules() if few_tokens else ():
        if is_plain(module) and cast(nn.Linear, module).weight.is_cuda:
            _set_forward(cast(nn.Linear, module))
    return linears


def reset_forwards(root: nn.Module, functions: Sequence[Callable[..., Any]]) -> None:
    """Gives the parts of `root` whose forward pass is a partial of one of `functions` that of their class."""
    for module in root.modules():
        if forward_of(module, *functions) is not None:
            del cast(Any, module).forward


def forward_of(module: nn.Module, *functions: Callable[..., Any]) -> "partial[Any] | None":
    """Returns the forward pass of `module` if it is a partial of one of `functions`; else None."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, partial) and forward.func in functions else None


def has_hooks(module: nn.Module) -> bool:
    """Returns whether `module` has hooks, or a forward pass other than its class's."""
    return has_registered_hooks(module) or "forward" in vars(module)


def has_registered_hooks(module: nn.Module) -> bool:
    """Returns whether code runs before or after the forward and backward passes of `module`."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)


def is_plain(module: nn.Module) -> bool:
    """Returns whether `module` is exactly an nn.Linear, which may be computed in another way."""
    if type(module) is not nn.Linear or has_hooks(module):
        return False
    return all(type(parameter) is nn.Parameter for parameter in module.parameters())


def shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that stand in more than one place of `model`."""
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if parameter in seen else seen).add(parameter)
    return shared


# --------------------------------------------------------------------------------
# Join


def join(parent: nn.Module, names: Sequence[str], shared: Container[nn.Parameter]) -> Weight | None:
    """Joins the linear layers of `parent` called `names`, which are given the same input.

    Returns None, with nothing changed, unless all are plain and hold their weights alone: a parameter in
    `shared` belongs to another module, too. Layers that were joined before stay in the memory they are in.
    """
    parts = [getattr(parent, name) for name in names]
    if all(isinstance(part, WeightPart) for part in parts):
        weights = [part.of for part in parts]
        if all(weight is weights[0] for weight in weights):
            return cast(Weight, weights[0])
        if not all(isinstance(weight, QuantisedWeight) for weight in weights):
            return None
        if (joined := QuantisedWeight.join(weights)) is not None:
            begin = 0
            for part in parts:
                part.of, part.begin = joined, begin
                begin += part.out_features
        return joined
    if not all(is_plain(part) for part in parts):
        return None
    kinds = {(part.weight.dtype, part.weight.device, part.weight.shape[1]) for part in parts}
    parameters = [parameter for part in parts for parameter in part.parameters()]
    if len(kinds) > 1 or any(parameter in shared for parameter in parameters):
        return None
    return PlainWeight.join(parts)


def _join_in(
    layer: nn.Module, groups: Mapping[nn.Module, Sequence[str]], shared: set[nn.Parameter]
) -> tuple[dict[nn.Module, Weight], bool]:
    """Joins each of `groups` in a decoder layer. Returns the weights by the module that they are in, and
    whether the layer is in other memory of a GPU now."""
    on_gpu = any(parameter.is_cuda for parameter in layer.parameters())
    before = [parameter.data for parameter in layer.parameters()] if on_gpu else []
    joined = {
        module: one for module, names in groups.items() if (one := join(module, names, shared)) is not None
    }
    places = zip(layer.parameters(), before, strict=False)
    has_moved = any(parameter.data_ptr() != old.data_ptr() for parameter, old in places)
    if has_moved:
        # transformers loads all weights into one block of memory. If the others stayed, the block would keep
        # holes that fit no joined weight. A layer that moves as a whole leaves room for the next one.
        for module in layer.modules():
            if is_plain(module):
                _move(module.weight, shared)
    del before
    if on_gpu:
        torch.cuda.empty_cache()
    return joined, has_moved


def _move(weight: Any, shared: set[nn.Parameter]) -> None:
    """Puts a weight into other memory, unless it is part of a larger tensor or stands in several places."""
    if weight not in shared and weight.untyped_storage().nbytes() == weight.nbytes:
        weight.data = weight.data.clone()


def move_by_cpu(parameters: Iterable[Tensor]) -> None:
    """Puts the parameters of a layer on a GPU into memory that is free by now. The first layer that is joined
    gets memory of its own, and the last one leaves as much free within the block that all weights were loaded
    into. The first one moves there, so that torch can give its memory back."""
    storages = {one.data_ptr(): one for one in map(Tensor.untyped_storage, parameters)}
    copies = [
        (one, torch.UntypedStorage(one.nbytes()).copy_(one)) for one in storages.values() if one.resizable()
    ]
    copies.sort(key=lambda pair: pair[0].nbytes(), reverse=True)
    for storage, _ in copies:
        storage.resize_(0)
    torch.cuda.empty_cache()
    for storage, copy in copies:
        storage.resize_(copy.nbytes())
        storage.copy_(copy)


# --------------------------------------------------------------------------------
# Compute


def linear_forward(weight: Weight, x: Tensor) -> Tensor:
    """The forward pass of a linear layer."""
    return weight.matmul(x)


def size_of(model: nn.Module) -> tuple[int, int]:
    """Returns how many weights `model` has, and their bytes, with those that are no parameters."""
    held: set[Any] = set(model.parameters())
    for module in model.modules():
        own = (module.of,) if isinstance(module, WeightPart) else vars(module).values()
        held |= {one for one in own if isinstance(one, QuantisedWeight | QuantisedExperts)}
    biases = [one.bias for one in held if isinstance(one, QuantisedWeight) and one.bias is not None]
    return sum(one.shape.numel() for one in [*held, *biases]), sum(one.nbytes for one in held)


def _set_forward(layer: nn.Linear) -> None:
    cast(Any, layer).forward = partial(linear_forward, PlainWeight.load(layer))


def _pack(model: nn.Module, linears: Linears) -> None:
    """Packs large float32 weights of `model` on a CPU, puts a WeightPart in the place of each of their layers,
    and gives the smaller ones `linear_forward`.

    At most one weight at a time is in memory twice; one that something else holds, as an embedding holds that
    of a tied head, stays there. If torch lacks oneDNN, this reports so and changes nothing.
    """
    if not (places := _places(model)):
        return
    if not onednn.has_onednn():
        linears.lines.append(
            "linear layers are not packed: this torch has no oneDNN, which would make decoding faster"
        )
        return
    began, num_bytes = time.perf_counter(), 0
    for module, weight in linears.joined.items():
        if not isinstance(weight, PlainWeight):
            continue
        parts = [(name, getattr(module, name)) for name in linears.names[module]]
        if weight.shape.numel() >= onednn.LEAST_NUMBERS and all(part in places for _, part in parts):
            begin = 0
            for name, part in parts:
                del places[part]
                setattr(module, name, WeightPart(weight, begin, part.out_features))
                begin += part.out_features
            del parts, part
            weight.pack()
            linears.num_placed, num_bytes = linears.num_placed + 1, num_bytes + weight.nbytes
    while places:
        layer, where = places.popitem()
        if layer.weight.numel() < onednn.LEAST_NUMBERS:
            _set_forward(layer)
            continue
        weight = PlainWeight.load(layer)
        weight.pack()
        stand_in = WeightPart(weight, 0, layer.out_features)
        for parent, name in where:
            setattr(parent, name, stand_in)
        linears.num_placed, num_bytes = linears.num_placed + 1, num_bytes + weight.nbytes
    if linears.num_placed:
        linears.lines.append(
            f"packed {linears.num_placed} linear layers of {num_bytes / 2**20:,.1f} MiB for the CPU in "
            f"{time.perf_counter() - began:.1f} s"
        )


def _place(model: nn.Module, linears: Linears) -> None:
    """Gives quantised weights on a GPU the form in which a library multiplies them."""
    begun = time.perf_counter()
    weights = {part.of: None for part in model.modules() if isinstance(part, WeightPart)}
    num = sum(isinstance(weight, QuantisedWeight) and weight.place() for weight in weights)
    if num:
        linears.num_placed += num
        took = time.perf_counter() - begun
        linears.lines.append(f"{num} weights made ready for humming-kernels in {took:.1f} s")


def _places(model: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """Returns the layers that can be packed, each with its (parent, name) pairs: it may have several."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and is_plain(child):
                weight = cast(nn.Linear, child).weight
                if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel():
                    places.setdefault(cast(nn.Linear, child), []).append((parent, name))
    return places
