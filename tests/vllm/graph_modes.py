"""Asks vLLM how it runs decode steps, in its own environment: `python graph_modes.py MODE DEPTH MAX_NUM_SEQS`.

The answer is a JSON object by number of sequences: the graph mode of a step with `DEPTH` drafts for every sequence, with drafts
for the first one only, and without drafts. The sizes of graphs are those of vLLM's defaults.
"""

import json
import sys
from types import SimpleNamespace


def main(mode: str, depth: int, max_num_seqs: int) -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    largest = min(max_num_seqs * (1 + depth) * 2, 512)  # VllmConfig._set_cudagraph_sizes
    sizes = [1, 2, 4, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
    compilation = CompilationConfig(mode=3, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    compilation.max_cudagraph_capture_size = sizes[-1]
    compilation.set_splitting_ops_for_v1("allgather_reducescatter", 1)
    resize = compilation.adjust_cudagraph_sizes_for_spec_decode
    resize(1 + depth, *([1] if resize.__func__.__code__.co_argcount > 2 else []))
    config = SimpleNamespace(
        compilation_config=compilation,
        lora_config=None,
        num_speculative_tokens=depth,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode], 1 + depth)

    def mode_of(drafts: list[int]) -> str:
        tokens = [1 + count for count in drafts]
        is_uniform = GPUModelRunner._is_uniform_decode(max(tokens), 1 + depth, sum(tokens), len(tokens))
        return dispatcher.dispatch(sum(tokens), is_uniform)[0].name

    modes = {
        size: [mode_of([depth] * size), mode_of([depth] + [0] * (size - 1)), mode_of([0] * size)]
        for size in range(1, max_num_seqs + 1)
    }
    print(json.dumps(modes))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
