"""What is wrong with a backend that fails (SPEC 19).

`explanation` names the known fault whose answers are nearest to the backend's, `divergence` the
step at which a whole model first leaves the reference, `places` says where in an answer something
is wrong, in the words of its axes, `differences` by how much, and where most, and `stored` whether
it was stored in a narrower type than declared.
"""

from conformance.diagnosis.explanation import (
    FAIR,
    U32,
    WHOLE_MODEL,
    Explanation,
    Heard,
    Inquiry,
    explain,
    unit_of,
    wrong_part,
)

__all__ = [
    "FAIR",
    "U32",
    "WHOLE_MODEL",
    "Explanation",
    "Heard",
    "Inquiry",
    "explain",
    "unit_of",
    "wrong_part",
]
