"""Time of the kernels of one decoding step of a small model on a GPU: where the time of a draft goes.

    python benchmarks/draft_step.py [--batches 1 8 32] [--context 500] [--rows 1]

The model has the shape of SmolLM2-135M and random weights. Each row is the time of a captured pass, then of its kernels by name,
from the profiler: microseconds per pass, and the number of launches. Kernels overlap, so that they add up to more than the
pass takes.
"""

import argparse
from collections import defaultdict
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.kernels.layout import BLOCK_SIZE
from paceline.kernels.weights import Dense
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.llama import DecoderModel
from paceline.models.cuda_graph import StreamTimer
from paceline.models.gpu.forward_pass import PassGraph, PassKind
from paceline.models.gpu.runner import GpuRunner
from paceline.models.runner import Span

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }
)  # fmt: skip
RUNS = 20


class RandomWeights:
    """Weights of `CONFIG` on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def names(self) -> frozenset[str]:
        return frozenset()

    def matrix(self, name: str) -> Dense:
        c = CONFIG
        sizes = {
            "q_proj": (c.num_heads * c.head_dim, c.hidden_size), "k_proj": (c.num_kv_heads * c.head_dim, c.hidden_size),
            "v_proj": (c.num_kv_heads * c.head_dim, c.hidden_size), "o_proj": (c.hidden_size, c.num_heads * c.head_dim),
            "gate_proj": (c.ffn_size, c.hidden_size), "up_proj": (c.ffn_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.ffn_size), "embed_tokens": (c.vocab_size, c.hidden_size),
        }  # fmt: skip
        shape = next(size for part, size in sizes.items() if part in name)
        return Dense(torch.randn(shape, device=self._device, dtype=torch.bfloat16) * 0.02)

    def vector(self, name: str) -> torch.Tensor:
        return torch.ones(CONFIG.hidden_size, device=self._device)


def graph_of(runner: GpuRunner, batch: int, rows: int, context: int) -> PassGraph:
    """A captured pass, with its inputs set."""
    each = -(-(context + rows) // BLOCK_SIZE)
    spans = [Span(range(i * each, (i + 1) * each), context, [1] * rows, rows) for i in range(batch)]
    graph = PassGraph(runner.context, batch, rows, PassKind())
    graph.run(spans)
    return graph


def seconds(graph: PassGraph, device: torch.device) -> float:
    times = []
    for _ in range(RUNS):
        graph.replay()  # the next one does not wait for the host
        timer = StreamTimer(device)
        graph.replay()
        times.append(timer.seconds())
    return median(times)


def kernels(graph: PassGraph) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of a pass by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(RUNS):
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in seen.key_averages():
        found[event.key[:48]] = (event.device_time_total / RUNS, event.count // RUNS)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--rows", type=int, default=1, help="rows of each sequence; the first step of a round has 2")
    options = parser.parse_args()
    device = torch.device("cuda")
    model = DecoderModel(CONFIG, RandomWeights(device), device, torch.bfloat16)
    most = max(options.batches) * -(-(options.context + options.rows) // BLOCK_SIZE)
    runner = GpuRunner(model, most)
    for batch in options.batches:
        graph = graph_of(runner, batch, options.rows, options.context)
        print(f"\n{batch} sequences, {1e6 * seconds(graph, device):.0f} us a pass")
        for name, (time, count) in kernels(graph).items():
            print(f"  {name:48} {time:8.1f} us, {count:4} launches, {time / max(1, count):6.2f} us each")


if __name__ == "__main__":
    main()
