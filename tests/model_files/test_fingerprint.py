"""The fingerprint of a system: its digest changes with every field, and differences are named."""

from dataclasses import fields, replace

import pytest

from paceline.model_files.fingerprint import ORDER_OF_SUMS, SystemFingerprint

OURS = SystemFingerprint("w", "t", "bfloat16", "none", "int8", "auto", "NVIDIA H200")


@pytest.mark.parametrize("name", [field.name for field in fields(SystemFingerprint)])
def test_every_field_changes_the_digest_and_is_named(name: str) -> None:
    other = replace(OURS, **{name: ORDER_OF_SUMS + 7 if name in ("ranks", "order") else "other"})
    assert other.digest != OURS.digest
    assert other.digest.startswith("fp_")
    assert OURS.difference(other)
    assert OURS.difference(OURS) == ""


def test_a_difference_has_both_values() -> None:
    assert OURS.difference(replace(OURS, device="NVIDIA H100")) == "device NVIDIA H200, not NVIDIA H100"
    assert OURS.difference(replace(OURS, ranks=4)) == "tensor_parallel_size 1, not 4"


def test_unknown_weights_have_no_digest_and_differ_from_none() -> None:
    unknown = replace(OURS, weights="")
    assert unknown.digest == ""
    assert unknown.difference(OURS) == OURS.difference(unknown) == ""
    assert str(unknown).startswith("unknown (")
