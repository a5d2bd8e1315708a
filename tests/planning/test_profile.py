import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.planning.profile import (
    SHIPPED,
    ProfileCurve,
    ProfileValue,
    from_document,
    load_profile,
    save_profile,
    to_document,
)
from paceline.planning.simulator.rounds import Rounds

H200 = load_profile("h200-8b")


def test_curve_between_before_and_after_its_points() -> None:
    curve = ProfileCurve(((2, 1.0), (4, 2.0)), "measured")
    assert [curve.at(count) for count in (1, 2, 3, 4, 8)] == [1.0, 1.0, 1.5, 2.0, 4.0]


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((2, 1.0), (2, 2.0)), ((1, 0.0),), ((1, float("nan")),)])
def test_a_curve_that_is_none_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidConfig):
        ProfileCurve(points, "measured")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_figure_is_finite_and_not_negative(value: float) -> None:
    with pytest.raises(InvalidConfig):
        ProfileValue(value, "assumed")


def test_an_unknown_origin_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="origin must be one of measured, assumed"):
        ProfileValue(1.0, "guessed")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_survive_a_file(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == profile


@pytest.mark.parametrize(
    ("batch", "rate", "ratio"),
    [
        (1, 244, 1.030),
        (2, 474, 1.033),
        (4, 949, 1.027),
        (8, 1846, 1.039),
        (16, 3555, 0.990),
        (32, 6769, 1.005),
        (64, 11527, 1.108),
        (128, 18755, 1.067),
        (256, 26244, 1.031),
    ],
)
def test_plain_steps_of_the_h200_differ_from_the_sweep_as_published(batch: int, rate: int, ratio: float) -> None:
    """The table of benchmarks/gpu/README.md, plain: prompts of 281 tokens and half of 128 tokens.

    The ratios are those of benchmarks/planner/README.md.
    """
    assert batch / H200.verify_seconds(batch, 0, batch * 345) == pytest.approx(ratio * rate, rel=0.005)


def test_a_plain_step_of_64_sequences_is_that_of_the_batch_benchmark() -> None:
    """benchmarks/gpu/README.md: a mean context of 512."""
    assert H200.verify_seconds(64, 0, 64 * 512) == pytest.approx(0.00538, rel=0.03)


def test_times_grow_with_length_batch_depth_and_context() -> None:
    assert H200.prefill_seconds(1000) < H200.prefill_seconds(2000) < H200.prefill_seconds(8000)
    assert H200.prefill_seconds(8000, cached=6000) < H200.prefill_seconds(8000)
    assert H200.verify_seconds(64, 0, 0) < H200.verify_seconds(64, 3, 0) < H200.verify_seconds(64, 3, 1e5)
    assert H200.drafting_seconds(64, 2) == 2 * H200.draft_seconds.at(64)


def test_fields_that_were_not_measured_are_named() -> None:
    assert {"price_per_hour", "links.nvlink", "kv_tokens"} <= set(H200.assumed())
    assert "pass_seconds" not in H200.assumed()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2 is not supported"),
        ({"extra": 1}, "unknown keys: extra"),
        ({"price_per_hour": 3}, "price_per_hour must be an object"),
        ({"price_per_hour": {"value": "3", "origin": "assumed"}}, "must be a number"),
        ({"price_per_hour": {"value": 3, "origin": "heard"}}, "origin must be one of"),
        ({"pass_seconds": {"points": [1], "origin": "measured"}}, "pairs of a count and seconds"),
        ({"links": []}, "links must be an object"),
        ({"is_padded": 1}, "is_padded must be true or false"),
        ({"name": 1}, "name must be text"),
        ({"kv_tokens": {"value": 0, "origin": "assumed"}}, "kv_tokens must be at least 1"),
    ],
)
def test_errors_of_a_document_name_the_key(change: dict, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        from_document(to_document(H200) | change, "x")


def test_a_missing_key_is_named() -> None:
    document = to_document(H200)
    del document["kv_tokens"]
    with pytest.raises(InvalidConfig, match="missing keys: kv_tokens"):
        from_document(document, "x")


def test_errors_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="one of h200-70b-fp8, h200-8b"):
        load_profile(str(tmp_path / "none.json"))
    (tmp_path / "a.json").write_text("{", "utf-8")
    with pytest.raises(InvalidConfig, match="is not JSON"):
        load_profile(str(tmp_path / "a.json"))
    (tmp_path / "b.json").write_text(json.dumps([1]), "utf-8")
    with pytest.raises(InvalidConfig, match="expected an object"):
        load_profile(str(tmp_path / "b.json"))


def test_a_profile_is_a_value() -> None:
    assert replace(H200, name="x") != H200


def test_prompt_rows_cost_their_own_curve_beside_rows_that_decode() -> None:
    steps, prompts = (
        ProfileCurve(((1, 1.0), (10, 10.0)), "measured"),
        ProfileCurve(((1, 1.0), (10, 2.0), (20, 4.0)), "measured"),
    )
    profile = replace(H200, pass_seconds=steps, prompt_seconds=prompts)
    assert [profile.rows_seconds(*rows) for rows in ((10, 0), (0, 10), (10, 10))] == [10.0, 2.0, 12.0]
    assert profile.prefill_seconds(10) == pytest.approx(2.0 + H200.prompt_context_seconds.value * 50)
    rounds = Rounds(profile, None)
    cases = [(decoding, rows) for decoding in (0, 1, 7, 10) for rows in (0, 1, 9, 20, 5000) if decoding + rows]
    assert [rounds.pass_seconds(*case) for case in cases] == [profile.rows_seconds(*case) for case in cases]
    assert from_document(to_document(profile), "p") == profile


def test_without_a_curve_of_prompts_all_rows_cost_the_same() -> None:
    profile = replace(H200, prompt_seconds=None)
    assert profile.rows_seconds(100, 156) == H200.pass_seconds.at(256) == Rounds(profile, None).pass_seconds(100, 156)
    assert "prompt_seconds" not in to_document(profile)
