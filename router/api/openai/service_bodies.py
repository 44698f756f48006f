"""The bodies of the routes beside completions and chats: models, tokens, sessions, health and the service."""

from typing import Any, Literal

from typing_extensions import TypedDict


class Model(TypedDict):
    """A name of the model. `kv_dtype`: how the pool stores K and V; None until the model is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    kv_dtype: str | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class ReleasedSession(TypedDict):
    """The answer to the release of a session."""

    id: str
    object: Literal["session"]
    released: Literal[True]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class Health(TypedDict):
    """The answer of /health. `step_age`: seconds since the last step completed, while work waits.
    `router_silence`: seconds since the router last reported."""

    healthy: bool
    state: Literal["starting", "ready", "draining", "dead"]
    step_age: float
    router_silence: float


class Ready(TypedDict):
    ready: bool
    state: Literal["starting", "ready", "draining", "dead"]
    detail: str


class Version(TypedDict):
    version: str


class ServerInfo(TypedDict):
    """`configuration`: the settings by name, without secrets. `runner`: the model and its memory; null until
    they are loaded."""

    version: str
    configuration: dict[str, Any]
    runner: dict[str, Any] | None


class CacheEvicted(TypedDict):
    """How many cached tokens were evicted."""

    num_evicted_tokens: int
