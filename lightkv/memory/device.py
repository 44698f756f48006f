"""Which devices memory can be on, with errors that say what to give instead."""

import torch

from lightkv.errors import InvalidDevice


def usable_device(device: torch.device | str) -> torch.device:
    """Returns `device` as torch's own object, once it is known that memory can be made there.

    Raises InvalidDevice for names that torch does not know, for devices other than cpu and cuda, and for a GPU
    that this process does not have; TypeError for anything but a name or a torch.device.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(
            f"device is {device!r} ({type(device).__name__}); give a torch.device or its name, such as 'cpu' "
            "or 'cuda'"
        )
    try:
        found = torch.device(device)
    except RuntimeError as error:  # torch lists every name that it knows, most of which are of no use here
        raise InvalidDevice(device, "torch knows no such device; give cpu, cuda or cuda:N") from error
    if found.type == "meta":
        raise InvalidDevice(
            device, "the meta device stores nothing, so no slot can be chosen there; give cpu or cuda"
        )
    if found.type not in ("cpu", "cuda"):
        raise InvalidDevice(device, f"lightkv runs on cpu and cuda, not on {found.type}; give one of them")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            remedy = "give cpu, or see that nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES does not hide it"
            if torch.version.cuda is None and torch.version.hip is None:
                remedy = "this build of torch is for CPUs alone: give cpu, or install one for CUDA"
            raise InvalidDevice(device, f"torch {torch.__version__} sees no GPU; {remedy}")
        if (found.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise InvalidDevice(device, f"there are {count} GPUs; give cuda:0 to cuda:{count - 1}")
    return found


def require_current(device: torch.device, current: int) -> None:
    """Raises ValueError for a GPU that is not the `current` one, because kernels are launched there wherever
    their tensors are."""
    if device.index not in (None, current):
        raise ValueError(
            f"memory on {device} while cuda:{current} is the current device, where kernels run; call "
            f"torch.cuda.set_device({device.index}) first, or work within torch.cuda.device({device.index})"
        )
