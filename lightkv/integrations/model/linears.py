"""The linear layers of a model, made ready in one pass and told in one report.

    prepare_linears
      join      layers of one input become one product, whose weight holds the weights of the parts
      compute   each product gets the way in which it runs: packed or plain on a CPU, as measured there; on a
                GPU by kernels for few tokens

Whatever changes the products of a loaded model is a step of this pass, so that the steps see each other: what
was joined is packed as one. The division among ranks is no step of it, because it comes earlier: a rank reads
its part of each weight only (`integrations/ranks/sharded.py`).
"""

import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightkv.triton_kernels.layers.linear import linear, tickets_for

from .cpu_linear import MIN_WEIGHTS, Layout, PackedLinear, PlainLinear, choose, has_onednn, measure

MEASURING_SECONDS = 1.0  # after which no further shape is measured


@dataclass
class Linears:
    """What `prepare_linears` did: `joined` by the module that the parts belong to, and the lines to report.

    `num_placed`: the layers that were replaced by packed or plain ones.
    """

    model: nn.Module
    joined: dict[nn.Module, "JoinedLinear"] = field(default_factory=dict)
    num_placed: int = 0
    lines: list[str] = field(default_factory=list)

    def by_shape(self) -> list[list[nn.Linear]]:
        """Returns the linear layers that the decoder layers compute, by the shape of their weight.

        Joined layers stand for their parts. The LM head is left out, which computes the samples alone, and so
        are the weights of experts, which compute a part of the tokens each: they are no linear layers, or stand
        in a list. So are layers that are packed.
        """
        layers = [
            module
            for module in self.model.modules()
            if any(hasattr(child, "layer_idx") for child in module.children())
        ]
        parts = {part for one in self.joined.values() for part in one.parts}
        found = {module: None for layer in layers for module in _without_lists(layer) if module not in parts}
        by_shape: dict[torch.Size, list[nn.Linear]] = {}
        for module in [*(one.linear for one in self.joined.values()), *found]:
            if type(module) is nn.Linear:
                by_shape.setdefault(module.weight.shape, []).append(module)
        return list(by_shape.values())


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
    linears = Linears(model)
    shared = shared_parameters(model)
    for layer, groups in (one_input or {}).items():
        linears.joined |= _join_in(layer, groups, shared)
    if packed:
        _place(linears)
    if few_tokens:
        _set_linear_forwards([model, *linears.joined.values()])
    return linears


def reset_forwards(root: nn.Module, functions: Sequence[Callable[..., Any]]) -> None:
    """Gives the parts of `root` whose forward pass is a partial of one of `functions` that of their class."""
    for module in root.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func in functions:
            del module.forward


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


def _without_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module and those below it, but for what stands in a list."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _without_lists(child)


# --------------------------------------------------------------------------------
# Join


class JoinedLinear(nn.Module):
    """Computes linear layers of one input as one product: maps `[..., C]` to `[..., sum of their outputs]`.

    `linear` is the joined layer. Layers without a bias get one of zeros if another one has a bias. `join` makes
    this; it stands in no model, but belongs to the forward pass that uses it.
    """

    def __init__(self, parent: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._places = [(parent, name) for name in names]
        parts = [cast(nn.Linear, getattr(parent, name)) for name in names]
        self.sizes = [part.out_features for part in parts]
        weight = _join([part.weight for part in parts])
        self.linear: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if any(part.bias is not None for part in parts):
            zeros = weight.new_zeros
            biases = [part.bias if part.bias is not None else zeros(part.out_features) for part in parts]
            self.linear.bias = nn.Parameter(_join(biases), requires_grad=False)
        self.eval()

    @property
    def parts(self) -> list[nn.Module]:
        """The layers that were joined; where they were released, what stands in their places."""
        return [getattr(parent, name) for parent, name in self._places]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear(x))

    def release_parts(self) -> None:
        """Puts a JoinedPart in the place of each part, so that the model holds the joined weight alone.

        For a CPU, where `linear` is then replaced by a packed layer: views of the plain weight would keep it.
        """
        begin = 0
        for (parent, name), size in zip(self._places, self.sizes, strict=True):
            if not isinstance(getattr(parent, name), JoinedPart):
                setattr(parent, name, JoinedPart(self, begin, size))
            begin += size


