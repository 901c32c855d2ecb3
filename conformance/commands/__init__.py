"""The commands of `bitforbit`, one module each: its options, and what it prints.

What several share is beside them: `common` (exit codes, kinds of arguments), `opening` (which
backend), `judging` (choosing cases and going through them), `reporting`, `workers`, `memory` and
`advice`. `measure` has the commands that measure.
"""
