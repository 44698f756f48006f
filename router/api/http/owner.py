"""What stands for the client of a request or connection, where clients take turns or share a limit."""

import hashlib
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.requests import Request

_PREFIX_BITS = 64  # of an IPv6 address, which a network gives to one client with all addresses behind it


def owner_of(request: Request) -> bytes:
    """Returns the hash of the client's API key or, without keys, of its address, as uvicorn reports it.

    IPv6 addresses of one /64 are one client, and so are all clients over a unix socket.
    """
    key: bytes | None = request.state.api_key
    if key is None:
        key = network_of("" if request.client is None else request.client.host).encode(errors="replace")
    return hashlib.sha256(key).digest()


def network_of(host: str) -> str:
    """Returns the network that is one client's; a name that a proxy gives in place of an address as it is."""
    with suppress(ValueError):
        address = ip_address(host)
        if isinstance(address, IPv6Address):
            return str(address.ipv4_mapped or IPv6Network((int(address), _PREFIX_BITS), strict=False))
    return host
