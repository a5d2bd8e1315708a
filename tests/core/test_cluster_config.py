from typing import Any

import pytest

from paceline.core.cluster_config import ClusterConfig, cluster_config, trace_url
from paceline.core.errors import InvalidConfig

TARGET = {"name": "target", "role": "target", "model": "big", "replicas": 2, "devices": ["cuda:0", "cuda:1"]}
DRAFT = {"name": "draft", "role": "draft", "model": "small", "replicas": 2, "placement": {"with": "target"}}
PREFILL = {"name": "prefill", "role": "prefill", "model": "big"}


def config(*pools: dict[str, Any], **rest: Any) -> ClusterConfig:
    return cluster_config({"pools": list(pools), **rest})


def test_a_worker_gets_its_device_and_limits() -> None:
    pools = config(
        {**TARGET, "limits": {"max_num_seqs": 32, "kv_tokens": 4096}, "speculation": {"max_depth": 5}}, DRAFT
    )
    engines = pools.engines()
    assert list(engines) == ["target-0", "target-1", "draft-0", "draft-1"]
    assert [engine.device for engine in engines.values()] == ["cuda:0", "cuda:1"] * 2
    assert (engines["target-1"].max_num_seqs, engines["target-1"].kv_tokens) == (32, 4096)
    assert engines["target-0"].speculation.max_depth == 5
    assert engines["draft-0"].model == "small"


def test_workers_of_one_device_share_its_memory() -> None:
    engines = config(TARGET, DRAFT).engines()
    assert engines["target-0"].memory_fraction == pytest.approx(0.68)
    assert engines["draft-0"].memory_fraction == pytest.approx(0.17)
    apart = config(TARGET, {**DRAFT, "devices": ["cuda:2", "cuda:3"], "placement": {}}).engines()
    assert apart["target-0"].memory_fraction == apart["draft-1"].memory_fraction == pytest.approx(0.85)
    configured = config({**TARGET, "limits": {"memory_fraction": 0.6}}, DRAFT).engines()
    assert configured["draft-1"].memory_fraction == pytest.approx(0.25)


def test_a_target_over_several_gpus_leaves_memory_for_a_draft_on_each() -> None:
    wide = {**TARGET, "replicas": 1, "devices": ["cuda:0"], "tensor_parallel_size": 4}
    engines = config(wide, {**DRAFT, "replicas": 1, "devices": ["cuda:3"], "placement": {}}).engines()
    assert engines["target-0"].memory_fraction == pytest.approx(0.68)
    assert engines["draft-0"].memory_fraction == pytest.approx(0.17)


def test_prefill_and_target_may_have_different_numbers_of_ranks() -> None:
    prefill = {"name": "prefill", "role": "prefill", "model": TARGET["model"]}
    engines = config(TARGET | {"tensor_parallel_size": 2}, prefill | {"tensor_parallel_size": 4}).engines()
    assert (engines["target-0"].tensor_parallel_size, engines["prefill-0"].tensor_parallel_size) == (2, 4)


def test_memory_fractions_above_one_are_rejected() -> None:
    with pytest.raises(InvalidConfig, match=r"target-0, draft-0.*1\.30"):
        config({**TARGET, "limits": {"memory_fraction": 0.9}}, {**DRAFT, "limits": {"memory_fraction": 0.4}})
    with pytest.raises(InvalidConfig, match="lower limits"):
        config({**TARGET, "limits": {"memory_fraction": 0.9}}, DRAFT)


