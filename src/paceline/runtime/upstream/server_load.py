"""The load of a server, from the Prometheus metrics that vLLM and Paceline publish."""

import re
from dataclasses import dataclass

RUNNING = ("vllm:num_requests_running", "paceline_sequences_running")
WAITING = ("vllm:num_requests_waiting", "paceline_sequences_waiting")
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "paceline_kv_use_ratio")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Used share of the KV cache, 0 to 1."""


def parse_load(metrics: str) -> ServerLoad:
    """The load in a Prometheus text; zero for what it does not have."""
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue

    def first(names: tuple[str, ...]) -> float:
        return next((values[name] for name in names if name in values), 0.0)

    return ServerLoad(int(first(RUNNING)), int(first(WAITING)), min(1.0, max(0.0, first(KV_USE))))
