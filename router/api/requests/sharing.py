"""With whom a request shares: the namespace of its cached prefixes, and the session that protects them."""

import hashlib

from fastapi import Request

from lightkv.errors import LightKVError
from lightkv.router.api.answers.sessions import SessionUse
from lightkv.router.config import NAMESPACE_HEADER, SESSION_HEADER
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.service.api_settings import ApiSettings

MAX_SESSION_ID = 256  # characters


class InvalidHeader(LightKVError):
    """A header that the service requires is missing, empty or given several times."""

    def __init__(self, name: str, num_given: int) -> None:
        super().__init__(
            f"the request has {num_given} headers {name}, or an empty one; send one that names the cache "
            "namespace"
        )


def namespace_of(settings: ApiSettings, request: Request, salt: str | None) -> tuple[str, ...]:
    """Returns the namespace within which a request shares cached prefixes. Raises InvalidHeader."""
    salts = (salt,) if salt else ()
    match settings.cache_namespace:
        case "key":
            tenant: bytes = request.state.api_key
        case "header":
            tenant = _tenant(request)
        case _:
            return salts
    # The router stores the names of its prefix trees, so it gets a hash and never an API key.
    return (hashlib.sha256(tenant).hexdigest(), *salts)


def session_name(settings: ApiSettings, request: Request, session_id: str) -> str:
    """Returns a session's name in the service, which has its owner: the API key and, where the cache is divided
    by the header, its value. Raises InvalidHeader."""
    owner = request.state.api_key or b""
    if settings.cache_namespace == "header":
        owner += b"\n" + _tenant(request)
    return f"{hashlib.sha256(owner).hexdigest()}/{session_id}"


def session_of(
    settings: ApiSettings, request: Request, session_id: str | None, ttl: float | None
) -> SessionUse | None:
    """Returns the session that a body names, with its seconds to live, or, if it names none, the header. Raises
    InvalidParams, InvalidHeader."""
    given = request.headers.get(SESSION_HEADER, "")
    if len(given) > MAX_SESSION_ID:  # also of a header that the body's session replaces, as documented
        what = f"{len(given)} bytes in {SESSION_HEADER}"
        raise InvalidParams("session_id", what, f"at most {MAX_SESSION_ID}")
    if session_id is None:
        session_id = given.encode("latin-1").decode("utf-8", "replace")
    if not session_id:
        if ttl is not None:
            raise InvalidParams("session_ttl", ttl, "it together with a session_id")
        return None
    return SessionUse(
        session_name(settings, request, session_id), settings.session_ttl if ttl is None else ttl
    )


def _tenant(request: Request) -> bytes:
    """Returns the value of the header that names the cache namespace. Raises InvalidHeader."""
    values = request.headers.getlist(NAMESPACE_HEADER)
    if len(values) != 1 or not values[0]:
        raise InvalidHeader(NAMESPACE_HEADER, len(values))
    return values[0].encode("latin-1")
