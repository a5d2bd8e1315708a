from pathlib import Path

import pytest

from paceline.core.errors import UnsupportedModel
from paceline.model_files.metadata import MAX_JSON_BYTES, Metadata, read_json

VALUES = {"size": 4, "eps": 1e-6, "on": True, "name": "x", "ids": [1, 2], "none": None, "inner": {"size": 2}}


def test_values_of_the_right_type_are_returned() -> None:
    fields = Metadata("config.json", VALUES)
    assert fields.count("size", 8) == 4
    assert fields.number("eps", 0, 1) == 1e-6
    assert fields.flag("on", False)
    assert fields.text("name") == "x"
    assert fields.token_ids("ids") == (1, 2)
    assert fields.section("inner").count("size", 8) == 2


def test_a_null_is_absent() -> None:
    fields = Metadata("config.json", VALUES)
    assert "none" not in fields
    assert fields.count("none", 8, 3) == 3
    assert fields.token_ids("none") == ()
    with pytest.raises(UnsupportedModel, match=r"config\.json has no none"):
        fields.count("none", 8)


@pytest.mark.parametrize("value", [True, 0, 9, -1, 4.0, "4", [4], 10**4000, float("nan")])
def test_a_count_is_a_whole_number_in_its_range(value: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"size=.*whole number from 1 to 8"):
        Metadata("config.json", {"size": value}).count("size", 8)


@pytest.mark.parametrize("value", [True, float("inf"), float("nan"), "1", -0.5, 10**400])
def test_a_number_is_finite_and_in_its_range(value: object) -> None:
    with pytest.raises(UnsupportedModel, match="number from 0 to 1"):
        Metadata("config.json", {"eps": value}).number("eps", 0, 1)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a":' * 100_000, "\ud800"])
def test_files_that_are_not_json_objects_are_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(UnsupportedModel, match="at most"):
        read_json(tmp_path / "config.json")
