"""What a drawn case asks: an operation's arguments, and whether bounds hold for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.fuzzing.draw import Draw
from conformance.golden import Array


@dataclass(frozen=True)
class Drawn:
    """Arguments of a call. bounded: whether less than the exact contract can be judged by them."""

    parameters: Mapping[str, Any]
    inputs: Mapping[str, Array]
    bounded: bool = True


Drawer = Callable[[Draw], Drawn]
