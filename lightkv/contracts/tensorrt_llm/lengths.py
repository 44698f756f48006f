"""The lengths of a batch's sequences, which the host sets and the device has a copy of."""

from typing import Any

import torch


class SequenceLengths:
    """One length for each sequence of a batch: `host`, int `[B]` on the CPU, and `on_device`, its copy in
    int32. Both are None until `set`, and metadata that share their sequences share this object.

    `version` counts the calls of `set`.
    """

    def __init__(self) -> None:
        self.host: torch.Tensor | None = None
        self.on_device: torch.Tensor | None = None
        self.version = 0

    def set(self, name: str, lens: Any, device: torch.device, is_static: bool) -> None:
        """Replaces the lengths; None takes them away. `name` is the field's. `is_static`: the copy on the
        device never moves, as a CUDA graph needs it. Raises ValueError, with nothing changed, for anything but
        an int tensor `[B]` on the CPU, and for another B than that of a CUDA graph."""
        if lens is not None:
            is_row = isinstance(lens, torch.Tensor) and lens.dim() == 1 and not lens.is_cuda
            if not is_row or lens.is_floating_point() or lens.is_complex() or lens.dtype == torch.bool:
                raise ValueError(f"{name} must be an int tensor [batch_size] on the CPU, got {lens!r}")
            held = self.on_device
            if not is_static or held is None:
                self.on_device = lens.to(device, torch.int32, copy=True)
            elif held.shape != lens.shape:
                raise ValueError(
                    f"{name} of {len(lens)} sequences, and the CUDA graph has {len(held)}: fill the batch up "
                    "with requests of one token (add_dummy_requests of the cache manager), or capture another "
                    "graph"
                )
            else:
                held.copy_(lens, non_blocking=True)
        self.host = lens
        self.version += 1


class LengthsField:
    """A dataclass's field, with the default None, of lengths on the host. Setting it sets the `SequenceLengths`
    that the owner has as `written`, and reading it reads `read`. An owner has `device` and `is_cuda_graph`."""

    def __init__(self, written: str, read: str) -> None:
        self._written, self._read = written, read

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Any:
        return None if owner is None else getattr(owner, self._read).host  # a dataclass asks for the default

    def __set__(self, owner: Any, value: Any) -> None:
        getattr(owner, self._written).set(self._name, value, owner.device, owner.is_cuda_graph)
