"""What a new backend begins with (`bitforbit new-backend`).

The files `*.in` are templates, one a language; `signatures` reads from the goldens which operations
there are and what each is called with.
"""
