"""What `write_kv` is given beside K and V, and the checks of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.layout.strides import has_unit_stride
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

from .head_norms import HeadNorms
from .head_tiles import constants_of


class StoredKV(NamedTuple):
    """Where a layer's K and V are stored by slot, and how.

    `k`: `[num_slots, num_kv_heads, Dk]`, `v`: `[num_slots, num_kv_heads, Dv]`, each of the type that `format`
    stores, with any strides, except that the last one is 1; both may be views of one buffer. Two elements of 4
    bits share a byte, so there the last dim is half of Dk or Dv.
    `scales`: `[num_slots, num_kv_heads, num_scales]` of `format.scale_dtype`, the last stride 1: the scales and
    zero points of K, then those of V. Static ones, whose stride of slots is 0, are read. None if nothing is
    quantised.
    """

    k: Tensor
    v: Tensor
    scales: Tensor | None = None
    format: KVFormat = AS_COMPUTED

    def check(self, k: Tensor, v: Tensor) -> None:
        """Raises ValueError where new heads k and v do not fit what is stored, or the format does not."""
        self._check_heads("k", k, self.k)
        self._check_heads("v", v, self.v)
        if v.shape[:2] != k.shape[:2]:
            raise ValueError(
                f"k and v must agree on the numbers of tokens and heads, got {tuple(k.shape)} and "
                f"{tuple(v.shape)}"
            )
        self._check_scales(k.shape[2], v.shape[2])

    def _check_heads(self, name: str, new: Tensor, stored: Tensor) -> None:
        if new.dim() != 3:
            raise ValueError(f"{name} must be [tokens, kv_heads, dim], got {tuple(new.shape)}")
        elements = self.format.elements
        _, num_heads, dim = new.shape
        if elements.is_quantised:
            constants_of(elements, dim)
        width = dim // 2 if elements.bits == 4 else dim
        if stored.dim() != 3 or stored.shape[1:] != (num_heads, width):
            raise ValueError(
                f"what is stored of {name} {tuple(new.shape)} must be [slots, kv_heads, dim], with {num_heads} "
                f"heads and a last dim of {width}; got {tuple(stored.shape)}"
            )
        fits = stored.dtype == elements.stored if elements.is_quantised else stored.is_floating_point()
        if not fits:
            wanted = elements.stored if elements.is_quantised else "of a floating type"
            raise ValueError(f"the stored {name} must be {wanted} in this format, got {stored.dtype}")
        if not (has_unit_stride(new) and has_unit_stride(stored)):
            raise ValueError(f"the last stride of {name} and of what is stored must be 1; make it contiguous")

    def _check_scales(self, key_dim: int, value_dim: int) -> None:
        scales, stored_as = self.scales, self.format
        if not stored_as.is_quantised:
            if scales is not None:
                raise ValueError("scales are given, and nothing is quantised in this format; pass None")
            return
        wanted = (len(self.k), self.k.shape[1], stored_as.num_scales(key_dim, value_dim))
        if (
            scales is None
            or scales.shape != wanted
            or len(self.v) != len(self.k)
            or scales.dtype != stored_as.scale_dtype
            or not has_unit_stride(scales)
        ):
            got = (
                "None" if scales is None else f"{scales.dtype} {tuple(scales.shape)}, {scales.stride()} apart"
            )
            raise ValueError(
                f"scales must be {stored_as.scale_dtype} [slots, kv_heads, num_scales] {wanted} with a last "
                f"stride of 1, and K and V of as many slots; got {got}"
            )


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
        num_tokens, _, dim = k.shape
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if table.dtype not in (torch.float32, k.dtype) or table.dim() != 2 or not has_unit_stride(table):
                raise ValueError(
                    f"{name} must be float32 or of k's type ({k.dtype}), [tokens, rotary_dim / 2] with a last "
                    f"stride of 1; got {table.dtype} {tuple(table.shape)} with strides {table.stride()}"
                )
        if self.cos.shape != self.sin.shape or not 0 < 2 * self.cos.shape[1] <= dim:
            raise ValueError(
                f"cos and sin must have one shape, and at most {dim // 2} columns for {dim} dims; got "
                f"{tuple(self.cos.shape)} and {tuple(self.sin.shape)}"
            )
        if len(self.cos) != num_tokens:
            raise ValueError(
                f"cos and sin need a row for each of the {num_tokens} tokens; cos has {len(self.cos)} rows"
            )


class Biases(NamedTuple):
    """What is added to heads before anything else, each of any floating type, `[heads, dim]` as of the heads
    themselves, with a last stride of 1; None for no bias."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None

    def check(self, q: Tensor | None, k: Tensor, v: Tensor) -> None:
        """Raises ValueError where a bias does not fit its heads `[T, heads, dim]`."""
        for name, bias, heads in (("q", self.q, q), ("k", self.k, k), ("v", self.v, v)):
            if bias is None:
                continue
            if heads is None:
                raise ValueError(f"a bias of {name} is given, and no {name}; leave it out")
            if bias.shape != heads.shape[1:] or not bias.is_floating_point() or not has_unit_stride(bias):
                raise ValueError(
                    f"the bias of {name} must be floats [heads, dim] {tuple(heads.shape[1:])} with a last "
                    f"stride of 1, got {bias.dtype} {tuple(bias.shape)} with strides {bias.stride()}"
                )


NO_BIASES = Biases()


def check_inputs(
    k: Tensor,
    v: Tensor,
    stored: StoredKV,
    slots: Tensor,
    q: Tensor | None,
    rotation: Rotation | None,
    biases: Biases,
    norms: HeadNorms | None,
) -> None:
    """Raises ValueError where the arguments of `write_kv` do not fit each other."""
    stored.check(k, v)
    if slots.shape != k.shape[:1]:
        raise ValueError(
            f"k, v and slots must agree on the number of tokens; got {tuple(k.shape)} and {tuple(slots.shape)}"
        )
    if slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 or int64, got {slots.dtype}")
    if q is not None:
        wanted = (len(k), q.shape[1] if q.dim() == 3 else 0, k.shape[2])
        if q.shape != wanted or not has_unit_stride(q):
            raise ValueError(
                f"q must be [tokens, heads, dim] {wanted} with a last stride of 1, the tokens and dim those of "
                f"k; got {tuple(q.shape)} with strides {q.stride()}"
            )
        if rotation is None and biases.q is None and norms is None:
            raise ValueError(
                "nothing is to be done to q: pass a rotation, norms, or a bias of q, or leave q out"
            )
    if rotation is not None:
        rotation.check(k)
    biases.check(q, k, v)
    if norms is not None:
        norms.check(q, k)
