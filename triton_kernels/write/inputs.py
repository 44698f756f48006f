"""What `write_kv` is given beside K and V, and the checks of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.norms import Norm
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import quantise, split_scales

from .head_tiles import constants_of

_HEADS = Tensors(
    k="[T, h, Dk] with a last stride of 1",
    v="[T, h, Dv] with a last stride of 1",
    slots="contiguous int32 or int64 [T]",
    q="[T, H, Dk] with a last stride of 1",
)
_STORED = Tensors(
    stored_k="[slots, h, Wk] with a last stride of 1", stored_v="[slots, h, Wv] with a last stride of 1"
)
_BIASES = Tensors(
    bias_q="floats [H, Dk] with a last stride of 1",
    bias_k="floats [h, Dk] with a last stride of 1",
    bias_v="floats [h, Dv] with a last stride of 1",
)
_TABLES = {
    dtype: Tensors(
        cos=f"{names} [T, n] with a last stride of 1", sin=f"{names} [T, n] with a last stride of 1"
    )
    for dtype, names in (
        (torch.float32, "float32"),
        (torch.float16, "float32 or float16"),
        (torch.bfloat16, "float32 or bfloat16"),
    )
}


class StoredKV(NamedTuple):
    """Where a layer's K and V are stored by slot, and how.

    `k`, `v`, `scales`: as in `PagedKV`, K and V of the type that `format` stores. Static scales, whose stride
    of slots is 0, are read.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None
    format: KVFormat = AS_COMPUTED

    def check(self, k: Tensor, v: Tensor) -> None:
        """Raises ValueError where new heads k and v do not fit what is stored, or the format does not."""
        elements, sizes = self.format.elements, _HEADS.check({}, k=k, v=v)
        for dim in (sizes["Dk"], sizes["Dv"]) if elements.is_quantised else ():
            constants_of(elements, dim)
        per_item = 2 if elements.bits == 4 else 1
        sizes |= {"Wk": sizes["Dk"] // per_item, "Wv": sizes["Dv"] // per_item}
        _STORED.check(sizes, stored_k=self.k, stored_v=self.v)
        for name, stored in (("k", self.k), ("v", self.v)):
            fits = stored.dtype == elements.stored if elements.is_quantised else stored.is_floating_point()
            if not fits:
                wanted = elements.stored if elements.is_quantised else "of a floating type"
                raise ValueError(f"the stored {name} must be {wanted} in this format, got {stored.dtype}")
        self.format.check_scales(self.scales, self.k, sizes["Dk"], sizes["Dv"])

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes K `[n, num_kv_heads, Dk]` and V to slots, int64 `[n]`, quantised where the format is, in plain
        torch."""
        if self.scales is None:
            for x, target in zip((k, v), self[:2], strict=True):
                target.index_copy_(0, slots, x.to(target.dtype))
            return
        elements, scales_of_both = self.format.elements, split_scales(self.scales, self.format, k.shape[2])
        for x, target, scales in zip((k, v), self[:2], scales_of_both, strict=True):
            x, found = quantise(x, elements, self.format.scale_dtype, scales[0])
            target.view(torch.uint8).index_copy_(0, slots, x.view(torch.uint8))
            if not elements.is_static:
                scales.index_copy_(0, slots, found)


class Rotation(NamedTuple):
    """The rotary positions of a step's tokens.

    `cos`: `[T, rotary_dim / 2]`, float32 or of k's type, any strides, except that the last one is 1: the cosine
    of each token's angle for each pair of dims, times the scaling's attention factor. Dims from rotary_dim on
    are not rotated. `sin`: likewise.
    `interleaved`: dims 2i and 2i + 1 are a pair (GPT-J); otherwise dims i and i + rotary_dim / 2 (NeoX).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def check(self, k: Tensor) -> None:
        """Raises ValueError where the tables do not fit the heads k `[T, num_kv_heads, Dk]`."""
        tables = _TABLES.get(k.dtype, _TABLES[torch.float32])
        pairs = tables.check({"T": len(k)}, cos=self.cos, sin=self.sin)["n"]
        if not 0 < 2 * pairs <= k.shape[2]:
            raise ValueError(
                f"cos and sin have {pairs} columns, and {k.shape[2]} dims have 1 to half as many"
            )


class Biases(NamedTuple):
    """What is added to heads before anything else, each of any floating type, `[heads, dim]` as of the heads
    themselves, with a last stride of 1; None for no bias."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


NO_BIASES = Biases()


class HeadNorms(NamedTuple):
    """The norms of the heads of q and of k, without biases. `over_all`: their means are those of all heads of a
    token together, and not of each head. A weight is `[D]`, or one for each head, `[heads, D]`, contiguous."""

    q: Norm
    k: Norm
    over_all: bool = False

    def check(self, q: Tensor | None, k: Tensor) -> None:
        """Raises ValueError where the norms do not fit q and k, `[T, heads, D]`."""
        if q is None:
            raise ValueError("norms are given, and no q; pass q, which is normalised in place")
        for name, heads, norm in (("q", q, self.q), ("k", k, self.k)):
            weight, shapes = norm.weight, (heads.shape[1:], heads.shape[2:])
            if norm.bias is not None:
                raise ValueError(f"the norm of {name} has a bias; norms of heads have none")
            if weight is None:
                continue
            if weight.shape not in shapes or not weight.is_contiguous() or not weight.is_floating_point():
                raise ValueError(
                    f"the weight of the norm of {name} must be [dim] {tuple(shapes[1])} or [heads, dim] "
                    f"{tuple(shapes[0])}, contiguous floats; got {weight.dtype} {tuple(weight.shape)} with "
                    f"strides {weight.stride()}"
                )

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims of `[T, heads, D]` over which means are taken."""
        return (1, 2) if self.over_all else (2,)


class Changes(NamedTuple):
    """What is done to new heads before they are written: `biases` are added to q, k and v, q and k are
    normalised by `norms`, and rotated by `rotation`; None for no norms and no rotation."""

    rotation: Rotation | None = None
    biases: Biases = NO_BIASES
    norms: HeadNorms | None = None


UNCHANGED = Changes()


def check_inputs(
    k: Tensor, v: Tensor, stored: StoredKV, slots: Tensor, q: Tensor | None, by: Changes
) -> None:
    """Raises ValueError where the arguments of `write_kv` do not fit each other."""
    rotation, biases, norms = by
    stored.check(k, v)
    sizes = _HEADS.check({}, k=k, v=v, slots=slots, q=q)
    if q is None and biases.q is not None:
        raise ValueError("a bias of q is given, and no q; leave it out")
    if q is not None and rotation is None and biases.q is None and norms is None:
        raise ValueError("nothing is to be done to q: pass a rotation, norms, or a bias of q, or leave q out")
    if rotation is not None:
        rotation.check(k)
    _BIASES.check(sizes, bias_q=biases.q, bias_k=biases.k, bias_v=biases.v)
    if norms is not None:
        norms.check(q, k)
