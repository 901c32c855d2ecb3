"""A second reading of SPEC.md: integers, fractions and mpmath, one element at a time.

It shares no code with `reference`, but the forward passes of whole models in `serving`, and is slow
on purpose. A number here is a Python float that holds a binary16, binary32 or binary64 value;
arithmetic on it goes through `fractions.Fraction` and is rounded by `numbers.round_to`, never by
the machine. Python floats carry what a fraction cannot: signed zeros, infinities and NaN.
"""
