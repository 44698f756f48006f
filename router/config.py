"""What an engine is started with: one frozen dataclass, from which the command line makes its options.

Knows no torch: dtypes and devices are names here, and become objects on the worker's side.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from lightkv.errors import LightKVError

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION_BACKENDS = ("torch", "triton")


class InvalidConfig(LightKVError, ValueError):
    """A setting outside what it can be."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineConfig:
    """Every setting of an engine. None and "auto" mean: chosen from the model and the device."""

    model: str = _setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "A directory with safetensors, or a Hugging Face hub id."
    )
    device: str = _setting("auto", "Where the model runs: auto (a GPU if there is one), cpu, cuda, cuda:1 …")
    dtype: str = _setting("auto", "auto (the checkpoint's; float32 on a CPU), float32, float16 or bfloat16.")
    attention_backend: str | None = _setting(None, "torch (default on a CPU) or triton (default on a GPU).")
    max_total_tokens: int | None = _setting(
        None, "Tokens that the K/V pool holds. Default: what --mem-fraction leaves; 32768 on a CPU."
    )
    mem_fraction: float = _setting(0.9, "Share of the GPU's memory for weights and K/V pool together.")
    max_num_seqs: int | None = _setting(
        None, "Requests that run at once. Default: 256 on a GPU, 64 on a CPU."
    )
    max_model_len: int | None = _setting(
        None, "Tokens of prompt and output that one request may have. Default: the model's context."
    )
    prefill_chunk: int | None = _setting(
        None, "Prompt tokens a step at most; 0: no limit. Default: 2048 on a GPU, 512 on a CPU."
    )
    cuda_graphs: bool = _setting(True, "Run decode steps as CUDA graphs.")
    compile: bool = _setting(
        False,
        "Compile decode steps before they become graphs: faster, about 20 s more a batch size.",
    )

    def __post_init__(self) -> None:
        """Raises InvalidConfig, naming the setting, its value and what it can be."""
        for name, least in (
            ("max_total_tokens", 1),
            ("max_num_seqs", 1),
            ("max_model_len", 2),
            ("prefill_chunk", 0),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InvalidConfig(f"{_flag(name)} is {value!r}; give a whole number of at least {least}")
        if not 0.0 < self.mem_fraction <= 1.0:
            raise InvalidConfig(f"--mem-fraction is {self.mem_fraction}; give a share above 0 and up to 1")
        if self.dtype not in DTYPES:
            raise InvalidConfig(f"--dtype is {self.dtype!r}; give one of {', '.join(DTYPES)}")
        if self.attention_backend not in (None, *ATTENTION_BACKENDS):
            known = ", ".join(ATTENTION_BACKENDS)
            raise InvalidConfig(f"--attention-backend is {self.attention_backend!r}; give one of {known}")

    @classmethod
    def help(cls, name: str) -> str:
        """The text that explains a setting."""
        return next(f.metadata["help"] for f in fields(cls) if f.name == name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
