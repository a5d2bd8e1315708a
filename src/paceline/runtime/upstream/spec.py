"""The part of a worker's spec that says which server of another engine it serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.pool_config import PoolConfig, TargetEngine


@dataclass(frozen=True, slots=True)
class UpstreamSpec:
    engine: TargetEngine
    url: str | None
    """URL of a running server. None if the worker starts vLLM."""
    executable: str
    arguments: tuple[str, ...]
    """Arguments of `vllm serve`."""
    kv_events: str | None
    """Address of the KV events that the server publishes. None if it publishes no events."""
    kv_replay: str | None
    api_key_env: str | None
    """Environment variable with the server's API key."""
    max_num_seqs: int | None
    max_model_len: int | None

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "UpstreamSpec":
        return UpstreamSpec(**{**values, "arguments": tuple(values["arguments"])})

    @staticmethod
    def of(pool: PoolConfig, worker: int) -> "UpstreamSpec | None":
        """The spec of worker number `worker`. None for a pool of our own engine."""
        if pool.engine == "paceline":
            return None
        upstream = pool.upstream
        return UpstreamSpec(
            engine=pool.engine,
            url=pool.endpoints[worker] if pool.endpoints else None,
            executable=upstream.executable,
            arguments=upstream.arguments,
            kv_events=upstream.kv_events[worker] if upstream.kv_events else None,
            kv_replay=upstream.kv_replays[worker] if upstream.kv_replays else None,
            api_key_env=upstream.api_key_env,
            max_num_seqs=pool.limits.max_num_seqs,
            max_model_len=pool.limits.max_model_len,
        )
