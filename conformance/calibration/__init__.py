"""The suite itself, measured (SPEC 20).

`trials` tries every known fault and every legitimate variant on it, or a `part` of them, and gives
the same answers to the `naive` gates; `findings` is what comes of that. `gate` measures what
comparing 64 tokens of text would have said of whole models.
"""
