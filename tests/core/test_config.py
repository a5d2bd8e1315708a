from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from paceline.core.config import EngineConfig, SpeculationConfig, from_mapping
from paceline.core.errors import InvalidConfig


def test_mapping_builds_nested_config() -> None:
    config = from_mapping(EngineConfig, {"max_num_seqs": 4, "speculation": {"max_depth": 3, "depth": "fixed"}})
    assert config == EngineConfig(max_num_seqs=4, speculation=SpeculationConfig(max_depth=3, depth="fixed"))


def test_an_empty_mapping_is_the_default() -> None:
    assert from_mapping(EngineConfig, {}) == EngineConfig()


def test_a_config_object_is_accepted_in_place_of_a_mapping() -> None:
    speculation = SpeculationConfig(enabled=False)
    assert from_mapping(EngineConfig, {"speculation": speculation}).speculation is speculation


def test_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().max_num_seqs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "wrong", "meant"),
    [
        ({"max_num_seq": 4}, "'max_num_seq'", "'max_num_seqs'"),
        ({"prefix_cache": True}, "'prefix_cache'", "'prefix_caching'"),
        ({"speculation": {"maxdepth": 4}}, "'speculation.maxdepth'", "'speculation.max_depth'"),
    ],
)
def test_unknown_key_suggests_the_most_similar(values: dict[str, Any], wrong: str, meant: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        from_mapping(EngineConfig, values)
    assert str(error.value) == f"unknown key {wrong}; did you mean {meant}?"


def test_all_unknown_keys_are_reported_at_once() -> None:
    with pytest.raises(InvalidConfig) as error:
        from_mapping(
            EngineConfig, {"modle": "m", "speculation": {"maxdepth": 4}, "max_num_seqs": "many", "divice": "cpu"}
        )
    assert str(error.value).splitlines() == [
        "unknown key 'modle'; did you mean 'model'?",
        "unknown key 'speculation.maxdepth'; did you mean 'speculation.max_depth'?",
        "unknown key 'divice'; did you mean 'device'?",
    ]


def test_unknown_key_without_a_similar_one_lists_all() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown key 'zzz'; known keys: .*kv_tokens.*memory_fraction"):
        from_mapping(EngineConfig, {"zzz": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": "4"}, "max_num_seqs must be int or null, got '4'"),
        ({"max_num_seqs": True}, "max_num_seqs must be int or null, got True"),
        ({"memory_fraction": None}, "memory_fraction must be float, got None"),
        ({"draft": 7}, "draft must be str or null, got 7"),
        ({"prefix_caching": "no"}, "prefix_caching must be bool, got 'no'"),
        ({"speculation": "ngram"}, "speculation must be a mapping, got 'ngram'"),
        ({"speculation": None}, "speculation must be a mapping, got None"),
        ({"speculation": {"max_depth": 2.0}}, "speculation.max_depth must be int or null, got 2.0"),
    ],
)
def test_value_of_the_wrong_type_is_rejected_with_its_full_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        from_mapping(EngineConfig, values)
    assert str(error.value) == message


def test_null_and_integers_are_accepted_where_the_type_allows() -> None:
    config = from_mapping(EngineConfig, {"draft": None, "kv_tokens": 512, "memory_fraction": 1})
    assert (config.draft, config.kv_tokens, config.memory_fraction) == (None, 512, 1)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_batched_tokens": 0}, "max_batched_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"kv_tokens": -1}, "kv_tokens"),
        ({"memory_fraction": 0.0}, "memory_fraction"),
        ({"memory_fraction": 1.1}, "memory_fraction"),
        ({"audit_fraction": -0.1}, "audit_fraction"),
        ({"audit_fraction": 1.1}, "audit_fraction"),
        ({"speculation": {"depth": "deep"}}, "speculation.depth"),
        ({"speculation": {"verification": "typical"}}, "speculation.verification"),
        ({"speculation": {"max_depth": 33}}, "max_depth"),
        ({"speculation": {"acceptance_threshold": 1.0}}, "speculation.acceptance_threshold"),
        ({"speculation": {"breaker_rounds": 0}}, "speculation.breaker_rounds"),
    ],
)
def test_value_out_of_range_is_rejected_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        from_mapping(EngineConfig, values)


def test_every_running_sequence_is_scheduled_a_token() -> None:
    with pytest.raises(InvalidConfig, match=r"max_batched_tokens \(8\) must be at least max_num_seqs \(9\)"):
        EngineConfig(max_num_seqs=9, max_batched_tokens=8)
    EngineConfig(max_num_seqs=8, max_batched_tokens=8)
    EngineConfig(max_batched_tokens=8)  # the device decides the other one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_host_bytes": -1}, "0 or more"),
        ({"kv_disk": "x", "kv_host_bytes": 0}, "as a buffer"),
        ({"kv_disk": "x", "prefix_caching": False}, "prefix_caching"),
        ({"kv_host_bytes": 5, "prefix_caching": False}, "prefix_caching"),
        ({"kv_disk_bytes": 0}, "kv_disk_bytes must be at least 1"),
    ],
)
def test_invalid_tier_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        EngineConfig(**settings)
