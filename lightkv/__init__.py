"""lightkv: the KV cache of an LLM, managed one token at a time.

`import lightkv` loads nothing heavy: each name below is imported when it is first used, so the ledger
can be had without torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "AttentionMetadata": ".attention",
    "CheckFailed": ".errors",
    "InvalidFree": ".errors",
    "KVCache": ".kv_cache",
    "KVPool": ".memory.kv_pool",
    "KVSpec": ".memory.kv_spec",
    "LedgerMismatch": ".errors",
    "LightKVError": ".errors",
    "MemoryMap": ".memory_map",
    "OutOfMemory": ".errors",
    "OutOfRows": ".errors",
    "OutOfTokens": ".errors",
    "Ring": ".triton_kernels.attention.ring",
    "SequenceTooLong": ".errors",
    "TokenAllocator": ".memory.allocator",
    "TokenLedger": ".ledger",
    "TokenTable": ".memory.token_table",
    "WrongThread": ".errors",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
