"""The error object of OpenAI's API."""

from typing_extensions import TypedDict

CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code for a request that is longer than the context


class ErrorDetails(TypedDict):
    """An error. `param`: the request field that caused it, if one did. `code`: the HTTP status, or
    "context_length_exceeded"."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(TypedDict):
    error: ErrorDetails


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """Returns OpenAI's error object. Its `type` follows from the HTTP status, and so does a missing `code`."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
