"""The suite itself, measured (SPEC 20).

`trials` tries every known fault and every legitimate variant on it; `gate` measures what comparing
64 tokens of text would have said of whole models.
"""