class JoinedPart(nn.Module):
    """Stands in a model for the part of a JoinedLinear whose outputs begin at `begin`."""

    def __init__(self, joined: JoinedLinear, begin: int, size: int) -> None:
        super().__init__()
        self.joined = joined
        self.out_features = size
        self._begin = begin
        self.eval()

    @property
    def in_features(self) -> int:
        return cast(int, self.joined.linear.in_features)

    @property
    def weight(self) -> Tensor:
        """The weight of the part, `[out_features, in_features]`; a copy if the joined weight is packed."""
        return cast(Tensor, self.joined.linear.weight).narrow(0, self._begin, self.out_features)

    @property
    def bias(self) -> Tensor | None:
        bias = cast(Tensor | None, self.joined.linear.bias)
        return None if bias is None else bias.narrow(0, self._begin, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the whole product, and returns the outputs of the part."""
        return cast(Tensor, self.joined(x)).narrow(-1, self._begin, self.out_features)


def join(parent: nn.Module, names: Sequence[str], shared: Container[nn.Parameter]) -> JoinedLinear | None:
    """Joins the linear layers of `parent` called `names`, which are given the same input.

    Returns None, with nothing changed, unless all are plain and hold their weights alone: a parameter in
    `shared` belongs to another module, too. Layers that were joined before stay in the memory they are in.
    """
    parts = [getattr(parent, name) for name in names]
    if all(isinstance(part, JoinedPart) for part in parts):
        (joined, *others) = [part.joined for part in parts]
        return joined if all(other is joined for other in others) else None
    if not all(is_plain(part) for part in parts):
        return None
    kinds = {(part.weight.dtype, part.weight.device, part.weight.shape[1]) for part in parts}
    parameters = [parameter for part in parts for parameter in part.parameters()]
    if len(kinds) > 1 or any(parameter in shared for parameter in parameters):
        return None
    return JoinedLinear(parent, names)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Returns the concatenation of `parts`, which become views of it; no copy if they are views already."""
    if (whole := _whole(parts)) is not None:
        return whole
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = view
    return joined


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns one view of what `parts` are consecutive views of; None if they are not."""
    first = parts[0].detach()
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _join_in(
    layer: nn.Module, groups: Mapping[nn.Module, Sequence[str]], shared: set[nn.Parameter]
) -> dict[nn.Module, JoinedLinear]:
    """Joins each of `groups` in a decoder layer; returns the products by the module that they are in."""
    on_gpu = any(parameter.is_cuda for parameter in layer.parameters())
    before = [parameter.data for parameter in layer.parameters()] if on_gpu else []
    joined = {
        module: one for module, names in groups.items() if (one := join(module, names, shared)) is not None
    }
    if before and joined:
        # transformers loads all weights into one block of memory. If the others stayed, the block would keep
        # holes that fit no joined weight. A layer that moves as a whole leaves room for the next one.
        for module in layer.modules():
            if is_plain(module):
                _move(module.weight, shared)
    del before
    if on_gpu:
        torch.cuda.empty_cache()
    return joined


def _move(weight: Any, shared: set[nn.Parameter]) -> None:
    """Puts a weight into other memory, unless it is part of a larger tensor or stands in several places."""
    if weight not in shared and weight.untyped_storage().nbytes() == weight.nbytes:
        weight.data = weight.data.clone()


# --------------------------------------------------------------------------------
# On a GPU: kernels for few tokens


def linear_forward(module: Any, tickets: Tensor, x: Tensor) -> Tensor:
    """The forward pass of a linear layer on a GPU, which picks its kernel by the number of tokens."""
    return linear(x, module.weight, module.bias, tickets)


def _set_linear_forwards(roots: Iterable[nn.Module]) -> None:
    """Gives plain linear layers on a GPU, among `roots` and their parts, the forward pass `linear_forward`."""
    # Products run one after the other, so those of one shape can share their tickets.
    tickets: dict[tuple[torch.device, int], Tensor] = {}
    for module in (module for root in roots for module in root.modules()):
        if is_plain(module) and (weight := cast(nn.Linear, module).weight).is_cuda:
            key = weight.device, len(weight)
            if key not in tickets:
                tickets[key] = tickets_for(weight)
            module.forward = partial(linear_forward, module, tickets[key])


# --------------------------------------------------------------------------------
# On a CPU: packed or plain


def _place(linears: Linears) -> None:
    """Replaces the layers that are float32 and on the CPU by PackedLinear, or by PlainLinear if layers of their
    shape are measured to be clearly faster so.

    At most one layer at a time is in memory twice; a weight that something else holds, as an embedding holds
    that of a tied head, stays there. If torch lacks oneDNN, this reports so and changes nothing.
    """
    model = linears.model
    if not _places(model):
        return
    if not has_onednn():
        linears.lines.append(
            "linear layers are not packed: this torch has no oneDNN, which would make decoding faster"
        )
        return
    for one in linears.joined.values():
        if any(_is_packable(parameter) for parameter in one.parameters()):
            one.release_parts()
    began = time.perf_counter()
    measuring = 0.0
    num_packed, num_disturbed, plain = 0, 0, []
    for (rows, columns), layers in _by_shape(model):
        layout = Layout()
        if rows * columns >= MIN_WEIGHTS and measuring < MEASURING_SECONDS:
            sides = _sides(layers)
            start = time.perf_counter()
            times = measure(*sides)
            measuring += time.perf_counter() - start
            del sides
            num_disturbed += not times
            layout = choose(times)
        for layer in layers:
            layer.put_packed() if layout.is_packed else layer.put_plain(layout)
        linears.num_placed += len(layers)
        num_packed += len(layers) if layout.is_packed else 0
        if not layout.is_packed:
            plain.append(f"{len(layers)} of {rows} x {columns} ({layout.speedup:.1f} x)")
    line = f"packed {num_packed} linear layers for the CPU in {time.perf_counter() - began:.1f} s"
    if plain:
        line += f"; plain where that is faster here: {', '.join(plain)}"
    if num_disturbed:
        line += f"; shapes packed unmeasured, since other processes took the cores: {num_disturbed}"
    linears.lines.append(line)


class _Layer:
    """A linear layer of a model, plain or packed or both, and the (parent, name) pairs where it stands."""

    def __init__(self, linear: nn.Linear, parents: list[tuple[nn.Module, str]]) -> None:
        self.plain: nn.Linear | None = linear
        self.packed: PackedLinear | None = None
        self._parents = parents
        self._weight = weakref.ref(linear.weight)

    def pack(self) -> PackedLinear:
        """Returns the packed layer; the plain one stays."""
        if self.packed is None:
            assert self.plain is not None
            self.packed = PackedLinear(self.plain).train(self.plain.training)
        return self.packed

    def put_packed(self) -> None:
        """Puts the packed layer into the model, and frees the plain one."""
        self._put(self.pack())
        self.plain = None

    def put_plain(self, layout: Layout) -> None:
        """Puts a plain layer into the model, and frees the packed one."""
        layer = self.plain or self.pack()
        # The plain layer holds the weight, or an embedding does; else only the packed layer has it.
        weight = cast(nn.Parameter | None, self._weight())
        if weight is None:
            weight = nn.Parameter(layer.weight, requires_grad=False)
        self._put(PlainLinear(weight, layer.bias, layout.transposed).train(layer.training))
        self.plain = self.packed = None

    def _put(self, module: nn.Module) -> None:
        for parent, name in self._parents:
            setattr(parent, name, module)


def _sides(layers: list[_Layer]) -> tuple[list[PackedLinear], list[nn.Linear]]:
    """Packs half of the layers, and returns these and the plain ones: so no weight is held twice.

    Of a single layer, both sides have it.
    """
    packed, plain = layers[: len(layers) // 2], layers[len(layers) // 2 :]
    for layer in packed:
        layer.put_packed()
    return [layer.pack() for layer in packed or plain], [cast(nn.Linear, layer.plain) for layer in plain]


def _by_shape(model: nn.Module) -> list[tuple[tuple[int, int], list[_Layer]]]:
    """Returns the layers that can be packed, by the shape of their weight.

    Shapes with the most weights come first: a step spends the most time there.
    """
    shapes: dict[tuple[int, int], list[_Layer]] = {}
    for layer, parents in _places(model).items():
        shapes.setdefault((layer.out_features, layer.in_features), []).append(_Layer(layer, parents))
    return sorted(shapes.items(), key=lambda item: -item[0][0] * item[0][1] * len(item[1]))


def _places(model: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """Returns the layers that can be packed, each with its (parent, name) pairs: it may have several."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and is_plain(child) and _is_packable(cast(nn.Linear, child).weight):
                places.setdefault(cast(nn.Linear, child), []).append((parent, name))
    return places


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0
