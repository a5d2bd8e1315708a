"""One core reads, writes, divides and joins blocks and weights of several ranks: `python benchmarks/rank_copies.py`."""

import argparse
import time
from collections.abc import Callable

import torch

from paceline.kernels.linear import prepare
from paceline.kernels.weights import Dense
from paceline.models import kv_blocks
from paceline.models.architectures.config import ModelConfig
from paceline.models.loading.weight_manifest import piece_tensors
from paceline.models.loading.weight_parts import Piece
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.pieces import PieceSplit
from paceline.models.runner import Cache, ModelRunner

CPU = torch.device("cpu")
LLAMA_1B = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}
BLOCKS, ROUNDS = 16, 40


class RanksHere(ModelRunner):
    """The caches of `num_ranks` ranks in this process."""

    def __init__(self, config: ModelConfig, num_ranks: int) -> None:
        shape = (BLOCKS, 16, config.num_kv_heads // num_ranks, config.head_dim)
        self.device, self._num_ranks = CPU, num_ranks
        self._caches: list[Cache] = [
            [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_layers)] for _ in range(num_ranks)
        ]
        self.cache = self._caches[0]

    @property
    def num_head_shares(self) -> int:
        return self._num_ranks

    def head_shares(self) -> list[list[Cache]]:
        return [[cache] for cache in self._caches]


def rate(num_bytes: int, copy: Callable[[], object], rounds: int = ROUNDS) -> float:
    """GB per second of processor time, of the fastest tenth."""
    seconds = []
    for _ in range(rounds):
        before = time.process_time()
        copy()
        seconds.append(time.process_time() - before)
    return num_bytes / sorted(seconds)[rounds // 10] / 1e9


def layer(config: ModelConfig) -> dict[str, Piece]:
    hidden, inner = config.hidden_size, config.ffn_size
    shapes = {
        "qkv": (config.q_size + 2 * config.kv_size, hidden),
        "output": (hidden, config.q_size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    return {name: prepare(Dense(torch.randn(shape).bfloat16()), CPU, torch.float32) for name, shape in shapes.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    config = ModelConfig.from_hf(LLAMA_1B)
    print("ranks  read blocks  write blocks  divide a layer  join a layer   (GB/s, one core)")
    pieces = layer(config)
    size = sum(tensor.nbytes for piece in pieces.values() for tensor in piece_tensors(piece))
    for num_ranks in (1, 2, 4):
        runner = RanksHere(config, num_ranks)
        blocks, data = list(range(BLOCKS)), bytearray(BLOCKS * kv_blocks.block_bytes(runner))
        found = [
            rate(len(data), lambda: kv_blocks.read_blocks(runner, blocks, data)),  # noqa: B023  # called at once
            rate(len(data), lambda: kv_blocks.write_blocks(runner, blocks, data)),  # noqa: B023
        ]
        if num_ranks > 1:
            split = PieceSplit(config, RankSpec("", num_ranks, CPU, torch.float32))
            shares = split.divide(pieces)
            found += [
                rate(size, lambda: split.divide(pieces), 10),  # noqa: B023
                rate(size, lambda: split.join(shares), 10),  # noqa: B023
            ]
        print(f"{num_ranks:5d}  " + "  ".join(f"{one:11.2f}" for one in found))


if __name__ == "__main__":
    main()
