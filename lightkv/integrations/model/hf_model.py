"""Binds a Hugging Face causal LM to lightkv's attention, and runs its forward pass over a packed batch.

No model is known by name, except in `adapters/`: `probe` takes what a layer's attention is from the calls that
the model makes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from lightkv.attention import AttentionBackend, Step
from lightkv.integrations.model.mixers.mixer import Mixer, bind_mixers, is_bound_mixer, release_mixers

from .attention_call import ATTENTION, AttentionCall, compute, set_attention, switch_attention
from .fused_rotary import fuse, fused_forwards, set_fused_forwards
from .token_positions import fix_positions, has_positions, release_positions

# The backend of each layer that attends, by its number in the model.
Backends = Sequence[AttentionBackend] | Mapping[int, AttentionBackend]


@dataclass(frozen=True)
class PackedStep:
    """The AttentionHandler of one step: passes each layer's call to the backend of that layer, and a mixer's to
    the mixer with the states of the step.

    `logits_index`: the tokens whose logits are computed, int64 `[n]`; None for all.
    """

    step: Step
    backends: Backends
    logits_index: torch.Tensor | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes K/V and attends. Afterwards `call.q` has its positions applied."""
        module, q, k, v, _, _, rotary = call
        backend = self.backends[module.layer_idx]
        q, k, v = (heads[0].transpose(0, 1) for heads in (q, k, v))
        out = backend.forward(q, k, v, self.step, rotary=rotary)
        return out.unflatten(1, (backend.num_heads, backend.v_dim))[None]

    def mix(self, mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
        """Returns what a layer with states computes of x `[1, T, C]`."""
        states = self.step.memory.states
        assert states is not None
        return mixer.forward(x[0], self.step.states, states.layers[mixer.index])[None]


def forward(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    step: Step,
    backends: Backends,
    logits_index: torch.Tensor | None,
) -> torch.Tensor:
    """Runs `compute` over a step; `input_ids` follow its order."""
    packed = PackedStep(step, backends, logits_index)
    return compute(model, input_ids, step.position_ids, packed, logits_index)


def forward_slices(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    step: Step,
    backends: Backends,
    slices: Sequence[torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Runs the model once, as `forward` does, and yields the logits of each of `slices`.

    A slice is int64 `[n]`, the indices of tokens. So the logits of a long prompt need the memory of one slice.
    The model's layers run with the first of them; for the others what they returned is put in their place, and
    the model computes its logits from it. A model without a base model runs in full for each.
    """
    base = model.base_model
    returned: list[Any] = []
    hook = base.register_forward_hook(lambda module, args, output: returned.append(output))
    packed = PackedStep(step, backends)  # the last layer computes every token
    try:
        first = compute(model, input_ids, step.position_ids, packed, slices[0])
    finally:
        hook.remove()
    yield first
    own = base.__dict__.get("forward")
    for one in slices[1:]:
        if base is not model:
            base.forward = lambda *args, **arguments: returned[0]
        try:
            logits = compute(model, input_ids, step.position_ids, packed, one)
        finally:
            if own is not None:
                base.forward = own
            else:
                base.__dict__.pop("forward", None)
        yield logits


def bind(model: PreTrainedModel) -> None:
    """Switches `model` to lightkv's attention, for `compute`. Raises UnsupportedModel, with nothing switched.

    Attention modules that only project, apply rotary positions and attend get the fused forward pass of
    `fused_rotary`. The model runs once over a few tokens to find them.

    transformers chooses some rotary frequencies by the longest position in the batch (`dynamic`, `longrope`).
    These stay as they are for the model's original context, so that no sequence depends on its neighbours and
    a step does not wait for the device. The caller has to refuse positions beyond that context. Attention that
    takes a token's place in the batch for its position gets the position (`token_positions`).
    """
    undo = undo_binding(model)
    try:
        switch_attention(model, ATTENTION)
        fix_rotary(model)
        fix_positions(model)
        bind_mixers(model)
        fuse(model)
    except BaseException:
        undo()
        raise


@contextmanager
def bound(model: PreTrainedModel) -> Iterator[None]:
    """Binds `model` while the block runs, then restores it. Raises UnsupportedModel."""
    undo = undo_binding(model)
    try:
        bind(model)
        yield
    finally:
        undo()


def undo_binding(model: PreTrainedModel) -> Callable[[], None]:
    """Returns a function that restores the present state of what `bind` and its parts change in `model`."""
    before = model.config._attn_implementation
    rope_types = {module: module.rope_type for module in model.modules() if hasattr(module, "rope_type")}
    forwards = fused_forwards(model)
    had_positions, had_mixers = has_positions(model), any(map(is_bound_mixer, model.modules()))

    def undo() -> None:
        set_attention(model, before)
        module: Any
        for module, rope_type in rope_types.items():
            module.rope_type = rope_type
        set_fused_forwards(model, forwards)
        if not had_positions:
            release_positions(model)
        if not had_mixers:
            release_mixers(model)

    return undo


def fix_rotary(model: PreTrainedModel) -> None:
    """Keeps rotary frequencies that depend on the longest position in the batch as they are now."""
    module: Any
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):  # one for each type of layer
            module.rope_type = {layer: _fixed(one) for layer, one in rope_type.items()}
        elif isinstance(rope_type, str):
            module.rope_type = _fixed(rope_type)


def _fixed(rope_type: str) -> str:
    return "default" if rope_type in ("dynamic", "longrope") else rope_type
