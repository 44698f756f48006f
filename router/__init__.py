"""One request through the service: admission, scheduling, the model's steps, text, and the processes around.

Lazy, like `lightkv` itself: what needs torch loads it when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lightkv.errors import MissingExtra

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from lightkv.router.engine.loop import Engine as Engine
    from lightkv.router.engine.loop import LocalEngine as LocalEngine
    from lightkv.router.engine.request import InvalidPrompt as InvalidPrompt
    from lightkv.router.engine.request import NeverFits as NeverFits
    from lightkv.router.engine.request import Request as Request
    from lightkv.router.engine.scheduler import Scheduler as Scheduler
    from lightkv.router.text.beam_search import BeamParams as BeamParams

    from .config import EngineConfig as EngineConfig
    from .config import InvalidConfig as InvalidConfig
    from .llm import LLM as LLM
    from .llm import CompletionOutput as CompletionOutput
    from .llm import RequestOutput as RequestOutput
    from .llm import StreamChunk as StreamChunk
    from .sampling_params import Grammar as Grammar
    from .sampling_params import InvalidParams as InvalidParams
    from .sampling_params import SamplingParams as SamplingParams

_NAMES = {
    ".config": ("EngineConfig", "InvalidConfig"),
    ".engine.loop": ("Engine", "LocalEngine"),
    ".engine.request": ("InvalidPrompt", "NeverFits", "Request"),
    ".engine.scheduler": ("Scheduler",),
    ".llm": ("CompletionOutput", "LLM", "RequestOutput", "StreamChunk"),
    ".sampling_params": ("Grammar", "InvalidParams", "SamplingParams"),
    ".text.beam_search": ("BeamParams",),
}
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_EXPORTS)


if not TYPE_CHECKING:  # with it, type checkers would let every name pass

    def __getattr__(name: str) -> object:
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(_EXPORTS[name], __name__)
        except ModuleNotFoundError as error:
            if isinstance(error, MissingExtra) or not error.name or error.name.startswith("lightkv"):
                raise
            raise MissingExtra(error.name) from error
        return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
