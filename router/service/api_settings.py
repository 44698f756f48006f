"""What the API process is started with: the launcher writes it, `app.py` reads it. Knows no HTTP library."""

from typing import Literal

import msgspec


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What clients find, and how much they may ask.

    model_names: names that requests may call the model by; the first is the one it is reported under.
    api_keys: without one of them every route but /health answers 401; none at all asks for no key.
    report_cached_tokens: whether usage says how many of a prompt's tokens were cached.
    cache_namespace: what prefixes are shared within: "key", one API key; "header", one value of the header
        NAMESPACE_HEADER, which every request then needs; None, the whole service.
    max_body_bytes, max_header_bytes: of one HTTP request.
    max_unread_bytes: of all bodies that have come and are not parsed yet; further bytes are answered 503.
    max_answers: of one HTTP request: n times its prompts.
    allow_priority: whether a request may give itself a priority below 0.
    max_queued_requests: answers that the router lets wait; no request for more of them can ever be taken.
    max_connections: open at once; further ones are answered 503. Fewer where descriptors do not suffice.
    header_seconds, body_seconds: for each to arrive whole.
    """

    model_names: list[str]
    api_keys: list[str] = []
    report_cached_tokens: bool = False
    cache_namespace: Literal["key", "header"] | None = None
    max_body_bytes: int = 32 * 2**20
    max_unread_bytes: int = 64 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_answers: int = 256
    allow_priority: bool = False
    max_queued_requests: int = 4096
    max_connections: int = 8192
    header_seconds: float = 15.0
    body_seconds: float = 60.0


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API process runs.

    model_directory: of the tokenizer. router_socket: path of the router's unix socket.
    listen_fd: a bound socket (TCP or unix) that this process inherits.
    certfile, keyfile: PEM, for HTTPS. shutdown_timeout: seconds for open responses once the router is gone.
    """

    api: ApiSettings
    model_directory: str
    router_socket: str
    listen_fd: int
    certfile: str | None = None
    keyfile: str | None = None
    shutdown_timeout: int = 30
