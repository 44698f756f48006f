"""Linear layers of a float32 model on a CPU, with their weights in the layout that oneDNN computes from.

A decode step multiplies a few tokens with every weight of the model. For that, MKL reads a plain matrix at
about half the speed at which oneDNN reads a packed one. Packed weights have no gradient: the layers are for
inference only.
"""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightkv.integrations.model.joined_linear import JoinedLinear

Report = Callable[[str], None]

# oneDNN generates about 0.5 MiB of code for each number of tokens that it computes. It and torch each keep the
# code of the last 1,024 numbers. Steps have any number of tokens, so a worker grew by hundreds of MiB. The
# layers therefore compute only some numbers of tokens, and pad their input to the next of them.
MAX_TOKENS = 512  # of one product; a longer input is computed in pieces
_SIZE_BITS = 4  # a padded size is a power of two times at most 2 ** 4


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

    Only layers of exactly the type nn.Linear are replaced: a subclass may compute something else. Each plain
    weight is freed before the next is packed, unless something else holds it, as an embedding holds the weight
    of a tied head. If torch lacks oneDNN, this reports so and changes nothing. Of layers in `joined`, the
    product that they are joined into is packed, as one layer.
    """
    places = _places(model)
    if not places:
        return 0
    if not _has_onednn():
        report("linear layers are not packed: this torch has no oneDNN, which would make decoding faster")
        return 0
    for one in joined:
        if any(_is_packable(parameter) for parameter in one.parameters()):
            one.release_parts()
    places = _places(model)
    began = time.perf_counter()
    num_layers = len(places)
    while places:
        linear, parents = places.popitem()
        packed = PackedLinear(linear).train(linear.training)
        for parent, name in parents:
            setattr(parent, name, packed)
    report(f"packed {num_layers} linear layers for the CPU in {time.perf_counter() - began:.1f} s")
    return num_layers


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
