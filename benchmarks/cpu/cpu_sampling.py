"""Time of sampling on this CPU: the native call and the torch operations that it replaces.

    python benchmarks/cpu/cpu_sampling.py --repeats 40

Rows of 49,152 logits from a pass of the embedded model. A pick is one token per row; a ranking is the four best tokens of a
draft over its 16,384 tokens.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from paceline.core.machine import cpu_name, usable_cores
from paceline.core.sampling import SamplingParams
from paceline.kernels.cpu import native
from paceline.models.drafts.vocabulary import DraftVocabulary
from paceline.models.loading.hub import find_model
from paceline.models.loading.load import load_model
from paceline.models.runner import ModelRunner, Span
from paceline.speculation.trees import ranking
from paceline.speculation.verification import distribution
from paceline.speculation.verification.rows import RowContext

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.2, top-p 0.9": SamplingParams(temperature=0.2, top_p=0.9),
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 1, top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "temperature 1, top-k 50": SamplingParams(temperature=1.0, top_k=50),
}
ROWS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=40, help="calls of which the fastest counts")
    repeats = parser.parse_args().repeats
    model = load_model(find_model("smollm2")).model
    with torch.inference_mode(), native.single_threaded_torch():
        runner = ModelRunner(model, 8)
        logits = runner.forward([Span([0, 1], 0, list(range(100, 120)), num_logits=ROWS)]).logits
        assert logits is not None
        few = logits[:, :16384].contiguous()
        print(f"{cpu_name()}, {usable_cores()} cores, {native.instructions()}; milliseconds, least of {repeats}")
        print(f"{'':28} {'1 row':>16} {f'{ROWS} rows':>16} {'ranking of a row':>18}   native, torch")
        for name, params in KINDS.items():
            rows = [RowContext(params, 7, 0, 100 + i, [1], 1) for i in range(ROWS)]
            cells = [
                pair(partial(distribution.pick, logits[:1], rows[:1]), repeats),
                pair(partial(distribution.pick, logits, rows), repeats),
                pair(
                    partial(ranking.rank, few[:1], rows[:1], [True], DraftVocabulary(len(few[0]), model.head), 4),
                    repeats,
                ),
            ]
            print(f"{name:28} {cells[0]:>16} {cells[1]:>16} {cells[2]:>18}")


def pair(call: Callable[[], object], repeats: int) -> str:
    own = least(call, repeats)
    with mock.patch.object(distribution, "can_sample", never), mock.patch.object(ranking, "can_sample", never):
        return f"{own:.2f}, {least(call, repeats):.2f}"


def never(logits: torch.Tensor) -> bool:
    return False


def least(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times) * 1e3


if __name__ == "__main__":
    main()
