"""`bitforbit new-backend`: a skeleton that runs at once."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

from conformance.commands.common import OK
from reference.errors import RequestError

DESCRIPTION = """\
Write a backend that runs at once, to be filled in operation by operation (SPEC 17).

  bitforbit new-backend my_backend                      my_backend.py: a class, in this process
  bitforbit new-backend my_backend --language c         my_backend/: a program in C11, its Makefile
  bitforbit new-backend my_backend --language process   my_backend.py: a program that speaks
                                                        docs/protocol.md, of no library at all

Nothing is overwritten. The line that is printed last checks what was written.
"""

LANGUAGES = ("python", "c", "process")

FIRST = "--case 'kernel/rms_norm/*'"
"""The cases that a fresh skeleton passes."""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    new = commands.add_parser(
        "new-backend", help="write a backend to begin with", description=DESCRIPTION, **style
    )
    new.add_argument("name", metavar="NAME", help="a file or folder to be; .py may be left out")
    new.add_argument("--language", choices=LANGUAGES, default="python", help="default python")
    new.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the skeleton and say how to check it."""
    given = Path(options.name)
    name = given.name.removesuffix(".py")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", name):
        raise RequestError(
            f"NAME: {options.name!r} must end in letters, digits, - and _, such as my_backend"
        )
    written, steps = _WRITERS[options.language](given.with_name(name), name)
    for path, _, _ in written:
        if path.exists():
            raise RequestError(f"{path}: exists already, and nothing is overwritten")
    for path, text, executable in written:
        _write(path, text, executable)
        print(f"wrote {path}")
    print("next:")
    for step in steps:
        print(f"  {step}")
    return OK


Written = list[tuple[Path, str, bool]]
"""A path, its text, and whether it is a program."""


def _python(path: Path, name: str) -> tuple[Written, list[str]]:
    """One file with a class."""
    from conformance.skeletons.signatures import operations, sessions, weights

    file = path.with_name(f"{path.name}.py")
    check = f"bitforbit check {shlex.quote(str(file))}"
    text = _skeleton(
        "backend.py.in",
        CHECK=check,
        OPERATIONS="\n\n".join(_commented(lines, "    # ") for lines in operations()),
        SESSION="\n#\n".join(_commented(lines, "#     ") for lines in sessions()),
        WEIGHTS=", ".join(weights()),
    )
    return [(file, text, False)], [f"{check} {FIRST}"]


def _process(path: Path, name: str) -> tuple[Written, list[str]]:
    """One program."""
    file = path.with_name(f"{path.name}.py")
    command = shlex.quote(str(file) if file.is_absolute() else f"./{file}")
    text = _skeleton("program.py.in", COMMAND=command, NAME=name)
    return [(file, text, True)], [f"bitforbit check --process {shlex.quote(command)} {FIRST}"]


def _c(path: Path, name: str) -> tuple[Written, list[str]]:
    """A folder with a program and its Makefile."""
    made = path / "backend"
    command = shlex.quote(str(made) if made.is_absolute() else f"./{made}")
    files = [
        (path / "backend.c", _skeleton("backend.c.in", NAME=name), False),
        (path / "Makefile", _skeleton("Makefile.in"), False),
    ]
    check = f"bitforbit check --process {shlex.quote(command)} {FIRST}"
    return files, [f"make -C {shlex.quote(str(path))}", check]


_WRITERS = {"python": _python, "process": _process, "c": _c}


def _skeleton(file: str, **words: str) -> str:
    """A template of conformance/skeletons with its words put in."""
    text = (Path(__file__).parents[1] / "skeletons" / file).read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _commented(lines: list[str], mark: str) -> str:
    return "\n".join(f"{mark}{line}".rstrip() for line in lines)


def _write(path: Path, text: str, executable: bool) -> None:
    """Write a new file, its folder too. Raises RequestError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        if executable:
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error.strerror})") from error
