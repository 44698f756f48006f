"""The settings with which the launcher starts the API process."""

from typing import Literal

import msgspec


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the HTTP application, and its limits for clients.

    model_names: the names that requests may use for the model; answers report the first.
    api_keys: every route but /health answers 401 to a request without one of them; an empty list lets every
        request in.
    report_cached_tokens: whether usage reports how many tokens of a prompt were cached.
    cache_namespace: the scope in which prefixes are shared: "key", one API key; "header", one value of the
        header NAMESPACE_HEADER, which every request then has to send; None, the whole service.
    max_body_bytes, max_header_bytes: the most bytes of one HTTP request.
    max_unread_bytes: the most bytes of all bodies that are not parsed yet; further bytes are answered 503.
    max_answers: the most answers to one HTTP request, which are n times its prompts.
    allow_priority: whether requests may have a priority below 0.
    tool_parser, reasoning_parser: how the model writes calls and reasoning; None: as its chat template shows.
    session_ttl: seconds without a request after which a session expires, unless a request says otherwise.
    max_queued_requests: how many answers the router keeps waiting; a request for more answers is refused.
    max_connections: the most open connections; further ones are answered 503. Less if the limit of descriptors
        is too low.
    header_seconds, body_seconds: the time in which headers and body have to arrive.
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
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    session_ttl: float = 600.0
    max_queued_requests: int = 4096
    max_connections: int = 8192
    header_seconds: float = 15.0
    body_seconds: float = 60.0


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the API process.

    model_directory: the directory of the tokenizer. router_socket: path of the router's unix socket.
    listen_fd: a bound socket (TCP or unix) that this process inherits.
    certfile, keyfile: PEM files, for HTTPS. shutdown_timeout: seconds that open responses have to finish once
        the router has ended.
    """

    api: ApiSettings
    model_directory: str
    router_socket: str
    listen_fd: int
    certfile: str | None = None
    keyfile: str | None = None
    shutdown_timeout: int = 30
