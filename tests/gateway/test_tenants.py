"""Cache salts separate the cached prefixes of tenants, in the engine and in the router."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.gateway.auth.access import Access
from paceline.gateway.auth.api_keys import KeyFile
from paceline.gateway.config.config import ServerConfig
from paceline.gateway.config.flags import FlagStore
from paceline.gateway.http.app import create_app
from paceline.gateway.metrics.metrics import Metrics
from paceline.gateway.sessions.gateway import Gateway
from paceline.gateway.sessions.models import ServedModels
from paceline.targets.client import TargetClient
from tests.engine.harness import letters
from tests.processes.target_harness import Members, cluster, until
from tests.targets.test_caches import SYSTEM, PublishingWorker, is_current

PROMPT = letters().decode(SYSTEM)
CACHED = 96


class TenantCluster:
    """A gateway with a KV-aware router and workers that publish KV events."""

    def __init__(self, target: TargetClient, workers: Sequence[PublishingWorker], app: FastAPI) -> None:
        self._target, self._app = target, app
        self.workers = workers

    def ask(self, question: str, key: str | None = None, **body: Any) -> int:
        """Number of cached prompt tokens. Waits until the gateway has all KV events."""
        reply = self.call("POST", "/v1/completions", key, {"prompt": PROMPT + question, "max_tokens": 3, **body})
        assert reply.status_code == 200, reply.text
        until(lambda: all(is_current(self._target.pool, worker) for worker in self.workers))
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def call(self, method: str, path: str, key: str | None = None, body: Any = None) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(run())

    @property
    def caching_workers(self) -> list[str]:
        """Names of workers with cached blocks."""
        return [worker.worker.name for worker in self.workers if worker.num_cached]


@contextmanager
def running_cluster(names: str, **config: Any) -> Iterator[TenantCluster]:
    workers = [PublishingWorker(name) for name in names]
    try:
        with TargetClient(
            cluster(router="kv_aware"), Members(*workers), tokenizer=letters(), start_seconds=60
        ) as target:
            until(lambda: sum(connection.is_usable for connection in target.pool.targets().values()) == len(workers))
            settings = ServerConfig(engine=target.config, **config)
            metrics = Metrics("tiny")
            metrics.add_cluster(target.cluster_status)
            gateway = Gateway(target, settings, metrics, FlagStore(None, target.validate_flags))
            yield TenantCluster(
                target, workers, create_app(ServedModels([gateway]), Access.from_config(settings, lambda: 0.0))
            )
    finally:
        for worker in workers:
            worker.stop()


def test_a_salt_separates_prefixes_in_one_engine() -> None:
    with running_cluster("a") as tenants:
        assert tenants.ask("ab", cache_salt="red") == 0
        assert tenants.ask("cd", cache_salt="blue") == 0
        assert tenants.ask("ef") == 0
        assert tenants.ask("gh", cache_salt="red") == CACHED
        assert tenants.ask("ij", cache_salt="blue") == CACHED
        assert tenants.ask("kl") == CACHED


def test_the_router_ignores_prefixes_with_another_salt() -> None:
    with running_cluster("ab") as tenants:
        assert tenants.ask("ab", cache_salt="red") == 0
        [worker] = tenants.caching_workers
        assert tenants.ask("cd", cache_salt="blue") == 0
        assert tenants.caching_workers == [
            "a",
            "b",
        ]  # a match with the prefix of `red` would have selected the same worker
        for question in ("ef", "gh", "ij"):
            assert tenants.ask(question, cache_salt="red") == CACHED
            assert tenants.ask(question, cache_salt="blue") == CACHED
        cached = cached_by_worker(tenants)
        assert cached[worker] == cached["b" if worker == "a" else "a"] == 3 * CACHED


def test_keys_separate_prefixes_with_the_same_salt(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    ann, bob = file.add("ann"), file.add("bob")
    with running_cluster("a", api_keys=str(file.path)) as tenants:
        assert tenants.ask("ab", ann) == 0
        assert tenants.ask("ab", bob) == 0
        assert tenants.ask("cd", ann) == CACHED
        assert tenants.ask("ef", ann, cache_salt="shared") == 0
        assert tenants.ask("gh", bob, cache_salt="shared") == 0
        assert tenants.ask("ij", bob, cache_salt="shared") == CACHED


def test_metrics_have_the_hit_rate_of_every_worker() -> None:
    with running_cluster("ab") as tenants:
        for question in ("ab", "cd", "ef"):
            tenants.ask(question)
        [worker] = tenants.caching_workers
        tokens = 3 * (len(SYSTEM) + 2)
        assert series(tenants, "prompt_tokens_total") == {worker: tokens, "b" if worker == "a" else "a": 0}
        assert cached_by_worker(tenants)[worker] == 2 * CACHED
        assert series(tenants, "indexed_blocks")[worker] == next(w.num_cached for w in tenants.workers if w.num_cached)
        assert all(rate > 0 for rate in series(tenants, "prefill_seconds_per_token").values())


def cached_by_worker(tenants: TenantCluster) -> dict[str, float]:
    return series(tenants, "cached_prompt_tokens_total")


def series(tenants: TenantCluster, name: str) -> dict[str, float]:
    """Values of a metric by worker."""
    page = tenants.call("GET", "/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(f"paceline_worker_{name}{{")]
    found = {line.split('worker="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
    return {worker: value for worker, value in found.items() if worker in ("a", "b")}


@pytest.mark.parametrize("salt", ["x" * 257, 7, ["red"]])
def test_an_invalid_salt_is_rejected(salt: object) -> None:
    with running_cluster("a") as tenants:
        body = {"prompt": "ab", "max_tokens": 1, "cache_salt": salt}
        reply = tenants.call("POST", "/v1/completions", body=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "cache_salt"
