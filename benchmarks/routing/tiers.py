"""Time to the first token of a conversation whose KV was evicted to disk, compared with computing it again.

    python benchmarks/routing/tiers.py [--tokens 4000] [--turns 3] [--folder DIR]

One process computes the conversation and another of the same length, so that the first is evicted from device and
host to disk. Every figure then comes from a new process that loads the embedded model, computes one short prompt, and
receives the conversation and 24 more tokens. Modes alternate: computed; from disk with the files in the page cache;
from disk with the page cache dropped. Texts must be the same.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM

QUESTION, ANSWER, VOCABULARY = 24, 16, 49_152
MODES = ("computed", "from disk", "from disk, page cache dropped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: temporary")
    parser.add_argument("--child", choices=("prepare", *MODES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(child(options.child, options.folder, options.tokens)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        prepared = run("prepare", f"{folder}/kv", options.tokens)
        print(
            f"{prepared['blocks']} blocks, {prepared['bytes'] / 1e6:.0f} MB on disk, in no other tier; "
            f"load average {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        results: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        texts = set()
        for turn in range(options.turns):
            for mode in MODES:
                own = linked(Path(folder))
                if mode == MODES[2]:
                    drop(own)
                result = run(mode, str(own), options.tokens)
                shutil.rmtree(own)
                texts.add(tuple(result.pop("text")))
                results[mode].append(result)
                print(
                    f"turn {turn + 1}: {mode}: {result['first']:.2f} s, {result['cached']:.0f} tokens cached",
                    flush=True,
                )
    if len(texts) != 1:
        sys.exit("the texts differ")
    base = statistics.median(result["first"] for result in results["computed"])
    print("\n| source of the cache | first token, s | speed-up | tokens not computed |\n|---|---:|---:|---:|")
    for mode, found in results.items():
        first = statistics.median(result["first"] for result in found)
        print(f"| {mode} | {first:.3f} | {base / first:.1f} | {found[0]['cached']:.0f} |")
    print(f"\nMedians of {options.turns}; load average {os.getloadavg()[0]:.1f}")


def run(mode: str, folder: str, tokens: int) -> dict:
    command = [sys.executable, __file__, "--child", mode, "--folder", folder, "--tokens", str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def child(mode: str, folder: Path, tokens: int) -> dict:
    generator = random.Random(7)
    conversation, other, question, short = (
        [generator.randrange(1000, VOCABULARY) for _ in range(count)] for count in (tokens, tokens, QUESTION, 64)
    )
    window = tokens + 256
    settings: dict = {"max_model_len": window, "kv_tokens": window + 32, "speculation": {"enabled": False}}
    if mode != "computed":
        settings |= {"kv_disk": str(folder), "kv_host_bytes": 512 << 20}
    if mode == "prepare":  # the other conversation evicts this one from the host tier too
        settings["kv_host_bytes"] = 32 << 20
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    with LLM("smollm2", draft=None, **settings) as llm:
        if mode == "prepare":
            llm.generate([conversation], sampling)
            while llm.engine.status.snapshot().tiers.disk_blocks < tokens // 16:  # written when idle
                time.sleep(0.1)
            llm.generate([other], sampling)
        else:
            llm.generate([short], sampling)
            began, first, cached, text = time.perf_counter(), 0.0, 0, []
            for output in llm.stream([*conversation, *question], sampling):
                first = first or time.perf_counter() - began
                cached = output.num_cached
                text += output.tokens
            return {"first": first, "cached": cached, "text": text}
    files = list(folder.glob("*/*.kv"))
    return {"blocks": len(files), "bytes": sum(file.stat().st_size for file in files)}


def linked(folder: Path) -> Path:
    """A copy of the prepared files: every run starts with the same ones."""
    own = folder / "own"
    shutil.copytree(folder / "kv", own, copy_function=os.link)
    return own


def drop(folder: Path) -> None:
    """Drop the files from the page cache after writing them to disk."""
    os.sync()
    for path in folder.glob("*/*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
