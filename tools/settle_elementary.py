"""Find and settle the hard inputs of the elementary functions (SPEC 4.1), and prove the result.

    python tools/settle_elementary.py                    write reference/hard_cases.json
    python tools/settle_elementary.py --verify           compute it again and compare
    python tools/settle_elementary.py --second-opinion   try all 2^32 inputs against long double

`--function exp` restricts any of these to one function. mpmath and rich are needed.

A float32 result changes at its *boundaries*: the midpoints between neighbours, down to 2^-150 and
up to (2^24 - 1/2) 2^104, where infinity begins. Let v be the real value of the function, y the
float64 that numpy computes, b a boundary, and s = SLACK = 2^-48. Everything rests on one
assumption, that numpy is good to 15 ulp of float64:

    (1)  |y - v| <= 15/16 s |v|

where v is in the range of float32; elsewhere it suffices that y is out of that range too.
`--second-opinion` prints the largest error that occurs on the machine at hand.

*The reference is right.* It rounds RN64(y (1 - s)) and RN64(y (1 + s)) to float32. These two
enclose v: by (1), v is nearer to y than y (1 +- s) is, by 2^-52 |y| less some s^2 |y|, and RN64
moves those by 2^-53 |y| at most. So if both round to the same float32, v does.

*It finds what it looks up.* If they round differently, a boundary lies between them, so that
|b - y| <= (1 + 2^-4) s |y|, and |b - v| <= 2.1 s |v| by (1). The table holds every input with

    (2)  |b - v| <= 2.5 s |v|        for some boundary b

and no other. So it depends on real numbers alone: any machine that satisfies (1) finds its unsure
inputs in it, and writes the same bytes.

*The scan misses nothing.* It suspects the inputs for which y (1 - 4s) and y (1 + 4s) round
differently. By (1) and (2), |b - y| <= 3.5 s |v| <= 3.6 s |y| for an input of the table, and the
two, once rounded to float64, still reach 3.9 s |y| to either side: it is a suspect. mpmath then
decides which suspects satisfy (2), and their values, with precision raised until there is no doubt.

The scan uses no symmetry. The second opinion on sin, cos and tanh of -x is that on x, mirrored, but
the results that it is compared with are those of each of the 2^32 inputs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TypeVar

import mpmath
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress, TimeElapsedColumn

from reference import elementary
from reference.elementary import SLACK

FUNCTIONS = ("exp", "log", "sin", "cos", "tanh")
MIRROR = {"sin": -1, "cos": 1, "tanh": -1}
TABLE = Path(elementary.__file__).with_name("hard_cases.json")
ALLOWED = SLACK * 15 / 16
NEAR = Fraction(5, 2) * Fraction(SLACK)
BLOCK = 1 << 14
"""Inputs tried at a time: as float64 they take 128 KiB, which stays in a core's cache."""

Bits = NDArray[np.uint32]
F32 = NDArray[np.float32]
T = TypeVar("T")


# --- Trying every float32 ------------------------------------------------------------------------


def inputs(block: int) -> F32:
    """Return the float32 whose bits are block * BLOCK and following."""
    first = block * BLOCK
    return np.arange(first, first + BLOCK, dtype=np.uint64).astype(np.uint32).view(np.float32)


def try_all(work: Callable[[int], T], title: str, processes: int, bits: int = 32) -> Iterator[T]:
    """Apply work to each block of all 2^32 inputs, or of the first 2^bits, with a progress bar."""
    blocks = (1 << bits) // BLOCK
    with (
        multiprocessing.Pool(processes) as pool,
        Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress,
    ):
        results = pool.imap_unordered(work, range(blocks), chunksize=256)
        yield from progress.track(results, total=blocks, description=title)


def suspects(name: str, block: int) -> Bits:
    """Return the inputs whose float64 value is within four slacks of a boundary."""
    x = inputs(block)
    with np.errstate(all="ignore"):
        y = getattr(np, name)(x.astype(np.float64))
        low = (y * (1 - 4 * SLACK)).astype(np.float32)
        high = (y * (1 + 4 * SLACK)).astype(np.float32)
    found: Bits = x[(low != high) & ~np.isnan(y)].view(np.uint32)
    return found


# --- Settling one of them ------------------------------------------------------------------------


def enclosure(name: str, bits: int, precision: int) -> tuple[Fraction, Fraction]:
    """Return two numbers that enclose the real value, 2^-precision of it apart.

    mpmath works with 32 bits more than the enclosure promises. It reduces arguments of sin and cos
    with whatever precision their cancellation calls for.
    """
    x = mpmath.mpf(float(np.uint32(bits).view(np.float32)))
    with mpmath.workprec(precision + 32):
        y = getattr(mpmath, name)(x)
    magnitude, exponent = y.man_exp  # mpmath keeps the sign elsewhere
    value = int(mpmath.sign(y)) * Fraction(magnitude) * Fraction(2) ** exponent
    margin = abs(value) * Fraction(1, 2 ** (precision + 1))
    return value - margin, value + margin


def round_to_float32(value: Fraction) -> tuple[int, bool]:
    """Return the bits of the float32 nearest to value, and whether a boundary is near, by (2).

    The value is no boundary itself, and less than 2^128 in magnitude.
    """
    quantum = Fraction(2) ** max(math.frexp(value)[1] - 24, -149)
    below = math.floor(value / quantum)
    boundary = (below + Fraction(1, 2)) * quantum
    nearest = (below + (value > boundary)) * quantum
    with np.errstate(over="ignore"):  # the nearest may be 2^128, which becomes infinity
        rounded = np.float32(math.copysign(float(nearest), value))
    return int(rounded.view(np.uint32)), abs(boundary - value) <= NEAR * abs(value)


