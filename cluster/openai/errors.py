"""Errors as an OpenAI client expects them."""

from __future__ import annotations

import math
from collections.abc import Mapping


class ApiError(Exception):
    """A refusal or failure that the client is told about.

    `status` is the HTTP status; `kind` (sent as `type`), `param` and `code` are the fields of
    OpenAI's error object; `headers` go out with the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body: `{"error": {"message", "type", "param", "code"}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never be served as it stands."""
    return ApiError(400, message, "invalid_request_error", param, code)


def model_not_found(model: str) -> ApiError:
    """404: a model that is not served here."""
    message = f"the model {model!r} is not served here"
    return ApiError(404, message, "invalid_request_error", "model", "model_not_found")


def too_large(limit: int) -> ApiError:
    """413: a body over `limit` bytes."""
    message = f"the request body is larger than the limit of {limit} bytes"
    return ApiError(413, message, "invalid_request_error", code="request_too_large")


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """503: the server has no room at the moment."""
    # Retry-After has whole seconds: rounded up, so that nobody is asked to come back too early.
    headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return ApiError(503, message, "server_error", code="overloaded", headers=headers)


def deadline_exceeded(message: str, param: str | None) -> ApiError:
    """504: the request took longer than it may. `param` names the client's own limit, where it
    was that one."""
    # OpenAI's clients repeat what failed with a 5xx, each time for as long, unless told not to.
    headers = {"x-should-retry": "false"}
    return ApiError(504, message, "timeout_error", param, "deadline_exceeded", headers)


def server_error(message: str) -> ApiError:
    """500: the request was fine and could not be served all the same."""
    return ApiError(500, message, "server_error", code="internal_error")
