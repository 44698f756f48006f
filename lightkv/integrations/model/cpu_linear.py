"""Float32 linear layers on a CPU, packed or plain, and the measurement that chooses between them.

A decode step multiplies a few tokens with every weight of the model. On many processors, MKL reads a plain
matrix for that at about half the speed at which oneDNN reads a packed one. Plain weights are computed in one of
two ways, by the number of tokens. Packed weights have no gradient: the layers are for inference only.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

# Layers are measured at one token, at 8, and at a chunk of a prompt. Each stands for the numbers of tokens up
# to its bound: 1, 32, and any more.
SIZES = (1, 8, 256)
FEW_TOKENS = 32

# A choice other than the usual one has to be this much faster. So noise does not change a layer's rounding from
# one start to the next.
MARGIN = 0.85

MAX_PRODUCT = 1 << 28  # multiplications; a large layer is measured with a smaller chunk
MIN_WEIGHTS = 1 << 16  # the time of a smaller layer is that of the call, and noise would choose
_ROUNDS = 20
_MIN_ROUNDS = 3
_SECONDS = 0.03  # of one size, after which no further round begins
_TRIES = 5  # at one size, while other processes take the cores
_MAX_WAITING = 0.05  # of the time that a try takes


# oneDNN generates about 0.5 MiB of code for each number of tokens that it computes. It and torch each keep the
# code of the last 1,024 numbers. Steps have any number of tokens, so a worker grew by hundreds of MiB. The
# layers therefore compute only some numbers of tokens, and pad their input to the next of them.
MAX_TOKENS = 512  # of a product that may be padded
LONG_PIECES = (2048, 1024)  # of a longer input, as long as as many tokens are left: their rates are higher
_SIZE_BITS = 4  # a padded size is a power of two times at most 2 ** 4


class Times(NamedTuple):
    """Seconds of one product with the same number of tokens: packed, and plain in its two ways."""

    packed: float
    direct: float
    transposed: float


class Layout(NamedTuple):
    """How the layers of one shape are held and computed.

    `transposed` is for a plain weight: whether `transposed` computes 1, up to 32, and more tokens.
    `speedup`: how many times as fast as packed a plain weight was.
    """

    is_packed: bool = True
    transposed: tuple[bool, bool, bool] = (False, True, True)
    speedup: float = 1.0


def choose(times: Sequence[Times]) -> Layout:
    """Returns the layout for layers that took `times`, one for each of the first sizes of `SIZES`.

    Packed is kept unless plain takes at most 85 % of its time, in the mean of the sizes; and so are the usual
    ways of plain. Without times, the layers are packed.
    """
    if not times:
        return Layout()
    ways = []
    for (_, direct, transposed), usual in zip(times, Layout().transposed, strict=False):
        faster, slower = (direct, transposed) if usual else (transposed, direct)
        ways.append(usual != (faster <= MARGIN * slower))
    if len(times) == 1:
        ways.append(True)  # one token says nothing about several
    ways += ways[-1:] * (len(SIZES) - len(ways))
    plain = [one.transposed if way else one.direct for one, way in zip(times, ways, strict=False)]
    relative = fmean(seconds / one.packed for one, seconds in zip(times, plain, strict=True))
    first, few, many = ways
    return Layout(relative > MARGIN, (first, few, many), 1 / relative)


def direct_product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Computes a linear layer as torch does: `[tokens, in_features]` to `[tokens, out_features]`."""
    return linear(x, weight, bias)


