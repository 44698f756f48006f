"""A Hugging Face causal LM on lightkv's attention: a packed forward pass.

Knows transformers' AttentionInterface and no model by name: what a layer's attention is, is taken from the
call that the model makes of it. Knows no sequence, no sampling and no loading of weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from lightkv.attention import AttentionBackend, AttentionMetadata, RotaryEmbedding
from lightkv.errors import LightKVError, UnsupportedModel

from .fused_rotary import fuse, fused_forwards, set_fused_forwards

ATTENTION = "lightkv"  # under this name in AttentionInterface; without a mask, so that none is computed


class Receiver(Protocol):
    """Takes the attention calls of one forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """q `[1, heads, T, k_dim]`, k and v likewise. Returns `[1, T, heads, v_dim]`."""


@dataclass(frozen=True)
class PackedStep:
    """One step of the engine: every layer's call goes to its backend. A TurningReceiver."""

    metadata: AttentionMetadata
    backends: Sequence[AttentionBackend]

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        return self.turn_and_attend(module, q, k, v, None)

    def turn_and_attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryEmbedding | None,
    ) -> torch.Tensor:
        """`attend`, where None of `rotary` is of q and k whose positions are applied."""
        backend = self.backends[cast(int, module.layer_idx)]
        q, k, v = (heads[0].transpose(0, 1) for heads in (q, k, v))
        out = backend.forward(q, k, v, self.metadata, rotary=rotary)
        return out.unflatten(1, (backend.num_heads, backend.v_dim))[None]


def bind(model: PreTrainedModel) -> None:
    """Switch `model` to lightkv's attention, for `compute`. Raises UnsupportedModel, with nothing switched.

    Attention modules that do no more than project, turn by positions and attend get a forward pass of our own
    (`fused_rotary`); which do, is found by running the model once over a few tokens.

    Rotary frequencies that transformers would choose by the longest position in the batch (`dynamic`,
    `longrope`) stay those of the model's original context: no sequence depends on its neighbours, and a step
    does not wait for the device. Positions beyond that context are the caller's to refuse.
    """
    with ExitStack() as stack:
        stack.callback(undo_binding(model))
        switch_attention(model, ATTENTION)
        fix_rotary(model)

        def run(positions: torch.Tensor, receiver: Receiver) -> None:
            compute(model, torch.zeros_like(positions), positions, receiver, positions[:1])

        fuse(model, ATTENTION, run)
        stack.pop_all()


@contextmanager
def bound(model: PreTrainedModel) -> Iterator[None]:
    """`bind` for as long as the block runs; then the model is as before. Raises UnsupportedModel."""
    with ExitStack() as stack:
        stack.callback(undo_binding(model))
        bind(model)
        yield


def undo_binding(model: PreTrainedModel) -> Callable[[], None]:
    """What makes `model` again what it is now, whatever `bind` and the functions below have done since."""
    before = model.config._attn_implementation
    kinds = {module: module.rope_type for module in model.modules() if hasattr(module, "rope_type")}
    forwards = fused_forwards(model)

    def undo() -> None:
        model.set_attn_implementation(before)
        for module, kind in kinds.items():
            setattr(module, "rope_type", kind)  # noqa: B010
        set_fused_forwards(model, forwards)

    return undo


def switch_attention(model: PreTrainedModel, name: str) -> None:
    """Have `model` call lightkv's attention function under `name`, in place of its own.

    Raises UnsupportedModel, with nothing switched, for a model that calls no function by name.
    """
    AttentionInterface.register(name, _attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        model.set_attn_implementation(before)
        raise UnsupportedModel(type(model).__name__, "it does not use transformers' AttentionInterface")


def fix_rotary(model: PreTrainedModel) -> None:
    """Keep rotary frequencies that depend on the longest position in the batch as they are."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # by type of layer
            setattr(module, "rope_type", {layer: _fixed(one) for layer, one in kind.items()})  # noqa: B010
        elif isinstance(kind, str):
            setattr(module, "rope_type", _fixed(kind))  # noqa: B010


def _fixed(rope_type: str) -> str:
    return "default" if rope_type in ("dynamic", "longrope") else rope_type


def compute(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    receiver: Receiver,
    logits_index: torch.Tensor | None,
) -> torch.Tensor:
    """A forward pass of a bound model over packed tokens, whose attention `receiver` computes.

    `input_ids`, `position_ids`: int64 `[num_tokens]`. `logits_index`: int64 `[n]`, the tokens whose logits are
    wanted, None for all; only these go through the head. Returns `[n, vocabulary]` in the model's type.
    """
    output = model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        logits_to_keep=0 if logits_index is None else logits_index,  # 0: all
        lightkv=receiver,
    )
    return cast(torch.Tensor, output.logits[0])


def forward(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    metadata: AttentionMetadata,
    backends: Sequence[AttentionBackend],
    logits_index: torch.Tensor | None,
) -> torch.Tensor:
    """`compute` of the batch that `metadata` was prepared for, `input_ids` in its order."""
    step = PackedStep(metadata, backends)
    return compute(model, input_ids, metadata.position_ids, step, logits_index)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    lightkv: Receiver | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; `lightkv` is the keyword argument given to the model's forward."""
    if lightkv is None:  # or the caller of a bound model used neither `compute` nor `forward`
        raise LightKVError(
            "its attention is called without the argument `lightkv`: its layers do not hand keyword arguments "
            "on"
        )
    return lightkv.attend(module, query, key, value, attention_mask, arguments), None
