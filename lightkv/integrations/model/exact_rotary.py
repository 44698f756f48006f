"""Rotary positions with angles in float64, for attention sinks and for texts far past a model's context.

No model is known by name: its frequencies are read from its rotary embedding, and that the model rotates q and
k by them is checked on the attention calls that it makes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from lightkv.attention import Rotary
from lightkv.errors import UnsupportedModel

from .attention_call import AttentionCall, compute
from .fused_rotary import set_fused_forwards
from .hf_model import bound

_PROBED = 1000  # the position at which a model's own rotation is compared with ours


def find_rotary(model: PreTrainedModel) -> Rotary:
    """Returns the rotary frequencies of `model`, which stays as it was.

    Raises UnsupportedModel unless the model has one rotary embedding, in NeoX's layout.
    """
    architecture = type(model).__name__
    embedding = _embedding(model)
    if (hook := _hook_of(embedding)) is not None:
        return hook.rotary
    inverse: Any = embedding.inv_freq
    rotary = Rotary(inverse.double())
    recorder = _Recorder()
    handle = embedding.register_forward_hook(_ExactAngles(rotary), with_kwargs=True)
    try:
        with torch.no_grad(), bound(model):
            set_fused_forwards(model, {})  # the model's own rotation is to be seen
            positions = torch.tensor([0, _PROBED], device=model.device)
            compute(model, torch.zeros_like(positions), positions, recorder, None)
        wrong = [idx for idx, heads in enumerate(recorder.heads) if not _is_rotated_by(rotary, heads)]
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedModel(architecture, f"its rotary embedding is another kind ({error})") from error
    finally:
        handle.remove()
    if wrong:
        raise UnsupportedModel(architecture, f"layers {wrong} do not rotate q and k as its frequencies say")
    return rotary


def make_exact(model: PreTrainedModel, rotary: Rotary) -> None:
    """Makes `model` compute its angles in float64 from now on. `rotary` is the result of `find_rotary`."""
    embedding = _embedding(model)
    if _hook_of(embedding) is None:
        embedding.register_forward_hook(_ExactAngles(rotary), with_kwargs=True)


def _embedding(model: PreTrainedModel) -> torch.nn.Module:
    found = [
        module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    ]
    if len(found) != 1:
        reason = f"it has {len(found)} rotary embeddings, where there should be 1"
        raise UnsupportedModel(type(model).__name__, reason)
    return found[0]


def _hook_of(embedding: torch.nn.Module) -> "_ExactAngles | None":
    hooks = [hook for hook in embedding._forward_hooks.values() if isinstance(hook, _ExactAngles)]
    return hooks[0] if hooks else None


@dataclass(frozen=True)
class _ExactAngles:
    """A hook of a rotary embedding that replaces its cosines and sines by those of exact angles."""

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
class _Recorder:
    """An AttentionHandler that records q and k of every layer, and returns zeros.

    Since attention adds nothing, every layer sees the same token at each position, and q and k of two positions
    differ by their rotation alone.
    """

    heads: list[torch.Tensor] = field(default_factory=list)  # of each layer, q and k together: [T, heads, D]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.heads.append(torch.cat((call.q[0], call.k[0])).transpose(0, 1))
        return call.q.new_zeros(call.output_shape)


def _is_rotated_by(rotary: Rotary, heads: torch.Tensor) -> bool:
    """Returns whether the second token of `[2, heads, D]` is the first one, rotated by `_PROBED` positions."""
    back = rotary.rotate_back(heads[1:], torch.tensor([_PROBED], device=heads.device))
    tolerance = 1e-4 if heads.dtype == torch.float32 else 3e-2
    return bool((back - heads[:1]).abs().max() <= tolerance * heads.abs().max())
