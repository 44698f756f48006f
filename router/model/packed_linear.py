"""Linear layers of a float32 model on a CPU, with their weights in the layout that oneDNN computes from.

A decode step multiplies a few tokens with every weight of the model. MKL reads a plain matrix for that at about
half the speed at which oneDNN reads one that was packed beforehand. Knows torch's modules and no model; for
inference alone, as a packed weight has no gradient.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Report = Callable[[str], None]

# oneDNN generates code for each number of tokens that a layer is given, about 0.5 MiB each time. It and torch
# each keep what they used for the last 1,024 of them. Steps have any number of tokens, so a worker grew by
# hundreds of MiB. The layers therefore compute a few numbers of tokens only, and pad what they are given.
MAX_TOKENS = 512  # of one product; a longer input is computed in pieces
_SIZE_BITS = 4  # a padded size is a power of two times at most 2 ** 4


def padded_size(num_tokens: int) -> int:
    """How many tokens a layer computes where it is given `num_tokens`, of which at most an eighth is padding.

    Every number up to 16 is computed as it is; above, there are eight sizes from each power of two to the next.
    """
    step = 1 << max((num_tokens - 1).bit_length() - _SIZE_BITS, 0)
    return -(-num_tokens // step) * step


class PackedLinear(nn.Module):
    """`linear`, float32 on the CPU, computed from a packed copy of its weight. Shares its bias.

    oneDNN computes 56 different numbers of tokens at most: each `padded_size` up to `MAX_TOKENS`.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # No buffer: a packed tensor has no storage that could be saved or moved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    @property
    def weight(self) -> Tensor:
        """The weight `[out_features, in_features]` as a plain copy, for a model that reads it itself."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]`, float32 and of any strides, to `[..., out_features]`."""
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


def pack_linears(model: nn.Module, report: Report) -> int:
    """Replace the linear layers of `model` that are float32 and on the CPU, in place. Returns how many.

    Only those of exactly the type nn.Linear: a subclass may compute something else. Each plain weight is freed
    before the next is packed, unless something else holds it, as an embedding holds a tied head's. Does nothing
    where torch lacks oneDNN, and says so.
    """
    places = _places(model)
    if not places:
        return 0
    if not _has_onednn():
        report("linear layers stay unpacked: this torch has no oneDNN, which would make decoding faster")
        return 0
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
    """What can be packed, and where it stands: a layer may have several parents."""
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