def transposed_product(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Computes the same as (weight @ x^T)^T: with a few tokens, MKL reads the weight faster so."""
    y = weight @ x.t() if bias is None else torch.addmm(bias[:, None], weight, x.t())
    return y.t().contiguous()  # few transposed tokens would make the next product slow


def padded_size(num_tokens: int) -> int:
    """Returns how many tokens a layer computes for `num_tokens`: at most an eighth more.

    Up to 16 there is no padding; above, there are eight sizes from each power of two to the next.
    """
    step = 1 << max((num_tokens - 1).bit_length() - _SIZE_BITS, 0)
    return -(-num_tokens // step) * step


def piece_sizes(num_tokens: int) -> list[int]:
    """Returns the pieces in which `num_tokens` are computed, the longest first."""
    sizes = []
    for most in (*LONG_PIECES, MAX_TOKENS):
        count, num_tokens = divmod(num_tokens, most)
        sizes += [most] * count
    return [*sizes, num_tokens] if num_tokens or not sizes else sizes


class PackedLinear(nn.Module):
    """Replaces `linear`, float32 on the CPU, by one with a packed copy of its weight. The bias is shared.

    oneDNN computes at most 58 different numbers of tokens: each `padded_size` up to `MAX_TOKENS`, and those of
    `LONG_PIECES`.
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
        sizes = piece_sizes(num_tokens)
        if sizes == [padded_size(num_tokens)]:
            return self._compute(x)
        pieces = []
        for piece in x.reshape(-1, self.in_features).split(sizes):
            padding = padded_size(len(piece)) - len(piece)
            padded = pad(piece, (0, 0, 0, padding)) if padding else piece  # a pad of 0 is a copy
            pieces.append(self._compute(padded)[: len(piece)])
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return y.view(*x.shape[:-1], self.out_features)

    def _compute(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class PlainLinear(nn.Module):
    """A linear layer with a plain weight, computed in the way that is faster for the number of tokens.

    `weight` and `bias` are shared, not copied. `transposed` is that of a `Layout`.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: tuple[bool, bool, bool]
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = bias
        self._ways = [transposed_product if one else direct_product for one in transposed]

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in_features]` with any strides to `[..., out_features]`, contiguous."""
        tokens = x.reshape(-1, self.in_features)
        num_tokens = len(tokens)
        way = self._ways[0 if num_tokens == 1 else 1 if num_tokens <= FEW_TOKENS else 2]
        return way(self.weight, self.bias, tokens).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


@torch.inference_mode()
def measure(packed: Sequence[nn.Module], plain: Sequence[nn.Linear]) -> list[Times]:
    """Measures layers of one shape, `packed` and `plain`, at each of `SIZES` that is not too large for it.

    Products of the three kinds alternate, each with the next layer, so that the cache holds no weight if there
    are enough layers. Takes about 0.1 s for a shape, or a few products of every kind. Returns no times if other
    processes took the cores all the while: a product whose threads wait for a core takes 8 ms for 0.1.
    """
    rows, columns = plain[0].weight.shape
    times = []
    for size in measured_sizes(rows * columns):
        x = torch.ones(size, columns)
        # Another layer's weight for the second way than the first one has just read.
        others = [*plain[len(plain) // 2 :], *plain[: len(plain) // 2]]
        products = (
            [partial(layer, x) for layer in packed],
            [partial(direct_product, layer.weight, layer.bias, x) for layer in plain],
            [partial(transposed_product, layer.weight, layer.bias, x) for layer in others],
        )
        for _ in range(_TRIES):
            began, waited = time.perf_counter(), _waited()
            fastest = _fastest(products)
            if _waited() - waited <= _MAX_WAITING * (time.perf_counter() - began):
                times.append(Times(*fastest))
                break
        else:
            return []
    return times


def measured_sizes(num_weights: int) -> list[int]:
    """Returns the numbers of tokens at which a layer of `num_weights` is measured: 1, 8 and up to 256."""
    most = max(MAX_PRODUCT // num_weights, 1)
    chunk = min(SIZES[-1], 1 << (most.bit_length() - 1))
    return [size for size in SIZES[:-1] if size == 1 or size <= chunk] + [chunk] * (chunk > SIZES[-2])


def _fastest(kinds: Sequence[Sequence[Callable[[], Tensor]]]) -> list[float]:
    """Returns each kind's shortest time: whatever disturbs a product only adds to its time."""
    best = [float("inf")] * len(kinds)
    end = time.perf_counter() + _SECONDS
    for round_idx in range(_ROUNDS):
        for kind_idx, products in enumerate(kinds):
            product = products[round_idx % len(products)]
            began = time.perf_counter()
            product()
            took = time.perf_counter() - began
            if round_idx > 0:  # the first call of a size makes its code
                best[kind_idx] = min(best[kind_idx], took)
        if round_idx + 1 >= _MIN_ROUNDS and time.perf_counter() > end:
            break
    return best


def _waited() -> float:
    """Returns the seconds that threads of this process were ready to run but had no core; 0 if unknown."""
    nanoseconds = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            nanoseconds += int(path.read_text().split()[1])
    return nanoseconds / 1e9


def has_onednn() -> bool:
    """Returns whether this torch can pack weights."""
    ops = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
