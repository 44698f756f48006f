"""lightkv: the KV cache of an LLM, managed one token at a time.

`import lightkv` loads nothing heavy: each name below is imported when it is first used, so the ledger
can be had without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from lightkv.memory.allocator import TokenAllocator as TokenAllocator
    from lightkv.memory.kv_pool import KVPool as KVPool
    from lightkv.memory.kv_spec import KVSpec as KVSpec
    from lightkv.memory.kv_spec import StateTensor as StateTensor
    from lightkv.memory.token_table import TokenTable as TokenTable
    from lightkv.triton_kernels.layout.ring import Ring as Ring
    from lightkv.triton_kernels.quantised.kv_format import KVFormat as KVFormat

    from .attention import Batch as Batch
    from .attention import StaticStep as StaticStep
    from .attention import Step as Step
    from .errors import CheckFailed as CheckFailed
    from .errors import InvalidDevice as InvalidDevice
    from .errors import InvalidFree as InvalidFree
    from .errors import LedgerMismatch as LedgerMismatch
    from .errors import LightKVError as LightKVError
    from .errors import MemoryFailed as MemoryFailed
    from .errors import OutOfMemory as OutOfMemory
    from .errors import OutOfRows as OutOfRows
    from .errors import OutOfStates as OutOfStates
    from .errors import OutOfTokens as OutOfTokens
    from .errors import SequenceTooLong as SequenceTooLong
    from .errors import WrongThread as WrongThread
    from .kv_cache import KVCache as KVCache
    from .ledger import TokenLedger as TokenLedger
    from .memory_map import MemoryMap as MemoryMap

__version__ = "0.1.0"

_NAMES = {
    ".attention": ("Batch", "StaticStep", "Step"),
    ".errors": (
        "CheckFailed",
        "InvalidDevice",
        "InvalidFree",
        "LedgerMismatch",
        "LightKVError",
        "MemoryFailed",
        "OutOfMemory",
        "OutOfRows",
        "OutOfStates",
        "OutOfTokens",
        "SequenceTooLong",
        "WrongThread",
    ),
    ".kv_cache": ("KVCache",),
    ".ledger": ("TokenLedger",),
    ".memory.allocator": ("TokenAllocator",),
    ".memory.kv_pool": ("KVPool",),
    ".memory.kv_spec": ("KVSpec", "StateTensor"),
    ".memory.token_table": ("TokenTable",),
    ".memory_map": ("MemoryMap",),
    ".triton_kernels.layout.ring": ("Ring",),
    ".triton_kernels.quantised.kv_format": ("KVFormat",),
}
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_EXPORTS)


if not TYPE_CHECKING:  # with it, type checkers would let every name pass

    def __getattr__(name: str) -> object:
        if name in _EXPORTS:
            return getattr(import_module(_EXPORTS[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
