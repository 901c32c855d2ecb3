"""Answers that are errors, in OpenAI's format."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

GONE = 499
"""The status (nginx's) of a request whose client went away: nobody reads it, but it is counted."""


class RefusalError(Exception):
    """A request that is answered by an error.

    status: of HTTP. param: the field that is to blame. code: by which programs tell errors apart.
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
    """JSON in ASCII, which any text passes through; floats read back as they were (`repr`)."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
