"""The options of the plugin, and when the suite joins a session (docs/ci.md).

pytest imports this module wherever bitforbit is installed, so it imports nothing of the suite until
the option is given.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

STATE = "_bitforbit_suite"
"""Where the suite is kept on pytest's configuration, where there is one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("bitforbit", "conformance of an LLM inference backend (bitforbit)")
    group.addoption(
        "--bitforbit-backend",
        metavar="BACKEND",
        help="judge a Python file, a built-in name such as numpy or torch, or process:COMMAND",
    )
    group.addoption(
        "--bitforbit-case",
        metavar="GLOB",
        action="append",
        default=[],
        help="only cases whose id matches; may be repeated, and one match is enough",
    )
    group.addoption(
        "--bitforbit-contract",
        choices=("exact", "bounds"),
        help="all rules, or those that a backend that rounds can pass (default: by its numerics)",
    )
    group.addoption(
        "--bitforbit-level",
        metavar="LEVEL",
        action="append",
        default=[],
        help="only this level; may be repeated",
    )
    group.addoption(
        "--bitforbit-skip",
        metavar="FILE",
        action="append",
        default=[],
        help="cases to skip: a glob a line, and # why; may be repeated",
    )
    group.addoption(
        "--bitforbit-xfail",
        metavar="FILE",
        action="append",
        default=[],
        help="cases that must fail: a glob a line, and # why; may be repeated",
    )
    group.addoption(
        "--bitforbit-expect",
        metavar="FILE",
        action="append",
        default=[],
        help="cases that may fail: a glob a line, and # why; may be repeated",
    )
    group.addoption(
        "--bitforbit-device", choices=("cpu", "cuda"), help="for torch and transformers"
    )
    group.addoption(
        "--bitforbit-timeout",
        type=float,
        metavar="SECONDS",
        help="for each call of a program (default 60)",
    )
    group.addoption(
        "--bitforbit-diagnose",
        action="store_true",
        help="compare each failure with the known faults, which takes time",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the cases, where a backend is given; refuse what cannot be meant."""
    if config.getoption("bitforbit_backend") is None:
        given = [
            name
            for name in ("skip", "xfail", "expect", "level", "case", "contract")
            if config.getoption(f"bitforbit_{name}")
        ]
        if given:
            raise pytest.UsageError(f"--bitforbit-{given[0]}: it needs --bitforbit-backend")
        return
    from conformance.pytest_plugin.items import Suite

    setattr(config, STATE, Suite(config))


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # the form that an old pytest knows, too
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    """Let the session have the cases, beside the files that it was given."""
    outcome = yield
    suite: Any = getattr(collector.config, STATE, None)
    if suite is not None and isinstance(collector, pytest.Session):
        report = outcome.get_result()
        report.result = [*report.result, suite.collector(collector)]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the backend, if it was opened."""
    suite: Any = getattr(config, STATE, None)
    if suite is not None:
        suite.close()
