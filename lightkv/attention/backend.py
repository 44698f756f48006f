"""What every attention backend does in a layer: write this step's K/V to the pool, then attend."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightkv.memory.kv_spec import KVSpec
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants.variant import limits
from lightkv.triton_kernels.quantised.kv_format import KVFormat

from .rotary import Rotary, RotaryEmbedding
from .step import Step


@dataclass(frozen=True)
class LayerShape:
    """The heads of one layer's attention and how it attends. `head_dim` is the dim of q and k per head, `v_dim`
    that of v (None: the same)."""

    num_heads: int
    head_dim: int
    num_kv_heads: int
    options: AttentionOptions = DEFAULT_OPTIONS
    v_dim: int | None = None

    def __post_init__(self) -> None:
        if min(self.num_heads, self.head_dim, self.num_kv_heads) < 1:
            raise ValueError(
                f"heads and head dim must be positive; got {self.num_heads} heads of {self.head_dim} dims and "
                f"{self.num_kv_heads} K/V heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} K/V heads evenly")


class NewHeads(NamedTuple):
    """This step's q `[T, H, Dk]`, k `[T, num_kv_heads, Dk]` and v `[T, num_kv_heads, Dv]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class AttentionBackend(ABC):
    """Attention of one layer over the pool, for packed batches of prefills and decodes.

    `layer_idx` is the layer's number in the pool. `rotary` holds the frequencies that q and k are rotated by;
    only steps need it in which queries attend from other positions (`Form.num_sinks`).
    """

    supports_cuda_graph = False  # True: decode reads lengths on the device, so a captured step follows them

    def __init__(self, layer_idx: int, shape: LayerShape, rotary: Rotary | None = None) -> None:
        self.layer_idx = layer_idx
        self.num_heads = shape.num_heads
        self.head_dim = shape.head_dim
        self.num_kv_heads = shape.num_kv_heads
        self.v_dim = shape.v_dim or shape.head_dim
        self.scale = shape.options.scale_for(shape.head_dim)
        self.options = shape.options._replace(scale=self.scale)
        self.rotary = rotary

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What the kernels depend on that the layer launches, beside the format of its K/V."""
        variants = self.options.variants
        shape = self.num_heads, self.num_kv_heads, self.head_dim, self.v_dim
        return type(self), *shape, limits(variants), *map(type, variants)

    @property
    def prefix_members(self) -> int:
        """How many decodes that share a prefix are attended with one reading of it; 1 if the backend never
        reads a prefix for several decodes."""
        return 1

    def scratch_bytes(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> int:
        """Returns how many bytes, beside `out`, the layer's attention needs on `device` while it computes up to
        `num_tokens` queries of `dtype`, as far as they are worth counting. The next layer uses the same."""
        return 0

    def check_format(self, layer_format: KVFormat) -> None:  # noqa: B027 - a backend may take every format
        """Raises ValueError for a format of the layer's K/V that this backend cannot attend to."""

    def use_fp8_prefill(self, q_scale: float, spec: KVSpec, device: torch.device) -> None:
        """Has the layer compute prefill in fp8 over a pool of `spec` on `device`, with queries in units of
        `q_scale`. Raises ValueError if it cannot."""
        raise ValueError(
            f"{type(self).__name__} has no prefill in fp8; the triton backend has, on Hopper GPUs"
        )

    def paged_kv(self, step: Step) -> PagedKV:
        """Returns the layer's K/V in the pool, with the index that the layer reads it by."""
        pool, layer_idx = step.memory.pool, self.layer_idx
        return PagedKV(
            pool.k(layer_idx),
            pool.v(layer_idx),
            step.index_of(layer_idx),
            step.lookup,
            scales=pool.scales(layer_idx),
            format=pool.format(layer_idx),
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: Step,
        rotary: RotaryEmbedding | None = None,
    ) -> torch.Tensor:
        """Writes k and v to the layer's slots (`Step.slots_of`), then attends from q. A layer that reads the
        K/V of another one (`KVSpec.holder`), which has run before it, writes nothing.

        Args:
            q: `[num_tokens, num_heads * head_dim]` on the pool's device, or with the heads as a dimension of
                its own; likewise k and v.
            k: `[num_tokens, num_kv_heads * head_dim]`.
            v: `[num_tokens, num_kv_heads * v_dim]`.
            step: the step.
            rotary: normalises and rotates q and k, where they arrive without positions; None where positions
                are applied already. q and k may be changed in place then.

        Returns:
            `[num_tokens, num_heads * v_dim]` of q's type.

        Raises:
            ValueError: the layer cannot attend to sequences of the step's form (`Form.check_layer`). Nothing
                is written then.
        """
        step.form.check_layer(self)
        num_tokens = step.num_tokens
        q = q.view(num_tokens, self.num_heads, self.head_dim)
        k = k.view(num_tokens, self.num_kv_heads, self.head_dim)
        v = v.view(num_tokens, self.num_kv_heads, self.v_dim)
        out = q.new_empty(num_tokens, self.num_heads, self.v_dim)
        if step.memory.pool.spec.holder(self.layer_idx) == self.layer_idx:
            self._write(NewHeads(q, k, v), step, rotary)
        elif rotary is not None:
            raise ValueError(
                f"layer {self.layer_idx} reads the K/V of another one, and writes none, which would rotate q; "
                "rotate q first, and give no rotary"
            )
        self._attend(q, step, out)
        return out.flatten(1)

    @abstractmethod
    def _write(self, new: NewHeads, step: Step, rotary: RotaryEmbedding | None) -> None:
        """Writes this step's K/V to its slots, k normalised and rotated by `rotary`, and q in place."""

    @abstractmethod
    def _attend(self, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        """Writes the attention of all tokens to `out`, as the step's form has it (`Form`). This step's K/V is
        in the pool already."""
