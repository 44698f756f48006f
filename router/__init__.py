"""One request through the service: admission, scheduling, the model's steps, text, and the processes around.

Lazy, like `lightkv` itself: what needs torch loads it when it is first used.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "LLM": ".llm",
    "CompletionOutput": ".llm",
    "Engine": ".engine",
    "EngineConfig": ".config",
    "InvalidConfig": ".config",
    "InvalidParams": ".sampling_params",
    "InvalidPrompt": ".scheduler",
    "NeverFits": ".scheduler",
    "Request": ".scheduler",
    "RequestOutput": ".llm",
    "SamplingParams": ".sampling_params",
    "Scheduler": ".scheduler",
    "StreamChunk": ".llm",
    "peak_tokens": ".admission",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
