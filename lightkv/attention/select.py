"""Which backend runs where. Imports a backend when it is picked; knows no kernel."""

from collections.abc import Sequence
from importlib import import_module

import torch

from lightkv.errors import UnknownBackend

from .backend import AttentionBackend, LayerShape
from .rotary import Rotary

BACKENDS = {"torch": "TorchAttention", "triton": "TritonAttention"}  # name → class, in `<name>_backend.py`


def pick_backend(name: str | None, device: torch.device) -> type[AttentionBackend]:
    """The backend called `name`; None picks "triton" on CUDA and "torch" elsewhere. Raises UnknownBackend."""
    name = name or ("triton" if device.type == "cuda" else "torch")
    if name not in BACKENDS:
        raise UnknownBackend(name, sorted(BACKENDS))
    backend: type[AttentionBackend] = getattr(import_module(f".{name}_backend", __package__), BACKENDS[name])
    return backend


def group_members(backends: Sequence[AttentionBackend]) -> int:
    """How many members a group has at most, for the `AttentionMetadata` of a model of these layers: as many as
    every layer takes that attends in groups; 1 where none does."""
    return min((layer.group_members for layer in backends if layer.group_members > 1), default=1)


def make_backends(
    name: str | None, device: torch.device, layers: Sequence[LayerShape], rotary: Rotary | None = None
) -> list[AttentionBackend]:
    """A backend for every layer of a model, in order; `name` as for `pick_backend`, `rotary` for sinks."""
    backend = pick_backend(name, device)
    return [
        backend(
            layer_idx,
            layer.num_heads,
            layer.head_dim,
            layer.num_kv_heads,
            pos_embd_params=rotary,
            options=layer.options,
        )
        for layer_idx, layer in enumerate(layers)
    ]
