"""Goldens, made: those of the suite and those of a model of one's own (SPEC 15).

`goldens` computes, verifies and goes on where a run stopped; `prompts` reads the file of prompts
that goldens of one's own begin with.
"""

from conformance.making.goldens import chosen, demand_unchanged, locate, make, make_own, verify
from conformance.making.prompts import read_prompts

__all__ = ["chosen", "demand_unchanged", "locate", "make", "make_own", "read_prompts", "verify"]
