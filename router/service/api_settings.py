"""The settings with which the launcher starts the API process."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lightkv.router.config import EngineConfig, ServiceConfig
from lightkv.router.service.access.allowed_hosts import HostRule, host_rule

# Connections beyond the queued requests: for running requests, for monitoring, and for answers of 429.
_MORE_CONNECTIONS = 4096


@dataclass(frozen=True, kw_only=True)
class ApiSettings(ServiceConfig):
    """The settings of the HTTP application: those of the service, and further limits for clients.

    max_body_bytes, max_header_bytes: the most bytes of one HTTP request.
    max_unread_bytes: the most bytes of all bodies that are not parsed yet, of which one client's take half;
        further bytes are answered 503.
    max_open_bytes: the same for the bodies of all requests that are not answered yet.
    max_unsent_bytes: the most bytes of answers that clients have not taken; beyond it, the connection with the
        most of them is closed.
    max_answers: the most answers to one HTTP request, which are n times its prompts.
    max_connections: the most open connections; further ones are answered 503. Less if the limit of descriptors
        is too low.
    header_seconds, body_seconds: the time in which headers and body have to arrive.
    write_seconds: the time in which a client has to take some bytes of an answer that waits for it.
    hosts: the values of the header Host that requests may have; None allows all.
    configuration: what /server_info shows of the service's settings, without secrets.
    """

    max_body_bytes: int = 32 * 2**20
    max_unread_bytes: int = 64 * 2**20
    max_open_bytes: int = 256 * 2**20
    max_unsent_bytes: int = 256 * 2**20
    max_header_bytes: int = 64 * 2**10
    max_answers: int = 256
    max_connections: int = 8192
    header_seconds: float = 15.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    hosts: HostRule | None = None
    configuration: dict[str, Any] = field(default_factory=dict)


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the API process.

    model_directory: the directory of the tokenizer. router_socket: path of the router's unix socket.
    listen_fd: a bound socket (TCP or unix) that this process inherits.
    chat_template: the source of a chat template to use in place of the model's own.
    shutdown_timeout: seconds that open responses have to finish once the router has ended.
    """

    api: ApiSettings
    model_directory: str
    router_socket: str
    listen_fd: int
    chat_template: str | None = None
    shutdown_timeout: int = 30


def api_settings(engine: EngineConfig, service: ServiceConfig, is_local: bool) -> ApiSettings:
    """Returns the settings of the HTTP application for those of a service. `is_local`: only this machine
    reaches it."""
    return ApiSettings(
        **{one.name: getattr(service, one.name) for one in fields(service)},
        max_connections=service.max_queued_requests + _MORE_CONNECTIONS,
        hosts=host_rule(service, is_local),
        configuration=shown(engine, service),
    )


def shown(engine: EngineConfig, service: ServiceConfig) -> dict[str, Any]:
    """Returns the settings by name without secrets: no API key, and no user or query in an address."""
    num_keys = {"api_key": len(service.api_key), "metrics_key": len(service.metrics_key)}
    settings = asdict(engine) | asdict(service) | num_keys
    if service.otlp_endpoint is not None:
        parts = urlsplit(service.otlp_endpoint)
        settings["otlp_endpoint"] = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return settings
