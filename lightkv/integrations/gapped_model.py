"""A Hugging Face model over a cache whose sequences drop tokens: positions go on, entries do not.

Knows no rule by which tokens are dropped (`streaming`, `eviction`), no sampling and no text. Positions may go
far past the model's context, so its rotary angles are computed in float64 here.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..attention import AttentionBackend, AttentionMetadata, Rotary, make_backends
from ..errors import UnsupportedModel
from ..kv_cache import KVCache
from ..sequence import Sequence
from ..staging import upload
from .transformers import bind, forward, probe

_PROBED = 1000  # the position at which a model's own rotation is compared with ours


class GappedModel:
    """A model, bound to lightkv's attention, and a `KVCache` of `capacity` tokens that it alone writes.

    max_sequences: how many may be open at once. max_entries: the most tokens that one may hold; by default the
    whole pool. backend: of the attention; by default the device's own. Raises UnsupportedModel, also for layers
    with windows of their own, and for positions that are not rotary in the usual layout; OutOfMemory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: int,
        max_sequences: int = 1,
        max_entries: int | None = None,
        backend: str | None = None,
    ) -> None:
        shape = probe(model)
        if windows := sorted({layer.options.window for layer in shape.layers} - {0}):
            reason = f"its layers have windows of their own ({windows}), which count positions, not entries"
            raise UnsupportedModel(type(model).__name__, reason)
        bind(model)
        self.model = model
        self.context = model.config.get_text_config().max_position_embeddings
        max_entries = max_entries or capacity
        self.cache = KVCache(shape.spec, capacity, max_sequences, max_entries, model.device)
        self.backends = make_backends(backend, model.device, shape.layers, exact_rotary(model))
        self._metadata = AttentionMetadata(1, max_entries, self.cache.memory)

    @torch.no_grad()
    def forward(
        self,
        sequence: Sequence,
        token_ids: torch.Tensor,
        *,
        all_logits: bool = False,
        backends: Seq[AttentionBackend] | None = None,
    ) -> torch.Tensor:
        """Compute `token_ids`, int64 `[n]` on the model's device, at the end of `sequence`.

        Returns the logits after the last of them, `[1, vocabulary]`, or with `all_logits` after every one.
        `backends`: in place of its own, say such as watch them. Raises as `KVCache.extend`. If it fails the
        sequence is as it was.
        """
        start, count = sequence.length, len(token_ids)
        self.cache.extend([sequence], [count])
        try:
            sinks = sequence.num_sinks if sequence.dropped else 0
            self._metadata.prepare(
                [sequence.row], [start], [count], 1, dropped=[sequence.dropped], num_sinks=sinks
            )
            (last,) = upload([np.array([count - 1])], self.model.device)
            index = None if all_logits else last
            return forward(self.model, token_ids, self._metadata, backends or self.backends, index)
        except BaseException:
            self.cache.truncate(sequence, start)
            raise


def exact_rotary(model: PreTrainedModel) -> Rotary:
    """How a bound model turns q and k by their positions; from now on it does so with angles in float64.

    Raises UnsupportedModel where that is not one rotary embedding in NeoX's layout.
    """
    architecture = type(model).__name__
    found = [
        module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    ]
    if len(found) != 1:
        raise UnsupportedModel(
            architecture, f"it has {len(found)} rotary embeddings, where there should be 1"
        )
    (embedding,) = found
    for hook in embedding._forward_hooks.values():
        if isinstance(hook, _InFloat64):
            return hook.rotary
    inverse: Any = embedding.inv_freq
    rotary = Rotary(inverse.double())
    handle = embedding.register_forward_hook(_InFloat64(rotary), with_kwargs=True)
    turns = _Turns()
    try:
        with torch.no_grad():
            model(
                input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device),
                position_ids=torch.tensor([[0, _PROBED]], device=model.device),
                use_cache=False,
                lightkv=turns,
            )
        wrong = [idx for idx, turned in enumerate(turns.calls) if not _turns_back(rotary, turned)]
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        handle.remove()
        raise UnsupportedModel(architecture, f"its rotary embedding is another kind ({error})") from error
    if wrong:
        handle.remove()
        raise UnsupportedModel(architecture, f"layers {wrong} do not turn q and k as its frequencies say")
    return rotary


@dataclass(frozen=True)
class _InFloat64:
    """A hook of a rotary embedding: the cosines and sines that it returns, computed from exact angles."""

    rotary: Rotary

    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = output
        angles = self.rotary.angles(kwargs["position_ids"] if "position_ids" in kwargs else args[1])
        angles = torch.cat((angles, angles), dim=-1)  # [1, T, 2n]
        scaling: Any = getattr(module, "attention_scaling", 1.0)
        return (angles.cos() * scaling).to(cos.dtype), (angles.sin() * scaling).to(sin.dtype)


@dataclass
class _Turns:
    """Takes a forward pass's attention calls, and answers with zeros: so every layer sees the same token at
    each position, and q and k differ by their rotation alone."""

    calls: list[torch.Tensor] = field(default_factory=list)  # of each layer, q and k: [2, heads, D]

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        self.calls.append(torch.cat((q[0], k[0])).transpose(0, 1))
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


def _turns_back(rotary: Rotary, turned: torch.Tensor) -> bool:
    """Is the second of `[2, heads, D]` the first, `_PROBED` positions on?"""
    back = rotary.turn_back(turned[1:], torch.tensor([_PROBED], device=turned.device))
    tolerance = 1e-4 if turned.dtype == torch.float32 else 3e-2
    return bool((back - turned[:1]).abs().max() <= tolerance * turned.abs().max())
