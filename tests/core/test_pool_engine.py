"""Target pools of other engines in `cluster.yaml`."""

from typing import Any

import pytest

from paceline.core.cluster_config import cluster_config
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig

URLS = ["http://a:8000", "http://b:8000"]


def pool(**values: Any) -> PoolConfig:
    document = {"pools": [{"name": "up", "role": "target", "model": "smollm2", **values}]}
    return cluster_config(document).pools[0]


def test_every_endpoint_is_a_worker() -> None:
    found = pool(engine="vllm", endpoints=URLS, upstream={"kv_events": ["tcp://a:5557", "tcp://b:5557"]})
    assert (found.engine, found.endpoints, found.worker_names) == ("vllm", tuple(URLS), ("up-0", "up-1"))
    assert found.upstream.kv_events == ("tcp://a:5557", "tcp://b:5557")


def test_arguments_of_vllm_are_texts() -> None:
    found = pool(engine="vllm", replicas=2, upstream={"arguments": ["--tensor-parallel-size", 4]})
    assert found.upstream.arguments == ("--tensor-parallel-size", "4")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine": "sglang"}, "engine must be"),
        ({"engine": "openai"}, "needs endpoints"),
        ({"endpoints": URLS}, "engine: vllm"),
        ({"engine": "vllm", "endpoints": URLS, "replicas": 3}, "leave out replicas"),
        ({"engine": "vllm", "endpoints": URLS, "upstream": {"arguments": ["-x"]}}, "already run"),
        ({"engine": "vllm", "endpoints": "http://a"}, "list of texts"),
        ({"engine": "vllm", "endpoints": URLS, "upstream": {"kv_events": ["tcp://a:1"]}}, "each of its workers"),
        ({"engine": "vllm", "draft": "auto"}, "upstream.arguments"),
        ({"engine": "vllm", "role": "draft"}, "target"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        pool(**values)


@pytest.mark.parametrize("role", ["draft", "prefill"])
def test_other_pools_serve_our_engine_only(role: str) -> None:
    targets = {"name": "up", "role": "target", "model": "smollm2", "engine": "vllm"}
    with pytest.raises(InvalidConfig, match="Paceline targets only"):
        cluster_config({"pools": [targets, {"name": "other", "role": role, "model": "smollm2"}]})


def test_target_pools_share_one_engine() -> None:
    pools = [{"name": name, "role": "target", "model": "smollm2"} for name in ("a", "b")]
    with pytest.raises(InvalidConfig, match="same engine"):
        cluster_config({"pools": [pools[0], {**pools[1], "engine": "vllm"}]})
