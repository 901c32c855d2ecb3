"""For tests that interrupt a program."""

import signal


def heeding_interrupts() -> None:
    """Let a child be interrupted, also where the tests run in the background and may not be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
