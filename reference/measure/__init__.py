"""Measurements: what each figure is, and how it is taken (the commands of README, Measure)."""
