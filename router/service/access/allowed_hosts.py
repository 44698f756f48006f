"""Which values of the header Host a service answers.

A web page whose name its owner lets point to this service's address (DNS rebinding) is of the same origin as
the service, as far as a browser can tell. It may read every answer, but its requests have the page's own name
as their Host.
"""

import ipaddress
import re
import socket

import msgspec

from lightkv.router.config import ServiceConfig

_WITH_PORT = re.compile(r"(\[(?P<address>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(:[0-9]*)?")
_NAME = re.compile(r"[a-z0-9._-]+")
# Public DNS gives out no names below these.
_PRIVATE_SUFFIXES = (".local", ".internal", ".home.arpa", ".localhost")


class HostRule(msgspec.Struct, frozen=True):
    """The hosts that requests may name. IP addresses, localhost and requests without a Host are always allowed:
    no page can have them by rebinding.

    names: further names in lower case; "*.example.org" stands for all names below example.org.
    takes_private: also names without a dot, and those below .local, .internal and .home.arpa.
    """

    names: tuple[str, ...] = ()
    takes_private: bool = False

    def allows(self, host: str) -> bool:
        """Returns whether the value of a header Host, with or without a port, is allowed."""
        name = _without_port(host.strip().lower()).removesuffix(".")
        if not name or name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return True
        if not _NAME.fullmatch(name):
            return False
        if self.takes_private and ("." not in name or name.endswith(_PRIVATE_SUFFIXES)):
            return True
        return any(
            name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
            for allowed in self.names
        )


def host_rule(service: ServiceConfig, is_local: bool) -> HostRule | None:
    """Returns the rule for a service, or None if it checks no Host. `is_local`: only this machine reaches it.

    By default there is no check where a key is needed, which a page does not have, or on a unix socket, which
    no browser opens. Beyond this machine, private names are allowed, too: who can give them out, on the same
    network, reaches the service without them.
    """
    if "*" in service.allowed_hosts:
        return None
    names = [name.lower() for name in service.allowed_hosts]
    if not names:
        if service.api_key or service.api_key_file is not None or service.uds is not None:
            return None
        if not is_local:
            names.append(socket.gethostname().lower())
    return HostRule((*names, service.host.lower()), not service.allowed_hosts and not is_local)


def _without_port(host: str) -> str:
    found = _WITH_PORT.fullmatch(host)
    return host if found is None else found["address"] or found["name"]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
