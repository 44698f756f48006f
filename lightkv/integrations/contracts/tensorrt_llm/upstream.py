"""Makes lightkv's classes subclasses of TensorRT-LLM's, where that is installed, so that its runtime takes them
for its own."""

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, new_class
from typing import Any

INTERFACE = "tensorrt_llm._torch.attention_backend.interface"

_logger = logging.getLogger("lightkv")


def upstream_interface() -> ModuleType | None:
    """Returns TensorRT-LLM's module of attention interfaces; None if it is not installed, or cannot be
    imported, which is logged."""
    if "tensorrt_llm" not in sys.modules and find_spec("tensorrt_llm") is None:
        return None
    try:
        return import_module(INTERFACE)
    except (ImportError, OSError, RuntimeError) as error:  # also a shared library that is not there
        _logger.warning(
            "tensorrt_llm is installed but %s cannot be imported (%s); its contract stands on its own",
            INTERFACE,
            error,
        )
        return None


def subclassed(own: type, interface: ModuleType | None, **attributes: Any) -> type:
    """Returns a subclass of `own` and of the class of the same name in `interface`, with these attributes of
    the class; `own` itself without an interface. What both define is `own`'s."""
    if interface is None:
        return own
    body = {"__doc__": own.__doc__, "__module__": own.__module__, **attributes}
    return new_class(
        own.__name__, (own, getattr(interface, own.__name__)), exec_body=lambda ns: ns.update(body)
    )
