"""Makes lightkv's classes subclasses of TensorRT-LLM's, where that is installed, so that its runtime takes them
for its own."""

import inspect
import logging
import sys
from collections.abc import Callable
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


def not_carried_out(name: str, remedy: str) -> Callable[..., Any]:
    """Returns a method in the place of TensorRT-LLM's `name`, which raises NotImplementedError."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} is TensorRT-LLM's, and lightkv's attention has no such step: {remedy}"
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises NotImplementedError: {remedy}."
    return refuse


def subclassed(own: type, interface: ModuleType | None, **attributes: Any) -> type:
    """Returns a subclass of `own` and of the class of the same name in `interface`, with these attributes of
    the class; `own` itself without an interface.

    What both define is `own`'s. Public methods that only the interface has work on its own fields, which `own`
    does not keep, so they raise NotImplementedError; class methods and static ones stay.
    """
    if interface is None:
        return own
    theirs = getattr(interface, own.__name__)
    remedy = f"use what {own.__module__}.{own.__name__} documents, or TensorRT-LLM's own backend"
    methods = {
        name: not_carried_out(name, remedy)
        for name, _ in inspect.getmembers_static(theirs, inspect.isfunction)
        if not name.startswith("_") and not hasattr(own, name)
    }
    body = {"__doc__": own.__doc__, "__module__": own.__module__, **methods, **attributes}
    return new_class(own.__name__, (own, theirs), exec_body=lambda ns: ns.update(body))
