"""CUDA graphs of vLLM for steps without drafts, in addition to those for steps with drafts.

With speculation vLLM captures its complete decode graphs for steps in which every sequence has `num_speculative_tokens` drafts,
and rounds the sizes of all graphs up to multiples of their rows. A step without drafts, most steps of a large batch, then has
more rows than sequences and runs in pieces. Here it has the same graphs as in a vLLM without speculation. Steps with drafts
have complete graphs for mixed batches where the attention backend supports them, and run in pieces elsewhere.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


class DecodeGraphs(CudagraphDispatcher):  # type: ignore[misc]
    """vLLM's choice of a graph for each step, with decode graphs of one row for each sequence in every mode."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.uniform_decode_query_len = 1

    def initialize_cudagraph_keys(self, cudagraph_mode: Any, uniform_decode_query_len: int = 1) -> None:
        super().initialize_cudagraph_keys(cudagraph_mode, 1)
        if cudagraph_mode == CUDAGraphMode.FULL:  # The remaining modes have them already, or no complete graphs
            keys, most = self.cudagraph_keys[CUDAGraphMode.FULL], self.vllm_config.scheduler_config.max_num_seqs
            keys |= {replace(key, uniform=True) for key in keys if key.num_tokens <= most}

    def dispatch(self, num_tokens: int, uniform_decode: bool = False, *args: Any, **options: Any) -> Any:
        mode, batch = super().dispatch(num_tokens, uniform_decode, *args, **options)
        if uniform_decode and mode == CUDAGraphMode.FULL:
            decode = replace(batch, uniform=True)
            if decode in self.cudagraph_keys[mode]:
                return mode, decode
        return mode, batch


def use_decode_graphs(
    vllm_runner: Any, attention_backends: Iterable[Iterable[Any]], kv_cache_groups: Iterable[Any]
) -> None:
    """Give a model runner of vLLM `DecodeGraphs`, before it decides which graphs to capture."""
    vllm_runner.uniform_decode_query_len = 1
    vllm_runner.cudagraph_dispatcher = DecodeGraphs(vllm_runner.vllm_config)
    config = vllm_runner.compilation_config
    supports_any_batch = all(
        backend.get_builder_cls().get_cudagraph_support(vllm_runner.vllm_config, group.kv_cache_spec)
        == AttentionCGSupport.ALWAYS
        for backends, group in zip(attention_backends, kv_cache_groups, strict=False)
        for backend in backends
    )
    if config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE and supports_any_batch:
        config.cudagraph_mode = CUDAGraphMode.FULL
