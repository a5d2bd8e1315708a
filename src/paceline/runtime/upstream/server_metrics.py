"""What an upstream worker reads from the metrics of its server: the load, and the size of the KV cache."""

import re
from dataclasses import dataclass

RUNNING = ("vllm:num_requests_running", "paceline_sequences_running")
WAITING = ("vllm:num_requests_waiting", "paceline_sequences_waiting")
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "paceline_kv_use_ratio")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Used share of the KV cache, 0 to 1."""


def parse_load(metrics: str) -> ServerLoad:
    """The load in a Prometheus text. Values that the text does not have are zero."""
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue

    def first(names: tuple[str, ...]) -> float:
        return next((values[name] for name in names if name in values), 0.0)

    return ServerLoad(int(first(RUNNING)), int(first(WAITING)), min(1.0, max(0.0, first(KV_USE))))


def parse_cache_tokens(metrics: str) -> int | None:
    """Tokens that the caches of all engines of a vLLM server hold. None if the text does not say."""
    sizes = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(metrics)]
    tokens = sum(int(size.get("block_size", 0)) * int(size.get("num_gpu_blocks", 0)) for size in sizes)
    return tokens or None