def settle(name: str, bits: int) -> tuple[int, bool]:
    """Return the bits of the correctly rounded result, and whether the table should have it."""
    precision = 100
    while True:
        low, high = map(round_to_float32, enclosure(name, bits, precision))
        if low == high:
            return low
        precision *= 2


def hard_cases(name: str, processes: int) -> dict[str, str]:
    """Make the table of one function, from bits of the input to bits of the result, sorted."""
    found = np.concatenate(list(try_all(partial(suspects, name), name, processes)))
    table = {}
    for bits in sorted(found.tolist()):
        result, near = settle(name, bits)
        if near:
            table[f"{bits:08x}"] = f"{result:08x}"
    print(f"{name}: {len(found)} suspects, {len(table)} hard cases")
    return table


# --- A second opinion ----------------------------------------------------------------------------


@dataclass
class Opinion:
    """What long double has to say about the reference, on some of the inputs.

    disputed: inputs for which it rounds to something else, or is too near a boundary to say.
    wrong: how many results are wrong, by the verdict of mpmath or in the bits of a NaN.
    plain: how many results of float64, simply rounded, are not those of the reference.
    error: the largest relative error of float64 in the range of float32.
    """

    disputed: list[int] = field(default_factory=list)
    wrong: int = 0
    plain: int = 0
    error: float = 0.0

    def add(self, other: Opinion) -> None:
        """Take in what was found on other inputs."""
        self.disputed += other.disputed
        self.wrong += other.wrong
        self.plain += other.plain
        self.error = max(self.error, other.error)


def second_opinion(name: str, block: int) -> Opinion:
    """Compare one block of the reference's results with long double, give or take 16 of its ulp.

    For an odd or an even function the mirrored block is compared as well.
    """
    x = inputs(block)
    function = getattr(np, name)
    margin = np.longdouble(2) ** -59
    with np.errstate(all="ignore"):
        wide = function(x.astype(np.longdouble))
        if name in MIRROR:
            x, wide = np.concatenate([x, -x]), np.concatenate([wide, MIRROR[name] * wide])
        nan = np.isnan(wide)
        wide[nan] = 0  # it is a hundred times slower to calculate with NaN
        result = getattr(elementary, name)(x).view(np.uint32)
        low = (wide * (1 - margin)).astype(np.float32).view(np.uint32)
        high = (wide * (1 + margin)).astype(np.float32).view(np.uint32)
        y = function(x.astype(np.float64))
        plain = y.astype(np.float32).view(np.uint32)
        inside = (abs(wide) > 2.0**-151) & (abs(wide) < 2.0**129)
        errors = abs((y[inside] - wide[inside]) / wide[inside])
    agreed = (low == result) & (high == result)
    return Opinion(
        disputed=x[~nan & ~agreed].view(np.uint32).tolist(),
        wrong=int(np.count_nonzero(nan & (result != 0x7FC00000))),
        plain=int(np.count_nonzero(~nan & (plain != result))),
        error=float(errors.max(initial=0)),
    )


def prove(name: str, processes: int) -> bool:
    """Ask for a second opinion on all inputs, let mpmath decide disputes, and report."""
    total = Opinion()
    bits = 31 if name in MIRROR else 32
    for opinion in try_all(partial(second_opinion, name), name, processes, bits):
        total.add(opinion)
    x = np.array(sorted(total.disputed), np.uint32)
    results = getattr(elementary, name)(x.view(np.float32)).view(np.uint32).tolist()
    settled = [settle(name, bits)[0] for bits in x.tolist()]
    total.wrong += sum(y != truth for y, truth in zip(results, settled, strict=True))
    print(f"{name}: {total.wrong} of 2^32 results are wrong; mpmath had to settle {len(x)} of them")
    print(f"{name}: float64, simply rounded, is wrong {total.plain} times")
    print(f"{name}: the largest error of float64 is {total.error / ALLOWED:.4f} of what is allowed")
    return total.wrong == 0 and total.error <= ALLOWED


# --- The command line ----------------------------------------------------------------------------


def main() -> int:
    """Run the command line; 0 if the table, or the claim, holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--function", choices=FUNCTIONS, action="append", help="only this one")
    parser.add_argument("--processes", type=int, default=2)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--verify", action="store_true", help="compare with the committed table")
    mode.add_argument("--second-opinion", action="store_true", help="compare with long double")
    options = parser.parse_args()
    good = True
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in options.function or FUNCTIONS:
        start = time.perf_counter()
        if options.second_opinion:
            if np.finfo(np.longdouble).nmant < 63:
                parser.error("long double is no wider than float64 on this machine")
            good &= prove(name, options.processes)
        else:
            table = hard_cases(name, options.processes)
            if options.verify:
                same = tables.get(name) == table
                print(f"{name}: {'the committed table holds' if same else 'THE TABLE DIFFERS'}")
                good &= same
            tables[name] = table
        print(f"{name}: {time.perf_counter() - start:.0f} s")
    if not (options.second_opinion or options.verify):
        ordered = {name: tables[name] for name in FUNCTIONS if name in tables}
        TABLE.write_text(json.dumps(ordered, indent=0) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
