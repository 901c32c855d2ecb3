"""Goldens drawn at random, so that no backend can know them beforehand (SPEC 20).

`draw` makes choices that have names, `kernels`, `attention`, `experts`, `tokens` and `pages` say
what there is to choose for each operation, `case` makes a golden of the choices, `running` judges a
backend by many, `shrinking` makes a failing one small, and `saving` keeps it.
"""
