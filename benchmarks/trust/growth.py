"""Where the memory of a target goes: rounds of streams, half of them cancelled, and after each what is resident.

python benchmarks/trust/growth.py

An engine with a tiny model and a cache of 51 MB. The cache is allocated at the start, and the system gives it a page when the
page is first written. `heap` is what the allocator has given out, `free heap` what it keeps for later.
"""

import argparse
import ctypes
import mmap
import random

import torch
from tests.fakes import tiny_engine, tiny_model

from paceline.core.machine import process_memory, release_memory
from paceline.core.request import Request, SamplingParams
from paceline.engine.engine import Engine
from paceline.models.blocks.kv_blocks import planes

ROUNDS, STREAMS, PROMPT, TOKENS = 12, 100, 180, 16


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallocInfo


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the tensor that have pages."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def run_round(engine: Engine, number: int) -> None:
    """Random prompts; every second stream is cancelled after half of its tokens."""
    rng = random.Random(number)
    sampling = SamplingParams(max_tokens=TOKENS, seed=number, ignore_eos=True)
    names = [f"{number}-{i}" for i in range(STREAMS)]
    for name in names:
        ids = tuple(rng.randrange(1, 30) for _ in range(PROMPT))
        engine.add(engine.validate(Request(name, ids, sampling)))
    seen = dict.fromkeys(names, 0)
    while engine.has_work:
        for output in engine.step():
            seen[output.request_id] += len(output.tokens)
        for name in [name for name in names[::2] if seen[name] >= TOKENS // 2]:
            engine.cancel(name)


def show(name: object, engine: Engine) -> None:
    info, total = libc.mallinfo2(), process_memory()
    cache = sum(map(resident, planes(engine.runner)))
    parts = (total, cache, info.uordblks, info.fordblks, total - cache - info.uordblks - info.fordblks)
    print(f"| {name} | " + " | ".join(f"{value / 1e6:.0f}" for value in parts) + " |", flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    engine = tiny_engine(tiny_model(), kv_tokens=100_000, max_num_seqs=32, max_batched_tokens=1024)
    print("| round | resident, MB | cache | heap | free heap | other |\n|---|---|---|---|---|---|", flush=True)
    show("start", engine)
    for number in range(1, ROUNDS + 1):
        run_round(engine, number)
        show(number, engine)
    release_memory()
    show("after `malloc_trim`", engine)


if __name__ == "__main__":
    main()
