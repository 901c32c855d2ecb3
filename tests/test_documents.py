"""The documents: links that lead somewhere, and command lines that the commands take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from conformance import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("fixtures/**/*.md"),
        *ROOT.glob("tests/benchmarks/**/*.md"),
    )
)

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
SHELL = {"sh", "yaml"}
ENDS = {"&&", "||", "|", ";", "&", ">", ")"}


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


@cache
def anchors(path: Path) -> set[str]:
    """Names that headings have in a link: lower case, no punctuation, hyphens for spaces."""
    plain = FENCE.sub("", path.read_text())
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(plain))
    return {heading.strip().replace(" ", "-") for heading in headings}


def links(document: str) -> list[str]:
    plain = CODE.sub("", FENCE.sub("", text_of(document)))
    return [link for link in LINK.findall(plain) if "://" not in link]


def command_lines(document: str) -> Iterator[list[str]]:
    """The words after `bitforbit` of each command line in blocks of shell."""
    for _, language, block in FENCE.findall(text_of(document)):
        if language not in SHELL:
            continue
        filled = re.sub(r"\$\{\{.*?\}\}", "VALUE", block)
        for line in filled.replace("\\\n", " ").splitlines():
            words = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
            words.whitespace_split = True
            words.commenters = "#"
            yield from _calls(list(words))


def _calls(words: list[str]) -> Iterator[list[str]]:
    for at, word in enumerate(words):
        # `path/to/bitforbit` is what pip installs, and `name:` calls an artifact so.
        named = word == "bitforbit" and words[at - 1 : at] != ["name:"]
        if named or word.endswith("/bin/bitforbit"):
            rest = words[at + 1 :]
            end = next((i for i, w in enumerate(rest) if w in ENDS), len(rest))
            yield rest[:end]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    missing = []
    for link in links(document):
        name, _, anchor = link.partition("#")
        target = (ROOT / document).parent / name if name else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_line_is_one(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.parser()
    wrong = []
    for words in command_lines(document):
        try:
            parser.parse_args(words)
        except SystemExit as end:
            if end.code:
                wrong.append((shlex.join(words), capsys.readouterr().err.splitlines()[-1]))
    assert not wrong


def test_the_documents_are_read() -> None:
    """The two tests above look at something, and know what is wrong when they see it."""
    assert "docs/doors.md" in DOCUMENTS
    assert ["new-backend", "my_backend"] in list(command_lines("README.md"))
    assert ["judge", "questions"] in list(command_lines("README.md"))
    assert "SPEC.md" in links("README.md")
    assert "1-in-process" in anchors(ROOT / "docs/doors.md")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "a && bitforbit check x --level kernel | less  # all",
            ["check", "x", "--level", "kernel"],
        ),
        ("(cd q; bitforbit judge '*:gauge')", ["judge", "*:gauge"]),
        (".venv/bin/bitforbit goldens verify > out", ["goldens", "verify"]),
        ("- run: bitforbit check --process './b --x' &", ["check", "--process", "./b --x"]),
    ],
)
def test_a_command_line_is_found_in_a_line(line: str, found: list[str]) -> None:
    words = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    words.whitespace_split = True
    assert list(_calls(list(words))) == [found]
