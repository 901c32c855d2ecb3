"""The commands that measure, one a question; `reference.measure` does the work.

What several share is beside them: `models`, `rows` (forms of the output) and `plot`. `offload` and
`experts` are parts of `placement`.
"""
