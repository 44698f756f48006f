"""What a layer's attention is, and what every backend of it does: write this step's K/V, then attend.

Knows no model and no kernel. The constructor and `forward` carry TensorRT-LLM's names.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .metadata import AttentionMetadata
from .rotary import Rotary, RotaryEmbedding


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer attends, beyond its shape.

    `scale`: of q·k; None is head_dim ** -0.5. `window`: a query attends itself and the `window` - 1 tokens
    before; 0 is all. `softcap`: scores become softcap * tanh(score / softcap); 0 is off. `v_dim`: None is
    head_dim.
    """

    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    v_dim: int | None = None


@dataclass(frozen=True)
class LayerShape:
    """One layer's attention: heads, the dim of q and k per head, and options."""

    num_heads: int
    head_dim: int
    num_kv_heads: int
    options: AttentionOptions = AttentionOptions()


class AttentionBackend(ABC):
    """Causal attention of one layer over the pool, for packed batches of contexts and generations.

    `layer_idx` names the layer's K/V in the pool. `quant_config` has to be None: K/V is in the pool's type.
    q and k arrive with their positions applied, or `forward` is told what applies them. `pos_embd_params`: the
    frequencies, which only steps with sinks need.
    """

    supports_cuda_graph = False  # does decode read its lengths on the device, so that a captured step grows?

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        quant_config: object | None = None,
        pos_embd_params: object | None = None,
        options: AttentionOptions = AttentionOptions(),
    ) -> None:
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads do not share {num_kv_heads} KV heads evenly")
        if quant_config is not None:
            raise ValueError("K/V is kept in the pool's own type; pass quant_config=None")
        if pos_embd_params is not None and not isinstance(pos_embd_params, Rotary):
            raise ValueError(
                "positions are the model's to apply before this call; pass pos_embd_params=None, or for sinks "
                f"the Rotary that it applies, not {type(pos_embd_params).__name__}"
            )
        self.layer_idx = layer_idx
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.v_dim = options.v_dim or head_dim
        self.scale = head_dim**-0.5 if options.scale is None else options.scale
        self.window = options.window
        self.softcap = options.softcap
        self.rotary = pos_embd_params

    @property
    def group_members(self) -> int:
        """How many generations that share their first keys are attended with one reading of these; 1: no
        generation is attended with others."""
        return 1

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        attention_mask: str | None = None,
        rotary: RotaryEmbedding | None = None,
    ) -> torch.Tensor:
        """Write k and v at `metadata.slot_mapping`, and attend from q.

        q `[num_tokens, num_heads * head_dim]`, k `[num_tokens, num_kv_heads * head_dim]`, v `[num_tokens,
        num_kv_heads * v_dim]`, or each with the heads as a dimension of their own; on the pool's device.
        `attention_mask`: None or "causal". `rotary`: what turns q and k, where they come without positions; q
        is turned in place then, so that it is what `entry_scores` takes, and k may be, too. Returns
        `[num_tokens, num_heads * v_dim]` of q's type.
        """
        if attention_mask not in (None, "causal"):
            raise ValueError(f"attention mask {attention_mask!r}: attention here is causal, pass None")
        if metadata.num_sinks and (self.rotary is None or self.window):
            raise ValueError(
                f"a step with {metadata.num_sinks} sinks needs the rotary frequencies (pos_embd_params) and no "
                f"window of the layer's own; layer {self.layer_idx} has a window of {self.window}"
            )
        num_tokens = metadata.num_tokens
        q = q.view(num_tokens, self.num_heads, self.head_dim)
        k = k.view(num_tokens, self.num_kv_heads, self.head_dim)
        v = v.view(num_tokens, self.num_kv_heads, self.v_dim)
        out = q.new_empty(num_tokens, self.num_heads, self.v_dim)
        self._write(q, k, v, metadata, rotary)
        if metadata.num_sinks:
            self._attend_with_sinks(q, metadata, out)
        else:
            self._attend(q, k, v, metadata, out)
        return out.flatten(1)

    def entry_scores(self, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """How much this step's queries attend to each entry: probabilities, summed over queries and heads.

        q as for `forward`, which is called before, for it writes the keys. Returns float32 `[B, longest]`, zero
        past a sequence's entries. Raises ValueError for a step with sinks.
        """
        if metadata.num_sinks:
            raise ValueError(
                f"a step with {metadata.num_sinks} sinks attends them from other positions, which are not "
                "scored; evict by the window alone"
            )
        entries = metadata.position_ids
        if metadata.dropped is not None:
            entries = entries - metadata.dropped
        width = int(metadata.kv_lens_host.max(initial=0))
        q = q.view(metadata.num_tokens, self.num_heads, self.head_dim)
        return self._entry_scores(q, entries.int(), width, metadata)

    @abstractmethod
    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        rotary: RotaryEmbedding | None,
    ) -> None:
        """Put this step's K/V where it belongs, k turned by `rotary`, and turn q in place.

        `_attend` gets k as it is after this: a backend that reads it there has to turn it in place, too.
        """

    @abstractmethod
    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Attend from all tokens into `out`; k and v are theirs as well, and written already."""

    @abstractmethod
    def _attend_with_sinks(self, q: torch.Tensor, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        """Attend from all tokens, contexts', into `out`, in a step with sinks: two queries, merged.

        From q to the entries after the sinks, causally; from q turned back by what was dropped to the sinks.
        """

    @abstractmethod
    def _entry_scores(
        self, q: torch.Tensor, entries: torch.Tensor, width: int, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Of q `[num_tokens, num_heads, head_dim]` at `entries` int32 `[num_tokens]`: float32 `[B, width]`."""
