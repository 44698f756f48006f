"""Linear layers of a float32 model on a CPU, with their weights in the layout that oneDNN computes from.

A decode step multiplies a few tokens with every weight of the model. On many processors, MKL reads a plain
matrix for that at about half the speed at which oneDNN reads a packed one; `pack_linears` measures it. Packed
weights have no gradient: the layers are for inference only.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightkv.integrations.model.joined_linear import JoinedLinear

from .linear_layout import MIN_WEIGHTS, Layout, PlainLinear, choose, measure

Report = Callable[[str], None]

# oneDNN generates about 0.5 MiB of code for each number of tokens that it computes. It and torch each keep the
# code of the last 1,024 numbers. Steps have any number of tokens, so a worker grew by hundreds of MiB. The
# layers therefore compute only some numbers of tokens, and pad their input to the next of them.
MAX_TOKENS = 512  # of one product; a longer input is computed in pieces
_SIZE_BITS = 4  # a padded size is a power of two times at most 2 ** 4

MEASURING_SECONDS = 1.0  # after which no further shape is measured


def padded_size(num_tokens: int) -> int:
    """Returns how many tokens a layer computes for `num_tokens`: at most an eighth more.

    Up to 16 there is no padding; above, there are eight sizes from each power of two to the next.
    """
    step = 1 << max((num_tokens - 1).bit_length() - _SIZE_BITS, 0)
    return -(-num_tokens // step) * step


class PackedLinear(nn.Module):
    """Replaces `linear`, float32 on the CPU, by one with a packed copy of its weight. The bias is shared.

    oneDNN computes at most 56 different numbers of tokens: each `padded_size` up to `MAX_TOKENS`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # This is not a buffer, since a packed tensor has no storage that could be saved or moved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        """A plain copy of the weight, `[out_features, in_features]`, for models that read it directly."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in_features]`, float32 with any strides, to `[..., out_features]`."""
        num_tokens = x.numel() // self.in_features
        if num_tokens <= MAX_TOKENS and num_tokens == padded_size(num_tokens):
            return self._compute(x)
        pieces = []
        for piece in x.reshape(-1, self.in_features).split(MAX_TOKENS):
            padding = padded_size(len(piece)) - len(piece)
            pieces.append(self._compute(pad(piece, (0, 0, 0, padding)))[: len(piece)])
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return y.view(*x.shape[:-1], self.out_features)

    def _compute(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


def pack_linears(model: nn.Module, report: Report, joined: Iterable[JoinedLinear] = ()) -> int:
    """Replaces the linear layers of `model` that are float32 and on the CPU, in place. Returns their number.

    They become PackedLinear, or PlainLinear if layers of their shape are measured to be clearly faster so.
    Only layers of exactly the type nn.Linear are replaced: a subclass may compute something else. At most one
    layer at a time is in memory twice; a weight that something else holds, as an embedding holds that of a tied
    head, stays there. If torch lacks oneDNN, this reports so and changes nothing. Of layers in `joined`, the
    product that they are joined into is replaced, as one layer.
    """
    if not _places(model):
        return 0
    if not _has_onednn():
        report("linear layers are not packed: this torch has no oneDNN, which would make decoding faster")
        return 0
    for one in joined:
        if any(_is_packable(parameter) for parameter in one.parameters()):
            one.release_parts()
    began = time.perf_counter()
    measuring = 0.0
    num_layers, num_packed, num_disturbed, plain = 0, 0, 0, []
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
        num_layers += len(layers)
        num_packed += len(layers) if layout.is_packed else 0
        if not layout.is_packed:
            plain.append(f"{len(layers)} of {rows} x {columns} ({layout.speedup:.1f} x)")
    line = f"packed {num_packed} linear layers for the CPU in {time.perf_counter() - began:.1f} s"
    if plain:
        line += f"; plain where that is faster here: {', '.join(plain)}"
    if num_disturbed:
        line += f"; shapes packed unmeasured, since other processes took the cores: {num_disturbed}"
    report(line)
    return num_layers


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
    for linear, parents in _places(model).items():
        shapes.setdefault((linear.out_features, linear.in_features), []).append(_Layer(linear, parents))
    return sorted(shapes.items(), key=lambda item: -item[0][0] * item[0][1] * len(item[1]))


def _places(model: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """Returns the layers that can be packed, each with its (parent, name) pairs: it may have several."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if type(child) is nn.Linear and _is_packable(child.weight):
                places.setdefault(child, []).append((parent, name))
    return places


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


def _has_onednn() -> bool:
    ops = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