def test_a_fraction_of_a_gpu_reserved_by_ray_scales_the_memory() -> None:
    engines = config({**TARGET, "ray": {"num_gpus": 0.5}}, {**DRAFT, "ray": {"num_gpus": 1}}).engines()
    assert engines["target-0"].memory_fraction == pytest.approx(0.425)
    assert engines["draft-0"].memory_fraction == pytest.approx(0.85)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"pools": []}, "at least one pool"),
        ({"pols": [TARGET]}, "unknown key 'pols'; did you mean 'pools'"),
        ({"pools": [DRAFT | {"placement": {}}]}, "no pool with role target"),
        ({"pools": [{"name": "t", "role": "target"}]}, "lacks model"),
        ({"pools": [{"name": "t", "role": "target", "modell": "m"}]}, r"did you mean 'pools\[0\].model'"),
        ({"pools": [TARGET | {"replica": 3}]}, r"pools\[0\].replica'; did you mean 'pools\[0\].replicas'"),
        ({"pools": [TARGET | {"replicas": "2"}]}, r"pools\[0\].replicas must be int"),
        ({"pools": [TARGET | {"replicas": 0}]}, "at least 1"),
        ({"pools": [TARGET, DRAFT | {"replicas": -1}]}, "at least 0"),
        ({"pools": [TARGET], "drain_seconds": -1.0}, "drain_seconds must be 0 or more"),
        ({"pools": [TARGET | {"role": "boss"}]}, "role must be target, draft or prefill"),
        ({"pools": [TARGET | {"name": "a b"}]}, "letters, digits"),
        ({"pools": [TARGET | {"devices": [0]}]}, "devices must be a list"),
        ({"pools": [TARGET | {"devices": ["gpu0"]}]}, "devices must be a list"),
        ({"pools": [TARGET | {"limits": {"max_seqs": 3}}]}, r"did you mean 'pools\[0\].limits.max_num_seqs'"),
        ({"pools": [TARGET, TARGET]}, "different names"),
        (
            {"pools": [TARGET, TARGET | {"name": "b", "model": "other", "served_model_name": "big"}]},
            "the target pools of 'big' serve different models, big and other",
        ),
        ({"pools": [TARGET, DRAFT | {"served_model_name": "x"}]}, "remove served_model_name"),
        ({"pools": [TARGET, DRAFT | {"placement": {"with": "targets"}}]}, "placement.with names 'targets'"),
        ({"pools": [TARGET, DRAFT | {"placement": {"near": "target"}}]}, "placement must be {with: POOL}"),
        ({"pools": [TARGET, DRAFT | {"tensor_parallel_size": 2}]}, "a draft runs on one device"),
        ({"pools": [TARGET | {"quantization": "int3"}]}, "quantization must be one of"),
        (
            {"pools": [TARGET | {"speculation": {"method": "foo"}}]},
            "pool 'target': speculation.method 'foo' does not exist; choose from: combined, dflash, draft_model",
        ),
        ({"pools": [TARGET | {"speculation": {"method": "pool"}}]}, "'pool' needs a pool with role draft"),
        ({"pools": [TARGET | {"speculation": {"method": "medusa"}}]}, "'medusa' needs Medusa heads: set `draft`"),
        ({"pools": [TARGET, DRAFT | {"speculation": {"max_depth": 3}}]}, "settings of target pools"),
        ({"pools": [TARGET, PREFILL | {"speculation": {"max_depth": 3}}]}, "settings of target pools"),
        ({"pools": [TARGET, PREFILL | {"draft": "head"}]}, "settings of target pools"),
        ({"pools": [TARGET, PREFILL | {"model": "other"}]}, "must be one of big, got 'other'"),
        ({"pools": [TARGET, PREFILL | {"quantization": "int8"}]}, "its quantization must be 'none' too"),
        ({"pools": [TARGET, PREFILL | {"kv_dtype": "fp8"}]}, "its kv_dtype must be 'auto' too"),
        ({"pools": [TARGET, PREFILL], "handoff_threshold": 0}, "at least 1 token"),
        ({"pools": [TARGET], "transfer": "pigeon"}, "transfer"),
        ({"pools": [PREFILL]}, "no pool with role target"),
        ({"pools": [TARGET], "routr": "x"}, "did you mean 'router'"),
        ({"pools": [TARGET], "router": "random"}, "round_robin, least_loaded"),
        ({"pools": [TARGET], "host": "0.0.0.0"}, "paceline keys"),
        ({"pools": [TARGET], "gateway": 8000}, "gateway must be a mapping"),
        ({"pools": [TARGET], "health": {"misses": 0}}, "health"),
    ],
)
def test_invalid_configurations_are_rejected_with_a_remedy(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        cluster_config(document)


def test_a_public_address_is_allowed_with_keys() -> None:
    assert config(TARGET, host="0.0.0.0", keys="/keys").keys == "/keys"


def test_every_worker_has_its_own_folder_for_cached_blocks() -> None:
    limits = {"kv_disk": "/var/kv", "kv_disk_bytes": 1 << 30, "kv_host_bytes": 1 << 28}
    config = cluster_config({"pools": [{"name": "t", "role": "target", "model": "m", "replicas": 2, "limits": limits}]})
    engines = config.engines()
    assert [engines[name].kv_disk for name in ("t-0", "t-1")] == ["/var/kv/t-0", "/var/kv/t-1"]
    assert {(engine.kv_disk_bytes, engine.kv_host_bytes) for engine in engines.values()} == {(1 << 30, 1 << 28)}


def test_a_drafts_cache_has_no_tiers() -> None:
    target = {"name": "t", "role": "target", "model": "m"}
    draft = {"name": "d", "role": "draft", "model": "m", "limits": {"kv_disk": "/var/kv"}}
    with pytest.raises(InvalidConfig, match="no tiers"):
        cluster_config({"pools": [target, draft]})


def test_only_targets_audit_their_texts() -> None:
    engines = config({**TARGET, "audit_fraction": 0.5}, DRAFT, PREFILL).engines()
    fractions = [engines[name].audit_fraction for name in ("target-0", "target-1", "draft-0", "prefill-0")]
    assert fractions == [0.5, 0.5, 0.0, 0.0]


def test_a_prefill_pool_does_not_draft_and_a_target_may_have_a_draft() -> None:
    engines = config(TARGET | {"draft": "head"}, PREFILL | {"replicas": 2}, handoff_threshold=300).engines()
    assert engines["target-0"].draft == "head"
    assert engines["target-0"].speculation.enabled
    for name in ("prefill-0", "prefill-1"):
        assert (engines[name].draft, engines[name].speculation.enabled) == (None, False)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_an_endpoint_without_a_path_gets_the_default_path(endpoint: str, url: str) -> None:
    assert trace_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["collector:4318", "", "grpc://collector:4317", "http://", "http://c:port"])
def test_an_invalid_trace_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="trace_endpoint must be a URL such as"):
        trace_url(endpoint)


def test_parts_of_a_cluster_with_several_models() -> None:
    config = cluster_config(
        {
            "pools": [
                TARGET,
                TARGET | {"name": "other", "model": "other", "served_model_name": "small"},
                PREFILL,
                DRAFT | {"placement": {"with": "other"}},
            ]
        }
    )
    assert config.models == ("big", "small")
    assert [pool.name for pool in config.for_model("big").pools] == ["target", "prefill", "draft"]
    assert [pool.name for pool in config.for_model("small").pools] == ["other", "draft"]
    assert config.for_model("small").drafts[0].placement.with_pool == "other"
    assert config.for_model("big").drafts[0].placement.with_pool is None
