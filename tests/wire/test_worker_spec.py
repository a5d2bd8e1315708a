from pathlib import Path
from shutil import copy

import pytest

from paceline.core.cluster_config import cluster_config
from paceline.core.errors import InvalidConfig
from paceline.deploy.deployment import process_specs
from paceline.wire.keys import KeyFolder
from paceline.wire.worker_spec import WorkerSpec

POOLS = [
    {"name": "target", "role": "target", "model": "big", "replicas": 2, "speculation": {"max_depth": 3}},
    {"name": "draft", "role": "draft", "model": "small"},
]
PREFILL = {"name": "prefill", "role": "prefill", "model": "big"}


def test_specs_round_trip_as_json() -> None:
    specs = process_specs(cluster_config({"pools": POOLS}))
    assert [WorkerSpec.from_json(spec.to_json()) for spec in specs] == specs
    assert [spec.name for spec in specs] == ["target-0", "target-1", "draft-0"]
    assert [spec.uses_drafts for spec in specs] == [True, True, False]
    assert len({spec.address for spec in specs}) == 3


def test_targets_without_a_draft_pool() -> None:
    assert not any(spec.uses_drafts for spec in process_specs(cluster_config({"pools": POOLS[:1]})))


def test_targets_publish_kv_events_for_the_kv_aware_router() -> None:
    specs = process_specs(cluster_config({"pools": POOLS, "router": "kv_aware"}))
    assert [spec.publishes for spec in specs] == [True, True, False]
    assert not any(spec.publishes for spec in process_specs(cluster_config({"pools": POOLS})))


def test_targets_have_the_trace_endpoint() -> None:
    specs = process_specs(cluster_config({"pools": POOLS, "trace_endpoint": "http://127.0.0.1:4318"}))
    assert [spec.trace_endpoint for spec in specs] == ["http://127.0.0.1:4318"] * 2 + [None]


def test_prefill_workers_use_the_key_of_targets(tmp_path: Path) -> None:
    keys = KeyFolder.create(tmp_path / "keys")
    document = {"pools": [*POOLS, PREFILL], "keys": str(keys.path), "handoff_threshold": 100}
    specs = process_specs(cluster_config(document))
    assert [(s.role, s.handoff_threshold) for s in specs] == [
        ("target", 100),
        ("target", 100),
        ("draft", None),
        ("prefill", None),
    ]
    assert specs[-1].member("tcp://127.0.0.1:9").key == keys.public_key("target")
    assert not specs[-1].engine.speculation.enabled
    assert [WorkerSpec.from_json(spec.to_json()) for spec in specs] == specs
    assert all(s.handoff_threshold is None for s in process_specs(cluster_config({"pools": POOLS})))


def test_key_folder_allows_the_client_roles_and_the_allowed_folder(tmp_path: Path) -> None:
    keys = KeyFolder.create(tmp_path / "keys")
    gateway, target, draft = (keys.public_key(role) for role in ("gateway", "target", "draft"))
    assert keys.server_security("target").allowed == {gateway, target}  # some targets prefill for others
    assert keys.server_security("draft").allowed == {target, gateway}
    assert keys.key_pair("draft").public == draft
    second = KeyFolder.create(tmp_path / "second").public_key("gateway")
    copy(tmp_path / "second" / "gateway.key", tmp_path / "keys" / "allowed" / "second.key")
    assert keys.server_security("target").allowed == {gateway, target, second}
    (spec, *_) = process_specs(cluster_config({"pools": POOLS, "keys": str(keys.path)}))
    assert spec.member("tcp://127.0.0.1:9").key == target


def test_secret_key_readable_by_others_is_rejected(tmp_path: Path) -> None:
    keys = KeyFolder.create(tmp_path)
    (tmp_path / "target.key_secret").chmod(0o644)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        keys.server_security("target")


def test_targets_share_caches_with_the_kv_aware_router() -> None:
    specs = process_specs(cluster_config({"pools": POOLS, "router": "kv_aware", "handoff_threshold": 100}))
    assert [(spec.shares_cache, spec.handoff_threshold) for spec in specs] == [(True, 100), (True, 100), (False, None)]
    alone = [{**POOLS[0], "replicas": 1}]  # another worker may join
    assert all(spec.shares_cache for spec in process_specs(cluster_config({"pools": alone, "router": "kv_aware"})))
    divided = [*POOLS, {**POOLS[0], "name": "wide", "tensor_parallel_size": 2}]  # blocks have the heads of all ranks
    wide = process_specs(cluster_config({"pools": divided, "router": "kv_aware"}))
    assert all(spec.shares_cache for spec in wide if spec.role == "target")
    other = [*POOLS, {**POOLS[0], "name": "other", "kv_dtype": "fp8"}]
    assert not any(spec.shares_cache for spec in process_specs(cluster_config({"pools": other, "router": "kv_aware"})))


def test_transfer_setting_is_the_same_for_all_workers() -> None:
    specs = process_specs(cluster_config({"pools": POOLS, "transfer": "nixl"}))
    assert {WorkerSpec.from_json(spec.to_json()).transfer for spec in specs} == {"nixl"}
    assert {spec.transfer for spec in process_specs(cluster_config({"pools": POOLS}))} == {"auto"}
