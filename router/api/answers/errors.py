"""Errors as OpenAI's API has them, which is the form of most routes, and as Anthropic's has them."""

from typing import Any

from typing_extensions import TypedDict

LIMIT_REACHED = "rate_limit_exceeded"  # OpenAI's code for a limit of the key
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code for a request that is longer than the context
OVERLOADED = 529  # Anthropic's status for what is a 503 of OpenAI's, or a full queue
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_OPENAI_KINDS = _KINDS | {503: "service_unavailable_error"}
_MESSAGE_KINDS = _KINDS | {413: "request_too_large", OVERLOADED: "overloaded_error"}


class ErrorDetails(TypedDict):
    """An error. `param`: the request field that caused it, if one did. `code`: the HTTP status,
    "context_length_exceeded" or "rate_limit_exceeded", whose `param` is the limit."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(TypedDict):
    error: ErrorDetails


class MessageErrorBody(TypedDict):
    """An error in Anthropic's form."""

    type: str
    error: dict[str, str]
    request_id: str | None


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """Returns OpenAI's error object. Its `type` follows from the HTTP status, and so does a missing `code`."""
    kind = _OPENAI_KINDS.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def message_error(
    status: int, message: str, code: int | str | None = None, request_id: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Returns the status and Anthropic's object for an error that has this status and `code` in OpenAI's API. A
    503 and a full queue, which is a 429 that is no limit of the key, are an overload there."""
    if status == 503 or (status == 429 and code != LIMIT_REACHED):
        status = OVERLOADED
    kind = _MESSAGE_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if code == CONTEXT_EXCEEDED:  # by these words agents recognise that their conversation has to be shorter
        message = f"prompt is too long: {message}"
    return status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
