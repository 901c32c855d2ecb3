"""Answers that are no results, in OpenAI's format of errors."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

GONE = 499
"""The status of a request whose client went away: nobody reads it, but it is counted."""


class RefusalError(Exception):
    """A request that gets an error instead of a result.

    status: of HTTP. param: the field that is to blame. code: for programs to tell errors apart.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        """The answer."""
        headers = {"Retry-After": "1"} if self.status == 503 else None
        return Response(to_json(self.body), self.status, headers, "application/json")


def to_json(data: Any) -> bytes:
    """JSON in ASCII, so that any text passes; floats as `repr` writes them, which reads back."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
