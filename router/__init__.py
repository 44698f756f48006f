"""One request through the service: admission, scheduling, the model's steps, text, and the processes around.

Lazy, like `lightkv` itself: what needs torch loads it when it is first used.
"""

from importlib import import_module
from typing import Any

from lightkv.errors import MissingExtra

_EXPORTS = {
    "LLM": ".llm",
    "BeamParams": ".text.beam_search",
    "CompletionOutput": ".llm",
    "Engine": ".engine.loop",
    "EngineConfig": ".config",
    "InvalidConfig": ".config",
    "InvalidParams": ".sampling_params",
    "InvalidPrompt": ".engine.request",
    "LocalEngine": ".engine.loop",
    "NeverFits": ".engine.request",
    "Request": ".engine.request",
    "RequestOutput": ".llm",
    "SamplingParams": ".sampling_params",
    "Scheduler": ".engine.scheduler",
    "StreamChunk": ".llm",
    "peak_tokens": ".engine.admission",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        try:
            module = import_module(_EXPORTS[name], __name__)
        except ModuleNotFoundError as error:
            if isinstance(error, MissingExtra) or not error.name or error.name.startswith("lightkv"):
                raise
            raise MissingExtra(error.name) from error
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
