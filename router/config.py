"""What an engine and a service are started with: frozen dataclasses, from which the command line makes its
options.

Knows no torch: dtypes and devices are names here, and become objects on the worker's side.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from lightkv.errors import LightKVError

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION_BACKENDS = ("torch", "triton")
ADMISSIONS = (
    "exact",
    "quantile",
    "timely",
    "past-future",
    "moving-average",
    "watermark",
    "sum",
    "oracle",
)
TTFT_TARGET = 10.0  # seconds
CACHE_NAMESPACES = ("key", "header")
NAMESPACE_HEADER = "X-Cache-Namespace"
MAX_SECONDS = 86_400.0
API_KEY_VARIABLE = "LIGHTKV_API_KEY"  # of the environment: a machine's users see one another's command lines


class InvalidConfig(LightKVError, ValueError):
    """A setting outside what it can be."""


def setting(default: Any, text: str) -> Any:
    """Returns a field of a settings class with a default and the help text of its option."""
    return field(default=default, metadata={"help": text})


def flag(name: str) -> str:
    """Returns the command line's option for the setting `name`."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """The base of frozen dataclasses of settings, from which the command line makes its options."""

    @classmethod
    def help(cls, name: str) -> str:
        """Returns the help text of the setting `name`."""
        return next(f.metadata["help"] for f in fields(cls) if f.name == name)


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Every setting of an engine. None and "auto" mean: chosen from the model and the device."""

    model: str = setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "A directory with safetensors, or a Hugging Face hub id."
    )
    device: str = setting("auto", "Where the model runs: auto (a GPU if there is one), cpu, cuda, cuda:1 …")
    dtype: str = setting("auto", "auto (the checkpoint's; float32 on a CPU), float32, float16 or bfloat16.")
    attention_backend: str | None = setting(None, "torch (default on a CPU) or triton (default on a GPU).")
    max_total_tokens: int | None = setting(
        None, "Tokens that the K/V pool holds. Default: what --mem-fraction leaves; 32768 on a CPU."
    )
    mem_fraction: float = setting(0.9, "Share of the GPU's memory for weights and K/V pool together.")
    max_num_seqs: int | None = setting(None, "Requests that run at once. Default: 256 on a GPU, 64 on a CPU.")
    max_model_len: int | None = setting(
        None, "Tokens of prompt and output that one request may have. Default: the model's context."
    )
    prefill_chunk: int | None = setting(
        None, "Prompt tokens a step at most; 0: no limit. Default: 2048 on a GPU, 512 on a CPU."
    )
    admission: str = setting(
        "exact",
        "exact: a request is admitted when it, and all that run, fit to their last token; nothing is ever "
        "paused. quantile: by the lengths of recent outputs; fuller, and pauses the youngest where short. "
        "timely: as quantile, and who has waited too long for --ttft-target lets others go first, without "
        "end if more comes than can be served. To "
        "compare with: moving-average and past-future (other estimates of the same), watermark (by prompts "
        "alone, up to 99 % of the pool), sum (prompt + max_tokens added up), oracle (exact, for requests whose "
        "max_tokens is how long they get, as with ignore_eos).",
    )
    ttft_target: float = setting(TTFT_TARGET, "Seconds to the first token that --admission timely is for.")
    cuda_graphs: bool = setting(True, "Run decode steps as CUDA graphs.")
    group_prefixes: bool = setting(
        True,
        "In decode steps, read a long prefix that requests share once for all of them (triton backend).",
    )
    compile: bool = setting(
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
                raise InvalidConfig(f"{flag(name)} is {value!r}; give a whole number of at least {least}")
        if not 0.0 < self.mem_fraction <= 1.0:
            raise InvalidConfig(f"--mem-fraction is {self.mem_fraction}; give a share above 0 and up to 1")
        if not self.ttft_target > 0:
            raise InvalidConfig(f"--ttft-target is {self.ttft_target}; give seconds, more than 0")
        if self.dtype not in DTYPES:
            raise InvalidConfig(f"--dtype is {self.dtype!r}; give one of {', '.join(DTYPES)}")
        if self.attention_backend not in (None, *ATTENTION_BACKENDS):
            known = ", ".join(ATTENTION_BACKENDS)
            raise InvalidConfig(f"--attention-backend is {self.attention_backend!r}; give one of {known}")
        if self.admission not in ADMISSIONS:
            raise InvalidConfig(f"--admission is {self.admission!r}; give one of {', '.join(ADMISSIONS)}")


@dataclass(frozen=True)
class ServiceConfig(Settings):
    """Every setting of the service around an engine: where it listens, who is let in, how it ends."""

    host: str = setting("127.0.0.1", "Address to listen on. Any but the default lets other machines in.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.")
    uds: str | None = setting(
        None, "Path of a unix socket to listen on, in place of --host and --port; for this user alone."
    )
    api_key: tuple[str, ...] = setting(
        (),
        f"What clients have to send as their key; may be given several times. Better given in the environment, "
        f"{API_KEY_VARIABLE}, or in a file: command lines are seen by all of a machine's users.",
    )
    api_key_file: str | None = setting(None, "File of further keys, one a line.")
    report_cached_tokens: bool = setting(
        False,
        "Tell clients in usage how many tokens of a prompt were cached. It lets a client find out, token by "
        "token, what others have asked.",
    )
    cache_namespace: str | None = setting(
        None,
        "Share cached prefixes only within one API key (key), or within one value of the header "
        f"{NAMESPACE_HEADER} (header), which a proxy has to set. Default: within the whole service.",
    )
    ssl_certfile: str | None = setting(None, "Certificate chain, PEM: makes it HTTPS.")
    ssl_keyfile: str | None = setting(None, "The certificate's key, PEM, if it is in a file of its own.")
    served_model_name: str | None = setting(
        None, "Name that clients call the model by. Default: MODEL as given."
    )
    max_queued_requests: int = setting(4096, "Requests that may wait; further ones are refused (429).")
    shutdown_timeout: float = setting(30.0, "Seconds that running requests get once it is told to stop.")
    step_timeout: float | None = setting(
        None,
        "Seconds after which a worker that has not finished a step is killed and replaced. Default: 60 on a "
        "GPU, 600 on a CPU.",
    )
    allow_priority: bool = setting(
        False,
        "Let requests raise their own urgency, by a priority below 0. They may always lower it, by one above "
        "0; a unit of priority is worth a minute of waiting.",
    )
    socket_dir: str | None = setting(
        None, "Directory for the sockets between its processes. Default: a temporary one."
    )

    def __post_init__(self) -> None:
        """Raises InvalidConfig, naming the setting, its value and what it can be."""
        if not 0 <= self.port <= 65535:
            raise InvalidConfig(f"--port is {self.port}; give one of 1 to 65535, or 0 for a free one")
        if self.max_queued_requests < 1:
            raise InvalidConfig(f"--max-queued-requests is {self.max_queued_requests}; give at least 1")
        if not 0.0 <= self.shutdown_timeout <= MAX_SECONDS:
            most = f"0 to {MAX_SECONDS:.0f} seconds"
            raise InvalidConfig(f"--shutdown-timeout is {self.shutdown_timeout}; give {most}")
        if self.step_timeout is not None and not 0.0 < self.step_timeout <= MAX_SECONDS:
            most = f"seconds above 0 and up to {MAX_SECONDS:.0f}"
            raise InvalidConfig(f"--step-timeout is {self.step_timeout}; give {most}")
        if any(not key or key != key.strip() for key in self.api_key):
            raise InvalidConfig("--api-key is empty, or has spaces around it; give a key without")
        if self.cache_namespace not in (None, *CACHE_NAMESPACES):
            known = " or ".join(CACHE_NAMESPACES)
            raise InvalidConfig(f"--cache-namespace is {self.cache_namespace!r}; give {known}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise InvalidConfig("--ssl-keyfile is given without --ssl-certfile; give both")
        for name in ("host", "uds", "served_model_name", "socket_dir", "api_key_file"):
            if getattr(self, name) == "":
                raise InvalidConfig(f"{flag(name)} is empty; give one, or leave it out")
