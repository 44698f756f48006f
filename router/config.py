"""The settings of an engine and of a service. The command line makes its options from their fields.

A field declares its range beside its type, as a `msgspec.Meta`; the checks, the errors, the help of options
and docs/api.md take it from there. Dtypes and devices are names here, so that this file loads without torch;
the worker makes objects of them.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from lightkv.errors import LightKVError
from lightkv.triton_kernels.layout.format_names import split_name

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION_BACKENDS = ("torch", "triton")
PREFILL_DTYPES = ("auto", "fp8", "model")
ADMISSIONS = ("guaranteed", "reserved", "timely")
TOOL_PARSERS = ("none", "hermes", "qwen3_coder", "llama3", "mistral", "deepseek", "gpt_oss")
REASONING_PARSERS = ("none", "qwen3", "deepseek_r1", "gpt_oss")
TTFT_TARGET = 10.0  # seconds
SAMPLING_DEFAULTS = ("model", "openai")
LOG_LEVELS = ("debug", "info", "warning", "error")
CACHE_NAMESPACES = ("key", "header")
NAMESPACE_HEADER = "X-Cache-Namespace"
SESSION_HEADER = "X-Session-Id"
MAX_SECONDS = 86_400.0
SECONDS = Meta(gt=0, le=MAX_SECONDS, title="seconds")
# Environment variables, since the users of a machine can see one another's command lines.
API_KEY_VARIABLE = "LIGHTKV_API_KEY"
METRICS_KEY_VARIABLE = "LIGHTKV_METRICS_KEY"
_HOST_NAME = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#@]+")
_EVENTS_ADDRESS = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")


class InvalidConfig(LightKVError, ValueError):
    """A setting has a value that is not allowed."""


def setting(default: Any, text: str, choices: Sequence[str] = ()) -> Any:
    """Makes a dataclass field. The command line shows `text` as the help of its option. `choices`: its values
    beside None; none given are any."""
    return field(default=default, metadata={"help": text, "choices": choices})


def flag(name: str) -> str:
    """Returns the option of the setting `name`: "--max-num-seqs" for "max_num_seqs"."""
    return "--" + name.replace("_", "-")


_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}


class Allowed(NamedTuple):
    """What the annotation of a field allows. `hint`: the annotation. `kinds`: the types of its values, without
    their range. `meta`: the range of numbers, if there is one; its `title` names them ("seconds"), and its
    `description` is a remark."""

    hint: Any
    kinds: tuple[Any, ...]
    meta: Meta | None

    def takes(self, value: object) -> bool:
        """Returns whether a value is of the right type and in the range. A bool is no number, an int is a
        float, and a list is no tuple. NaN is in no range."""
        try:
            return type(value) in (type(msgspec.convert(value, self.hint)), int)
        except msgspec.ValidationError:
            return False

    @property
    def words(self) -> str:
        """What to give: "a whole number of at least 1"."""
        meta = self.meta or Meta()
        noun = meta.title or _WANTED.get(self.kinds[0], "texts in quotes")
        said = f"{noun} {bounds(meta, of='of ')}".rstrip()
        return f"{said} ({meta.description})" if meta.description else said


def bounds(meta: Meta, of: str = "") -> str:
    """Returns a range in words: "from 0 to 1", "above 0 and up to 1", or "at least 1" with `of` before it."""
    low, above, high, below = (_shown(limit) for limit in (meta.ge, meta.gt, meta.le, meta.lt))
    if low and high:
        return f"from {low} to {high}"
    upper = f"up to {high}" if high else f"below {below}" if below else ""
    lower = f"{of}at least {low}" if low else f"above {above}" if above else ""
    return " and ".join(part for part in (lower, upper) if part)


def _shown(limit: float | None) -> str:
    """Returns a limit as text; "" where there is none."""
    if limit is None:
        return ""
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


@functools.cache
def declared(owner: type) -> dict[str, Allowed]:
    """Returns what each field of a dataclass or a struct allows."""
    return {name: _allowed(hint) for name, hint in get_type_hints(owner, include_extras=True).items()}


def _allowed(hint: Any) -> Allowed:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    metas = [said for one in members for said in getattr(one, "__metadata__", ()) if isinstance(said, Meta)]
    plain = tuple(one.__origin__ if hasattr(one, "__metadata__") else one for one in members)
    return Allowed(hint, plain, metas[0] if metas else None)


def require_allowed(settings: Any, error: type[LightKVError] = InvalidConfig) -> None:
    """Raises `error` for the first setting whose value its field does not allow, by its type or its range, or
    that is none of its choices."""
    for name, allowed in declared(settings.__class__).items():
        value = getattr(settings, name)
        if not allowed.takes(value):
            raise error(f"{flag(name)} is {value!r}; give {allowed.words}")
    for one in fields(settings):
        value, choices = getattr(settings, one.name), one.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise error(f"{flag(one.name)} is {value!r}; give one of {', '.join(choices)}")


@dataclass(frozen=True)
class EngineConfig:
    """Every setting of an engine. None and "auto" stand for a value chosen from the model and the device."""

    model: str = setting(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "A directory with safetensors, or an id on the Hugging Face hub.",
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of the model on the Hugging Face hub. Default: its main branch."
    )
    device: str = setting("auto", "Where the model runs: auto (a GPU if there is one), cpu, cuda, cuda:1 …")
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = setting(
        1,
        "How many ranks run the model together, each a process with a part of the weights and of K and V: on "
        "GPUs the first so many of this host. The number has to divide the model's heads. For a service alone.",
    )
    dtype: str = setting(
        "auto",
        "float32, float16, bfloat16, or auto: float32 on a CPU; on a GPU the checkpoint's type if it has "
        "16 bits, else bfloat16.",
        choices=DTYPES,
    )
    kv_dtype: str = setting(
        "auto",
        "How the pool stores K and V: auto (the type of --dtype), int8 (half the bytes of 16 bits), "
        "int8-hadamard (likewise, outliers spread over a head), int4 (a quarter), int8-gN or int4-gN (a scale "
        "for each N elements of a head), or fp8-static (half, with the checkpoint's own scales).",
    )
    kv_skip_layers: str = setting(
        "",
        "Layers whose K and V stay in the type of --dtype whatever --kv-dtype says, counted from 0: 0,1,31.",
    )
    prefill_dtype: str = setting(
        "auto",
        "What attention of prompts computes in, with --kv-dtype fp8-static: fp8 (on Hopper GPUs; a layer for "
        "which the checkpoint has no scale of queries takes 1.0), model (the type of --dtype), or auto: fp8 "
        "where the checkpoint has scales of queries and the GPU can.",
        choices=PREFILL_DTYPES,
    )
    attention_backend: str | None = setting(
        None, "torch (default on a CPU) or triton (default on a GPU).", choices=ATTENTION_BACKENDS
    )
    max_total_tokens: Annotated[int, Meta(ge=1)] | None = setting(
        None,
        "Capacity of the K/V pool, in tokens. Default: what fits in --mem-fraction on a GPU; 32768 on a CPU.",
    )
    mamba_full_memory_ratio: Annotated[float, Meta(gt=0, le=1000)] | None = setting(
        None,
        "For a model with recurrent layers: the bytes of their states, of which each running request takes one "
        "and the prefix cache the others, over the bytes of K/V. Default: as much as one state for each 8,192 "
        "tokens takes, or for each of --max-num-seqs if that is more, but at most 1/3, unless these are fewer "
        "than four, and half of the memory has room for more.",
    )
    mem_fraction: Annotated[float, Meta(gt=0, le=1, title="a share")] = setting(
        0.9, "Share of the GPU's memory that the weights and the K/V pool may use together."
    )
    max_num_seqs: Annotated[int, Meta(ge=1)] | None = setting(
        None, "The most requests that run at once. Default: 256 on a GPU, 64 on a CPU."
    )
    max_model_len: Annotated[int, Meta(ge=2)] | None = setting(
        None, "The most tokens of one request, prompt and output together. Default: the model's context."
    )
    prefill_chunk: Annotated[int, Meta(ge=0)] | None = setting(
        None,
        "The most prompt tokens per step; 0 is no limit, unless --itl-target is given. The memory for a step "
        "of as many is taken from the pool. Default: 4096 on a GPU "
        "and 512 on a CPU; 8192 and 2048 with an --itl-target of 0, as in `LLM`.",
    )
    admission: str = setting(
        "guaranteed",
        "How the scheduler decides which waiting request may run. guaranteed: a request is admitted when it "
        "and all running requests fit in the pool as far as they are expected to grow, by the lengths of "
        "recent answers. A request with max_tokens is guaranteed, and never preempted, as soon as all "
        "guaranteed ones fit up to their max_tokens. When memory runs short, the youngest of the others is "
        "preempted and continues later. "
        "reserved: a request with max_tokens waits until it is guaranteed. timely: like guaranteed, "
        "but a request that has waited too long to meet --ttft-target lets others go first, as long as more "
        "requests arrive than can be served. lightkv simulate compares them with others.",
        choices=ADMISSIONS,
    )
    ttft_target: Annotated[float, Meta(gt=0, title="seconds")] = setting(
        TTFT_TARGET, "For --admission timely: the target for the time to the first token, in seconds."
    )
    itl_target: Annotated[float, Meta(ge=0, le=MAX_SECONDS, title="seconds")] | None = setting(
        None,
        "The target for the time between tokens, in seconds. While requests decode, a step takes only as many "
        "prompt tokens as keep it within the target, by step times that are measured at start. 0 is no target. "
        "Default for a service on a GPU: 0.030, or 2.5 times what the step takes without prompts if that is "
        "longer, and more while prompts of over 0.1 seconds wait, or one of 0.05: up to 0.120 or 3 times; "
        "on a CPU, and for an LLM in a program: no target.",
    )
    session_share: Annotated[float, Meta(ge=0, le=1, title="a share")] = setting(
        0.5,
        "Share of the pool that the tokens of sessions (session_id in a request) may take and be evicted after "
        "all other cached tokens. Beyond it, the sessions that were used the longest ago lose this protection. "
        "Running requests come first in any case. 0: no session protects anything.",
    )
    cuda_graphs: bool = setting(True, "Run steps as CUDA graphs, those of up to 4,352 tokens.")
    group_prefixes: bool = setting(
        True,
        "In decode steps, read a long prefix once for all the requests that share it (triton backend).",
    )
    fuse: bool = setting(
        True,
        "Compute q, k and v as one product, gate and up as one product, norms together with the additions "
        "before them, and the routing of experts in few kernels, in layers where that is found to be the same.",
    )
    dequantise: bool = setting(
        False,
        "Make quantised weights of linear layers dense while they are loaded, in the type of the others: they "
        "take more memory, and products are those of a model that was never quantised.",
    )
    kv_events: str | None = setting(
        None,
        "Publish what the cache holds, for gateways that route by prefixes, at tcp://HOST:PORT (HOST *: every "
        "address; replays at the next port): vLLM's KV events over ZeroMQ, in blocks of 64 tokens. Programs "
        "that can connect there read the prompts. Needs the packages of lightkv[events]. For lightkv serve.",
    )

    def __post_init__(self) -> None:
        """Raises InvalidConfig, which names the setting, its value and the values allowed."""
        require_allowed(self)
        try:
            split_name(self.kv_dtype)
        except ValueError as error:
            raise InvalidConfig(f"--kv-dtype: {error}") from error
        _ = self.skipped_layers  # raises InvalidConfig
        if self.prefill_dtype == "fp8" and self.kv_dtype != "fp8-static":
            raise InvalidConfig(
                f"--prefill-dtype fp8 reads K and V in fp8 with a checkpoint's scales, and --kv-dtype is "
                f"{self.kv_dtype}; give --kv-dtype fp8-static, too"
            )
        if self.kv_events is not None:
            found = _EVENTS_ADDRESS.fullmatch(self.kv_events)
            if found is None or not 1 <= int(found["port"]) <= 65534:  # replays take the next one
                raise InvalidConfig(
                    f"--kv-events is {self.kv_events!r}; give tcp://HOST:PORT with a port from 1 to 65534, "
                    "such as tcp://127.0.0.1:5557, or tcp://*:5557 for every address of this machine"
                )

    @property
    def skipped_layers(self) -> tuple[int, ...]:
        """The layers that `kv_skip_layers` names, ascending, each once. Raises InvalidConfig."""
        named = [part.strip() for part in self.kv_skip_layers.split(",")] if self.kv_skip_layers else []
        if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in named):
            raise InvalidConfig(
                f"--kv-skip-layers is {self.kv_skip_layers!r}; give layers, counted from 0, with commas "
                "between them, such as 0,1,31"
            )
        return tuple(sorted(set(map(int, named))))


@dataclass(frozen=True)
class ServiceConfig:
    """Every setting of the service around an engine: its address, its keys, its limits and its timeouts."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. Other machines can connect unless it is a loopback address, as the default is.",
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="0: a free port")] = setting(
        8000, "Port to listen on; 0 takes a free one."
    )
    uds: str | None = setting(
        None, "Path of a unix socket to listen on instead of --host and --port. Only this user can connect."
    )
    api_key: tuple[str, ...] = setting(
        (),
        f"A key of which clients have to send one; can be given several times. The environment variable "
        f"{API_KEY_VARIABLE} or a file is safer: all users of a machine can see its command lines.",
    )
    api_key_file: str | None = setting(
        None,
        "File of further keys, one per line, each alone or after a name for logs and metrics (NAME KEY). "
        "Its limits may follow: rpm=N and tpm=N (requests and tokens a minute), max_parallel_requests=N. Lines "
        "that begin with # are skipped. The file is read again when it changes.",
    )
    metrics_key: tuple[str, ...] = setting(
        (),
        "A key that opens /metrics and nothing else, for Prometheus; can be given several times. It needs API "
        "keys beside it, which open /metrics, too. The environment variable "
        f"{METRICS_KEY_VARIABLE} or a file is safer.",
    )
    metrics_key_file: str | None = setting(
        None, "File of further metrics keys, written and read again as that of --api-key-file."
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "An origin whose web pages may call the service from a browser (CORS), such as https://example.org; "
        "can be given several times. *: every origin. Default: none.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "A host name by which clients may call the service, such as llm.example.org or *.example.org; can be "
        "given several times. *: every name. IP addresses and localhost are always allowed. Default: every "
        "name if the service has API keys or a --uds. Without keys, on a loopback address no further name, and "
        "on another one the machine's own name, names without a dot, and those below .local, .internal and "
        ".home.arpa.",
    )
    log_requests: bool = setting(
        False,
        "Write one line of JSON for each request to standard error: times, counts and the status, and nothing "
        "of its text. Probes (/health, /ready) and /metrics have none.",
    )
    otlp_endpoint: str | None = setting(
        None,
        "Address of an OpenTelemetry collector that takes traces by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces. Every request becomes a span, with spans for queue, prefill and "
        "decode. Needs the packages of lightkv[otel].",
    )
    default_max_tokens: Annotated[int, Meta(ge=1)] | None = setting(
        None,
        "The most tokens of an answer to a request that does not say. Default: what the context leaves for a "
        "chat, 16 for a plain completion.",
    )
    sampling_defaults: str = setting(
        "model",
        "What requests leave out of temperature, top_k, top_p, min_p and repetition_penalty is as the model's "
        "generation_config.json recommends (model), or 1 for the temperature and no limit or penalty (openai).",
        choices=SAMPLING_DEFAULTS,
    )
    chat_template: str | None = setting(
        None, "File of a chat template (Jinja) to use in place of the model's own."
    )
    report_cached_tokens: bool = setting(
        False,
        "Report in usage how many tokens of a prompt were cached. A client can use it to find out, token by "
        "token, what other clients have sent.",
    )
    cache_namespace: str | None = setting(
        None,
        "Share cached prefixes only among requests with the same API key (key), or with the same value of the "
        f"header {NAMESPACE_HEADER} (header), which a proxy has to set. Default: among all requests.",
        choices=CACHE_NAMESPACES,
    )
    ssl_certfile: str | None = setting(None, "Certificate chain in PEM format; the service then uses HTTPS.")
    ssl_keyfile: str | None = setting(
        None, "The certificate's key in PEM format, if it is in a separate file."
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "Name of the model in requests; can be given several times. An answer has the name of its request, or "
        "the first. Default: MODEL as given.",
    )
    max_queued_requests: Annotated[int, Meta(ge=1)] = setting(
        4096, "The most requests that may wait; further requests are refused (429)."
    )
    shutdown_timeout: Annotated[float, Meta(ge=0, le=MAX_SECONDS, title="seconds")] = setting(
        30.0, "Seconds that running requests may still take after the service is told to stop."
    )
    step_timeout: Annotated[float, SECONDS] | None = setting(
        None,
        "Seconds after which a worker that has not finished a step is killed and replaced. Default: 60 on a "
        "GPU, 600 on a CPU.",
    )
    session_ttl: Annotated[float, SECONDS] = setting(
        600.0,
        "Seconds after the end of its last answer for which a session protects its tokens, unless its last "
        "request gave a session_ttl of its own.",
    )
    tool_parser: str | None = setting(
        None,
        f"How the model writes tool calls: {', '.join(TOOL_PARSERS)}. Default: as its chat template shows.",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str | None = setting(
        None,
        f"How the model writes its reasoning: {', '.join(REASONING_PARSERS)}. Default: as its chat template "
        "shows.",
        choices=REASONING_PARSERS,
    )
    root_path: str = setting(
        "",
        "Path under which a proxy passes requests on, such as /llm, whether it takes the path away or not.",
    )
    timeout_keep_alive: Annotated[int, Meta(ge=1, le=3600, title="seconds")] = setting(
        5, "Seconds after which a connection is closed that is kept open without a request."
    )
    log_level: str = setting(
        "warning",
        f"The least important lines of the HTTP server's log: {', '.join(LOG_LEVELS)}.",
        choices=LOG_LEVELS,
    )
    allow_priority: bool = setting(
        False,
        "Let requests set a priority below 0, and so go ahead of others. A priority above 0, which lets others "
        "go ahead, is always allowed. One unit of priority is worth one minute of waiting, up to ten minutes "
        "ahead of others and an hour behind them.",
    )

    def __post_init__(self) -> None:
        """Raises InvalidConfig, which names the setting, its value and the values allowed."""
        require_allowed(self)
        for name in ("api_key", "metrics_key"):
            if any(not key or key != key.strip() for key in getattr(self, name)):
                raise InvalidConfig(f"{flag(name)} is empty or has spaces around it; give a key without them")
        has_metrics_key = self.metrics_key or self.metrics_key_file is not None
        if has_metrics_key and not self.api_key and self.api_key_file is None:
            raise InvalidConfig(
                "--metrics-key is given without API keys, so every route is open; give --api-key-file, too"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise InvalidConfig("--ssl-keyfile is given without --ssl-certfile; give both")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InvalidConfig(
                    f"--allowed-origins is {origin!r}; give scheme and host without a path, such as "
                    "https://example.org or http://localhost:3000, or * for every origin"
                )
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise InvalidConfig(
                    f"--allowed-hosts is {name!r}; give a name without scheme and port, such as "
                    "llm.example.org or *.example.org, or * for every name"
                )
        if self.otlp_endpoint is not None and not re.match("https?://[^/]", self.otlp_endpoint):
            raise InvalidConfig(
                f"--otlp-endpoint is {self.otlp_endpoint!r}; give a URL such as "
                "http://localhost:4318/v1/traces"
            )
        if self.root_path and not re.fullmatch("(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise InvalidConfig(
                f"--root-path is {self.root_path!r}; give a path such as /llm, without a / at its end"
            )
        if "" in self.served_model_name:
            raise InvalidConfig("--served-model-name is empty; give one, or leave it out")
        if len(set(self.served_model_name)) < len(self.served_model_name):
            raise InvalidConfig("--served-model-name has a name twice; leave one of them out")
        for name in ("host", "uds", "api_key_file", "metrics_key_file", "chat_template"):
            if getattr(self, name) == "":
                raise InvalidConfig(f"{flag(name)} is empty; give one, or leave it out")
