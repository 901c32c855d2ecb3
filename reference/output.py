"""The text of a request, in pieces that nothing later can change (SPEC 14.1).

A piece has whole characters only, and none that may yet turn out to begin a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reference.tokenizer import TextStream, Tokenizer


class OutputText:
    """The text of a request's tokens, cut at the first stop string (SPEC 14.1).

    tokenizer: None for a model without one, whose requests have no text. on_text: is called with
    each piece. stopped: whether a stop string has come.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: Sequence[str], on_text: Callable[[str], object]
    ) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stop = tuple(stop)
        self._on_text = on_text
        self._text, self._sent, self.stopped = "", 0, False

    def feed(self, token: int) -> bool:
        """Take a token; True once a stop string has come."""
        return self._stream is not None and self._take(self._stream.feed(token))

    def finish(self) -> str:
        """Send what was held back, and return the whole text."""
        if self._stream is not None and not self.stopped:
            self._take(self._stream.finish())
            self._send(len(self._text))
        return self._text

    def _take(self, piece: str) -> bool:
        """Add text, and send what has become final; True once a stop string has come."""
        if self.stopped:
            return True
        self._text += piece
        found = [at for at in (self._text.find(s, self._sent) for s in self._stop) if at >= 0]
        if found:
            self._text, self.stopped = self._text[: min(found)], True
            self._send(len(self._text))
            return True
        self._send(len(self._text) - self._held())
        return False

    def _held(self) -> int:
        """How many characters at the end could begin a stop string."""
        longest = max((len(s) for s in self._stop), default=0)
        for length in range(min(longest - 1, len(self._text) - self._sent), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self._stop):
                return length
        return 0

    def _send(self, upto: int) -> None:
        """Send the text before that character, as far as it has not been sent."""
        if upto > self._sent:
            self._on_text(self._text[self._sent : upto])
            self._sent = upto
