"""A model's rotary positions with angles in float64, for texts that go far past its context, and for sinks.

Knows transformers' rotary embeddings by their frequencies, and no model by name: that a model turns q and k as
these say is taken from the calls that it makes. Knows no sequence and no cache.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from lightkv.attention import Rotary
from lightkv.errors import UnsupportedModel

from .hf_model import bound, compute

_PROBED = 1000  # the position at which a model's own rotation is compared with ours


def find_rotary(model: PreTrainedModel) -> Rotary:
    """How `model` turns q and k by their positions; the model stays as it was.

    Raises UnsupportedModel where that is not one rotary embedding in NeoX's layout.
    """
    architecture = type(model).__name__
    embedding = _embedding(model)
    if (hook := _hook_of(embedding)) is not None:
        return hook.rotary
    inverse: Any = embedding.inv_freq
    rotary = Rotary(inverse.double())
    turns = _Turns()
    handle = embedding.register_forward_hook(_InFloat64(rotary), with_kwargs=True)
    try:
        with torch.no_grad(), bound(model):
            positions = torch.tensor([0, _PROBED], device=model.device)
            compute(model, torch.zeros_like(positions), positions, turns, None)
        wrong = [idx for idx, turned in enumerate(turns.calls) if not _turns_back(rotary, turned)]
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedModel(architecture, f"its rotary embedding is another kind ({error})") from error
    finally:
        handle.remove()
    if wrong:
        raise UnsupportedModel(architecture, f"layers {wrong} do not turn q and k as its frequencies say")
    return rotary


def make_exact(model: PreTrainedModel, rotary: Rotary) -> None:
    """From now on `model` turns q and k by angles in float64; `rotary`: what `find_rotary` found of it."""
    embedding = _embedding(model)
    if _hook_of(embedding) is None:
        embedding.register_forward_hook(_InFloat64(rotary), with_kwargs=True)


def _embedding(model: PreTrainedModel) -> torch.nn.Module:
    found = [
        module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    ]
    if len(found) != 1:
        reason = f"it has {len(found)} rotary embeddings, where there should be 1"
        raise UnsupportedModel(type(model).__name__, reason)
    return found[0]


def _hook_of(embedding: torch.nn.Module) -> "_InFloat64 | None":
    hooks = [hook for hook in embedding._forward_hooks.values() if isinstance(hook, _InFloat64)]
    return hooks[0] if hooks else None


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
    back = rotary.rotate_back(turned[1:], torch.tensor([_PROBED], device=turned.device))
    tolerance = 1e-4 if turned.dtype == torch.float32 else 3e-2
    return bool((back - turned[:1]).abs().max() <= tolerance * turned.abs().max())
