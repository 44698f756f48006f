"""Picks the attention backend by name or device, and imports only the one that is picked."""

from collections.abc import Sequence
from importlib import import_module

import torch

from lightkv.errors import UnknownBackend

from .backend import AttentionBackend, LayerShape
from .rotary import Rotary

BACKENDS = {"torch": "TorchAttention", "triton": "TritonAttention"}  # name → class, in `<name>_backend.py`


def pick_backend(name: str | None, device: torch.device) -> type[AttentionBackend]:
    """Returns the backend called `name`; None picks "triton" on CUDA and "torch" elsewhere. Raises
    UnknownBackend."""
    name = name or ("triton" if device.type == "cuda" else "torch")
    if name not in BACKENDS:
        raise UnknownBackend(name, sorted(BACKENDS))
    backend: type[AttentionBackend] = getattr(import_module(f".{name}_backend", __package__), BACKENDS[name])
    return backend


def prefix_members(backends: Sequence[AttentionBackend]) -> int:
    """Returns how many decodes may read one shared prefix together (`Batch.sharing`) in a model of these
    layers: the least of the layers that read prefixes together; 1 if none does."""
    return min((layer.prefix_members for layer in backends if layer.prefix_members > 1), default=1)


def make_backends(
    name: str | None, device: torch.device, layers: Sequence[LayerShape], rotary: Rotary | None = None
) -> list[AttentionBackend]:
    """Makes a backend for every layer of a model, in order. `name` is as for `pick_backend`; steps with sinks
    need `rotary`."""
    backend = pick_backend(name, device)
    return [backend(layer_idx, layer, rotary) for layer_idx, layer in enumerate(layers)]
