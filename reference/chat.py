"""Chat templates: from messages to the text of a prompt, by the model's own template (SPEC 12).

The template is a Jinja program that comes with the model. It runs in Jinja's sandbox, with what
transformers 5 provides to templates: trimmed blocks, `break` and `continue`, `raise_exception`,
`strftime_now`, a `tojson` that escapes nothing, `generation` blocks, and the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reference.config import show
from reference.errors import ConfigError, RequestError
from reference.loading.gguf.file import open_gguf
from reference.loading.gguf.vocabulary import CHAT_TEMPLATE, SPECIAL_TEXTS, special_texts
from reference.loading.strict_json import read_object


class ChatTemplate:
    """A compiled template. special_tokens: the texts that it calls `bos_token` and so on.

    Raises ConfigError where the source is no template; `where` names it in messages.
    """

    def __init__(self, source: str, where: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{where}: line {error.lineno}: {_one_line(error)}; correct the chat template"
            ) from None
        except Exception as error:  # Python may refuse what Jinja makes of it in any way
            raise ConfigError(f"{where}: {_one_line(error)}; correct the chat template") from None
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model: Path, given: Path | None = None) -> ChatTemplate | None:
        """The template in the file `given`, or else the model's own; None if it has none.

        A folder's is `chat_template.jinja`, or else the key `chat_template` of
        `tokenizer_config.json`: a template, or a list of named ones with a `default`. A GGUF file's
        is `tokenizer.chat_template`. Raises ConfigError, and WeightsError for a file that is no
        GGUF.
        """
        read = _of_gguf if model.suffix == ".gguf" else _of_folder
        tokens, find = read(model)
        source, where = (_read(given), str(given)) if given is not None else find()
        return None if source is None else cls(source, where, tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> str:
        """The text of a prompt that ends where the assistant's answer begins.

        messages: plain data, each with a role and a content; what is None is left out. arguments:
        other variables of the template. Raises RequestError where the template refuses or fails.
        """
        given = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **(arguments or {}),
            "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
        }
        try:
            return self._template.render(given)
        except Exception as error:  # a template is a program, and may fail in any way
            raise RequestError(
                f"messages: the chat template does not take them: {_one_line(error)}"
            ) from None


Found = tuple[str | None, str]
"""The source of a template, None if there is none, and where it is."""


def _of_folder(folder: Path) -> tuple[dict[str, str], Callable[[], Found]]:
    """The special tokens of a folder, and a function that finds its template."""
    path, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_object(path, ConfigError) if path.exists() else {}

    def find() -> Found:
        if file.exists():
            return _read(file), str(file)
        source = held = config.get("chat_template")
        if isinstance(held, list):
            named = [t for t in held if isinstance(t, dict) and t.get("name") == "default"]
            source = named[-1].get("template") if named else None
        if held is not None and not isinstance(source, str):
            raise ConfigError(
                f"{path}: chat_template is neither a text nor a list with a text named default; "
                "correct it"
            )
        return source, f"{path}: chat_template"

    given = [name for name in SPECIAL_TEXTS.values() if config.get(name) is not None]
    return {name: _token(config[name], f"{path}: {name}") for name in given}, find


def _of_gguf(path: Path) -> tuple[dict[str, str], Callable[[], Found]]:
    """The same of a GGUF file (SPEC 12.2)."""
    file = open_gguf(path)

    def find() -> Found:
        source = file.metadata.get(CHAT_TEMPLATE)
        if source is not None and not isinstance(source, str):
            raise ConfigError(f"{path}: {CHAT_TEMPLATE} is no text; convert the model again")
        return source, f"{path}: {CHAT_TEMPLATE}"

    return special_texts(file), find


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is just its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja's sandbox, with what templates expect to find in it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON that is not escaped for HTML, as that of Jinja's own filter is."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _token(value: Any, where: str) -> str:
    """The text of a special token, which is given as text, or as an object with a content."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ConfigError(f"{where} is {show(value)}; give a text, or an object with its content")
    return text


def _read(file: Path) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: it cannot be read as a chat template: {_one_line(error)}; check the path"
        ) from None


def _one_line(error: Exception) -> str:
    """What an error of Jinja or of the system says, on one line of at most 200 characters."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
