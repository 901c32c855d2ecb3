"""A backend that is a program in any language, spoken to over its pipes (docs/protocol.md)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from conformance.backends.frames import (
    KINDS,
    LENGTH,
    MAX_FRAME,
    PROTOCOL,
    FrameError,
    Message,
    decode,
    encode,
    quoted,
)
from conformance.errors import BackendError
from conformance.golden import SPEC_VERSION, Array
from conformance.operations import NotImplementedByBackendError, WrongAnswerError, output_names

TIMEOUT = 60.0
"""Seconds that a program has for one call, its start included where it must be started."""

GRACE = 1.0
"""Seconds in which a program that closed its output, or was told to end, may exit by itself."""

STARTS = 3
"""Failed starts in a row after which a program is not started again."""

CHUNK = 1 << 16
"""Bytes read at once."""

LAST_WORDS = 4096
"""Bytes of standard error that are kept."""


class ProgramError(WrongAnswerError):
    """The program died, hung, broke the protocol or answered with an error: its case fails."""


class Program:
    """A running program, its three pipes, and the last of what it wrote on standard error.

    It is the leader of a process group of its own, which ends with it. Raises OSError where it
    cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (s.fileno() for s in streams if s is not None)
        for pipe_end in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe_end, False)
        self._last_words = b""

    def exchange(self, frame: bytes, seconds: float) -> bytes:
        """Send a frame and return the blob of the answer. Raises ProgramError within `seconds`."""
        self._refuse_leftovers()
        deadline = time.monotonic() + seconds
        unsent, received = memoryview(frame), bytearray()
        with selectors.DefaultSelector() as pipes:
            pipes.register(self._stdin, selectors.EVENT_WRITE)
            pipes.register(self._stdout, selectors.EVENT_READ)
            pipes.register(self._stderr, selectors.EVENT_READ)
            while unsent or not _whole(received):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ProgramError(self._late(seconds, received))
                for key, _ in pipes.select(left):
                    if key.fd == self._stdin:
                        unsent = self._send(unsent)
                        if not unsent:
                            pipes.unregister(self._stdin)
                    elif key.fd == self._stderr:
                        if not self._listen():
                            pipes.unregister(self._stderr)
                    else:
                        chunk = _read(self._stdout)
                        if chunk == b"":
                            raise ProgramError(self._end(received))
                        received += chunk or b""
        return bytes(memoryview(received)[LENGTH:])

    def _refuse_leftovers(self) -> None:
        """Raise ProgramError where the program wrote something, or ended, before it was asked."""
        chunk = _read(self._stdout)
        if chunk == b"":
            raise ProgramError(self._end(b""))
        if chunk:
            raise ProgramError(
                f"the program wrote {quoted(chunk[:40].decode(errors='replace'))} to its standard "
                "output unasked; only answers may go there"
            )

    def _send(self, unsent: memoryview) -> memoryview:
        """What is left of a frame after as much as the pipe takes; nothing if nobody reads it."""
        try:
            return unsent[os.write(self._stdin, unsent[:CHUNK]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:  # it may still answer; if it ended, its output says so
            return unsent[:0]

    def _listen(self) -> bool:
        """Take in a piece of standard error and keep its end; False where there is no more."""
        chunk = _read(self._stderr)
        self._last_words = (self._last_words + (chunk or b""))[-LAST_WORDS:]
        return bool(chunk)

    def _end(self, received: bytes | bytearray) -> str:
        """Why there will be no more output."""
        try:
            status = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            what = "closed its standard output"
        else:
            what = (
                f"was killed by {_signal(-status)}"
                if status < 0
                else f"exited with status {status}"
            )
        return f"the program {what} {_progress(received)}{self._words()}"

    def _late(self, seconds: float, received: bytearray) -> str:
        return (
            f"the program did not answer within {seconds:g} s and was stopped "
            f"{_progress(received)}{self._words()}"
        )

    def _words(self) -> str:
        """The last line on standard error, as the end of a message."""
        stop = time.monotonic() + GRACE
        while time.monotonic() < stop and self._listen():
            pass
        lines = [line.strip() for line in self._last_words.splitlines() if line.strip()]
        if not lines:
            return "; it wrote nothing on standard error"
        return f"; last on its standard error: {quoted(lines[-1].decode(errors='replace'))}"

    def close(self) -> None:
        """Tell the program to end by closing its input, then kill it and whatever it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self.kill()

    def kill(self) -> None:
        """End the program's whole process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def _read(pipe: int) -> bytes | None:
    """What a pipe has ready: b"" at its end, None where there is nothing yet."""
    try:
        return os.read(pipe, CHUNK)
    except BlockingIOError:
        return None


def _whole(received: bytearray) -> bool:
    """Whether a frame is complete. Raises ProgramError for an impossible length."""
    if len(received) < LENGTH:
        return False
    length = int.from_bytes(received[:LENGTH], "little")
    if length > MAX_FRAME:
        start = quoted(bytes(received[:40]).decode(errors="replace"))
        raise ProgramError(
            f"the program announced a frame of {length} bytes, at most {MAX_FRAME} are allowed; "
            f"its output began with {start}"
        )
    if len(received) > LENGTH + length:
        raise ProgramError(
            f"the program wrote more than the {length} bytes that its frame announced; "
            "only answers may go to standard output"
        )
    return len(received) == LENGTH + length


def _progress(received: bytes | bytearray) -> str:
    if not received:
        return "before it answered"
    if len(received) < LENGTH:
        return f"after {len(received)} bytes of its answer's length"
    length = int.from_bytes(received[:LENGTH], "little")
    return f"after {len(received) - LENGTH} of the {length} bytes of its answer"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Hello:
    """What a program says of itself: its name, operations and numerics (SPEC 17)."""

    name: str
    operations: frozenset[str]
    numerics: Mapping[str, Any]


def _hello(message: Message) -> Hello:
    """Read the answer to `hello`. Raises ProgramError where it is not one of this protocol."""
    if "hello" not in message.text:
        raise ProgramError("the metadata of the program's answer has no 'hello'")
    try:
        told = json.loads(message.text["hello"])
    except (ValueError, RecursionError) as error:
        raise ProgramError(
            "the program's hello is not the text of a JSON object "
            f"({type(error).__name__}: {quoted(str(error))})"
        ) from error
    if not isinstance(told, dict):
        raise ProgramError(f"the program's hello must be a JSON object, not {KINDS[type(told)]}")
    protocol = _field(told, "protocol", int)
    if protocol != PROTOCOL:
        raise ProgramError(f"the program speaks protocol {protocol}, this suite {PROTOCOL}")
    name, operations = _field(told, "name", str), _field(told, "operations", list)
    if not all(isinstance(o, str) for o in operations):
        raise ProgramError("the program's hello must list its 'operations' by name")
    return Hello(name, frozenset(operations), _field(told, "numerics", dict))


def _field(told: Mapping[str, Any], name: str, kind: type) -> Any:
    """A value of the hello. Raises ProgramError where there is none, or one of another type."""
    if name not in told:
        raise ProgramError(
            f"the program's hello lacks {name!r}; it has protocol, name, operations and numerics"
        )
    if type(told[name]) is not kind:
        raise ProgramError(
            f"{name!r} in the program's hello must be {KINDS[kind]}, not {KINDS[type(told[name])]}"
        )
    return told[name]


class Client:
    """Keeps a program running: starts it, asks it, ends it when it fails, starts it again.

    said: its hello. starts: how often it was started, the number of its present life.
    """

    said: Hello | None = None

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        """Start a program that has `seconds` for each call. Raises ProgramError."""
        self._command, self._seconds = command, seconds
        self._program: Program | None = None
        self._calls = self._failed_starts = self.starts = 0
        self.start()

    def start(self) -> None:
        """Start the program unless it runs, and let it say hello, the same every time."""
        if self._program is not None:
            return
        if self._failed_starts == STARTS:
            raise ProgramError(f"the program failed to start {STARTS} times and is given up")
        self._failed_starts += 1
        try:
            self._program = Program(self._command)
        except OSError as error:
            raise ProgramError(f"the program cannot be started ({error.strerror})") from error
        self.starts += 1
        about = {"protocol": PROTOCOL, "suite": version("bitforbit"), "spec": SPEC_VERSION}
        try:
            said = _hello(self.ask("hello", about))
            if self.said not in (None, said):
                raise ProgramError("the program's hello differs from the one of its first start")
        except (ProgramError, NotImplementedByBackendError) as error:
            self._kill()
            raise ProgramError(f"no hello: {error}") from error
        self.said = said
        self._failed_starts = 0

    def ask(self, operation: str, arguments: Mapping[str, Any]) -> Message:
        """One call and its answer.

        Raises ProgramError, or NotImplementedByBackendError where the program answers so.
        """
        self.start()
        message = self._exchange(operation, arguments)
        status = message.text.get("status")
        if status == "not implemented":
            raise NotImplementedByBackendError(operation)
        if status == "error":
            raise ProgramError(
                f"the program answered with an error: {quoted(message.text.get('message', ''))}"
            )
        if status != "ok":
            raise ProgramError(
                "the program's answer must have the status ok, error or not implemented, not "
                f"{quoted(str(status))}"
            )
        return message

    def _exchange(self, operation: str, arguments: Mapping[str, Any]) -> Message:
        """One frame there and one back. Whatever breaks the protocol ends the program."""
        assert self._program is not None
        self._calls += 1
        number = str(self._calls)
        frame = encode(operation, number, arguments)
        try:
            message = decode(self._program.exchange(frame, self._seconds))
            if message.text.get("id") != number:
                raise FrameError(f"its answer is to call {message.text.get('id')!r}, not {number}")
        except FrameError as error:
            self._kill()
            raise ProgramError(f"the program broke the protocol: {error}") from error
        except ProgramError:
            self._kill()
            raise
        return message

    def _kill(self) -> None:
        if self._program is not None:
            self._program.kill()
            self._program = None

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.close()
            self._program = None


def _results(
    client: Client, operation: str, arguments: Mapping[str, Any]
) -> Array | tuple[Array, ...]:
    """An operation's results as SPEC 17 has them: an array, or several in the order of its table.

    Raises as `Client.ask` does.
    """
    arrays = client.ask(operation, arguments).arrays
    names = output_names(operation)
    if set(arrays) != set(names):
        found = ", ".join(quoted(name) for name in sorted(arrays)[:8])
        wrong = f", not with {found}" if found else "; its answer has no tensor"
        raise ProgramError(f"{operation} must answer with {', '.join(names)}{wrong}")
    return tuple(arrays[name] for name in names) if len(names) > 1 else arrays[names[0]]


class ProcessBackend:
    """The operations that a program declares, as the methods of a backend (SPEC 17)."""

    def __init__(self, command: str, seconds: float = TIMEOUT) -> None:
        """Start a program. command: split as a shell would; seconds: for each call.

        Raises BackendError where it cannot be started or does not say hello.
        """
        if os.name != "posix":
            raise BackendError("--process: programs can be judged on POSIX systems alone")
        try:
            words = shlex.split(command)
            if not words:
                raise ValueError("the command is empty")
            self._client = Client(words, seconds)
        except (ValueError, ProgramError) as error:
            raise BackendError(f"--process: {command + ': ' if command else ''}{error}") from error
        assert self._client.said is not None
        self.name, self.numerics = self._client.said.name, self._client.said.numerics
        self.operations = self._client.said.operations

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """The method of a declared operation; AttributeError for the others."""
        if operation.startswith("_") or operation not in self.operations:
            raise AttributeError(operation)
        if operation == "load":
            return partial(ProcessSession, self._client)
        return lambda **arguments: _results(self._client, operation, arguments)

    def close(self) -> None:
        """End the program."""
        self._client.close()


class ProcessSession:
    """A model that the program has loaded; loaded again where the program was started again."""

    def __init__(self, client: Client, model: str, weights: str) -> None:
        self._client = client
        self._arguments = {"model": model, "weights": weights}
        self._load()

    def _load(self) -> None:
        session = self._client.ask("load", self._arguments).text.get("session")
        if session is None:
            raise ProgramError("load must answer with the name of a session")
        self._name, self._start = session, self._client.starts

    def reset(self) -> None:
        """Forget what was fed."""
        self._client.start()
        if self._start != self._client.starts:
            self._load()
        self._client.ask("reset", {"session": self._name})

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """The method of a declared operation; AttributeError for the others."""
        said = self._client.said
        if operation.startswith("_") or said is None or operation not in said.operations:
            raise AttributeError(operation)
        if operation == "trace":  # its results are whichever steps the program has
            return lambda **arguments: (
                self._client.ask(operation, {**arguments, "session": self._name}).arrays
            )
        return lambda **arguments: _results(
            self._client, operation, {**arguments, "session": self._name}
        )
