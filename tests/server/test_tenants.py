"""What one tenant has cached is not there for another: over HTTP, in the engine and in the router's choice of a worker."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.runtime.gateway_client.cluster_target import ClusterTarget
from paceline.server.app import create_app
from paceline.server.auth.access import Access
from paceline.server.auth.api_keys import KeyFile
from paceline.server.config.config import ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.gateway.gateway import Gateway
from paceline.server.metrics.metrics import Metrics
from tests.engine.harness import letters
from tests.runtime.kv_events.test_tracker import SYSTEM, PublishingWorker, is_current
from tests.runtime.target_harness import Members, cluster, until

PROMPT = letters().decode(SYSTEM)
CACHED = 96


class House:
    """A gateway in front of workers that publish what they have cached, routed by it."""

    def __init__(self, llm: ClusterTarget, workers: Sequence[PublishingWorker], app: FastAPI) -> None:
        self._llm, self._app = llm, app
        self.workers = workers

    def ask(self, question: str, key: str | None = None, **body: Any) -> int:
        """Prompt tokens that were cached. Returns when the gateway is_current what the workers have."""
        reply = self.call("POST", "/v1/completions", key, {"prompt": PROMPT + question, "max_tokens": 3, **body})
        assert reply.status_code == 200, reply.text
        until(lambda: all(is_current(self._llm.pool, worker) for worker in self.workers))
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def call(self, method: str, path: str, key: str | None = None, body: Any = None) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
                return await client.request(method, path, json=body, headers=headers)

        return asyncio.run(run())

    @property
    def homes(self) -> list[str]:
        """Workers that have anything cached."""
        return [worker.worker.name for worker in self.workers if worker.num_cached]


@contextmanager
def house(names: str, **config: Any) -> Iterator[House]:
    workers = [PublishingWorker(name) for name in names]
    try:
        with ClusterTarget(cluster(router="kv_aware"), Members(*workers), tokenizer=letters(), start_seconds=60) as llm:
            until(lambda: sum(line.is_usable for line in llm.pool.targets().values()) == len(workers))
            settings = ServerConfig(engine=llm.config, **config)
            metrics = Metrics("tiny")
            metrics.add_cluster(llm.cluster_status)
            gateway = Gateway(llm, settings, metrics, FlagStore(None, llm.validate_flags))
            yield House(llm, workers, create_app(gateway, Access.from_config(settings, lambda: 0.0)))
    finally:
        for worker in workers:
            worker.stop()


def test_a_salt_in_the_body_keeps_prefixes_apart_in_one_engine() -> None:
    with house("a") as here:
        assert here.ask("ab", cache_salt="red") == 0
        assert here.ask("cd", cache_salt="blue") == 0
        assert here.ask("ef") == 0
        assert here.ask("gh", cache_salt="red") == CACHED
        assert here.ask("ij", cache_salt="blue") == CACHED
        assert here.ask("kl") == CACHED


def test_another_tenants_prefix_draws_nobody_to_its_worker() -> None:
    with house("ab") as here:
        assert here.ask("ab", cache_salt="red") == 0
        [home] = here.homes
        assert here.ask("cd", cache_salt="blue") == 0
        assert here.homes == ["a", "b"]  # to a router that saw red's prefix, it would have been the same worker again
        for question in ("ef", "gh", "ij"):
            assert here.ask(question, cache_salt="red") == CACHED
            assert here.ask(question, cache_salt="blue") == CACHED
        cached = cached_by_worker(here)
        assert cached[home] == cached["b" if home == "a" else "a"] == 3 * CACHED


def test_keys_are_tenants_whatever_salt_they_ask_for(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    ann, bob = file.add("ann"), file.add("bob")
    with house("a", api_keys=str(file.path)) as here:
        assert here.ask("ab", ann) == 0
        assert here.ask("ab", bob) == 0
        assert here.ask("cd", ann) == CACHED
        assert here.ask("ef", ann, cache_salt="shared") == 0
        assert here.ask("gh", bob, cache_salt="shared") == 0
        assert here.ask("ij", bob, cache_salt="shared") == CACHED


def test_the_hit_rate_of_every_worker_is_in_the_metrics() -> None:
    with house("ab") as here:
        for question in ("ab", "cd", "ef"):
            here.ask(question)
        [home] = here.homes
        tokens = 3 * (len(SYSTEM) + 2)
        assert series(here, "prompt_tokens_total") == {home: tokens, "b" if home == "a" else "a": 0}
        assert cached_by_worker(here)[home] == 2 * CACHED
        assert series(here, "indexed_blocks")[home] == next(w.num_cached for w in here.workers if w.num_cached)
        assert all(rate > 0 for rate in series(here, "prefill_seconds_per_token").values())


def cached_by_worker(here: House) -> dict[str, float]:
    return series(here, "cached_prompt_tokens_total")


def series(here: House, name: str) -> dict[str, float]:
    """By worker, of those that were made; one that the cluster's file names is still to come."""
    page = here.call("GET", "/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(f"paceline_worker_{name}{{")]
    found = {line.split('worker="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
    return {worker: value for worker, value in found.items() if worker in ("a", "b")}


@pytest.mark.parametrize("salt", ["x" * 257, 7, ["red"]])
def test_a_salt_that_is_none_is_refused(salt: object) -> None:
    with house("a") as here:
        body = {"prompt": "ab", "max_tokens": 1, "cache_salt": salt}
        reply = here.call("POST", "/v1/completions", body=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "cache_salt"
