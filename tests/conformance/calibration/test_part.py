"""What a part of the catalogues is."""

from __future__ import annotations

from conformance.calibration.part import Part
from conformance.variants import variants


def test_a_part_is_what_its_globs_name_in_the_area() -> None:
    norms = Part("norms").chosen_faults()
    assert Part().whole
    assert Part(None, ("*",), ("*",)).whole
    assert not Part("norms").whole
    assert Part("norms").chosen_variants() == []
    assert Part("norms", ("norm-e*", "norm-l*")).chosen_faults() == [
        known for known in norms if known.name.startswith(("norm-e", "norm-l"))
    ]
    assert Part("rope", ("norm-*",)).chosen_faults() == []
    assert Part(variants=("tf32",)).chosen_faults() == []
    assert [v.name for v in Part("norms", variants=("tf32", "b*16")).chosen_variants()] == [
        v.name for v in variants() if v.name == "tf32" or v.name == "bfloat16"
    ]
    assert Part("norms", variants=("tf32",)).chosen_faults() == norms


def test_globs_that_nothing_matches_are_strangers() -> None:
    part = Part("norms", ("norm-*", "rope-*"), ("tf32", "none-*"))
    found = [(what, glob) for what, glob, _ in part.strangers()]
    assert found == [("fault", "rope-*"), ("variant", "none-*")]
    (_, _, of_norms), (_, _, named) = part.strangers()
    assert "norm-epsilon-1e-5" in of_norms
    assert not any(name.startswith("rope-") for name in of_norms)
    assert "tf32" in named
