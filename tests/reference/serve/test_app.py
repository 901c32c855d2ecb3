"""The HTTP door itself: its paths, its hosts, and what it tells of itself."""

from __future__ import annotations

import socket

import pytest

from reference.serve import listen
from tests.reference.serve.asking import PROMPT, encode, refusal
from tests.reference.serve.servers import Server


def test_what_a_server_tells_of_itself(server: Server) -> None:
    with server.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert [model.id for model in server.openai().models.list()] == ["tiny"]
        server.ask("/completion", prompt=PROMPT, n_predict=1)
        before = client.get("/metrics")
        assert before.headers["content-type"].startswith("text/plain")
        server.ask("/completion", prompt=PROMPT, n_predict=3, cache_prompt=False)
        after = client.get("/metrics").text

    def value(text: str, name: str) -> float:
        (line,) = (line for line in text.splitlines() if line.startswith(name + " "))
        return float(line.split()[-1])

    for name, grown in (
        ("bitforbit_prompt_tokens_total", len(encode(PROMPT))),
        ("bitforbit_generated_tokens_total", 3),
        ('bitforbit_http_requests_total{path="/completion",status="200"}', 1),
    ):
        assert value(after, name) - value(before.text, name) == grown


@pytest.mark.parametrize(
    ("method", "path", "status", "remedy"),
    [
        ("GET", "/completion", 405, "use POST"),
        ("POST", "/health", 405, "use GET"),
        ("GET", "/", 404, "there are /completion, /v1/completions"),
    ],
)
def test_other_paths_and_methods(
    server: Server, method: str, path: str, status: int, remedy: str
) -> None:
    with server.client() as client:
        message = refusal(client.request(method, path), status)["message"]
        assert message.partition("; ")[2].startswith(remedy)


def test_another_host_is_refused(server: Server) -> None:
    """A page in a browser may not reach the server by a name that it made point here."""
    with server.client() as client:
        answer = client.get("/health", headers={"Host": "evil.example"})
    assert answer.status_code == 400


def test_no_chunk_waits_for_an_acknowledgement() -> None:
    with listen(0) as door, socket.create_connection(door.getsockname()) as client:
        connection, _ = door.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client
