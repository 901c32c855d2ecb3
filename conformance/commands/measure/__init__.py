"""The commands that measure, one a question; `reference.measure` does the work."""
