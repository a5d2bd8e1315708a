"""Asks vLLM how it runs decode steps with `DecodeGraphs`, in its own environment: `graph_modes.py MODE DEPTH MAX_NUM_SEQS`.

The answer is a JSON object by number of sequences: graph mode and rows of a step with `DEPTH` drafts for every sequence, with
drafts for the first one only, and without drafts. The sizes of graphs are those of vLLM's defaults.
"""

import json
import sys
from types import SimpleNamespace


def main(mode: str, depth: int, max_num_seqs: int) -> None:
    from vllm.config import CompilationConfig
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from paceline.vllm.graphs import use_decode_graphs

    largest = min(max_num_seqs * (1 + depth) * 2, 512)  # VllmConfig._set_cudagraph_sizes
    sizes = [1, 2, 4, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
    compilation = CompilationConfig(mode=3, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    compilation.max_cudagraph_capture_size = sizes[-1]
    compilation.set_splitting_ops_for_v1("allgather_reducescatter", 1)
    config = SimpleNamespace(
        compilation_config=compilation,
        lora_config=None,
        num_speculative_tokens=depth,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )
    builder = SimpleNamespace(get_cudagraph_support=lambda *_: AttentionCGSupport.ALWAYS)
    backend = SimpleNamespace(get_builder_cls=lambda: builder)
    runner = SimpleNamespace(vllm_config=config, compilation_config=compilation)
    use_decode_graphs(runner, [[backend]], [SimpleNamespace(kv_cache_spec=None)])
    dispatcher = runner.cudagraph_dispatcher
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, runner.uniform_decode_query_len)

    def step(drafts: list[int]) -> tuple[str, bool, int]:
        tokens = [1 + count for count in drafts]
        length = runner.uniform_decode_query_len
        is_uniform = GPUModelRunner._is_uniform_decode(max(tokens), length, sum(tokens), len(tokens))
        found, batch = dispatcher.dispatch(sum(tokens), is_uniform)
        return found.name, batch.uniform, batch.num_tokens

    steps = {
        size: [step([depth] * size), step([depth] + [0] * (size - 1)), step([0] * size)]
        for size in range(1, max_num_seqs + 1)
    }
    print(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
