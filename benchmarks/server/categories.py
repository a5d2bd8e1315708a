"""Accuracy and time of the classification of prompts without a category.

    python benchmarks/server/categories.py FILE [FILE …]

Files hold lines of JSON with `prompt`, `question` or `turns`, and optionally `category`. The table has one row per
category.
"""

import argparse
import json
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

from paceline.requests.categories import kind_of

KINDS = ("code", "json", "maths", "prose")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds = []
    for path in parser.parse_args().files:
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            text = entry["turns"][0] if "turns" in entry else entry.get("prompt") or entry["question"]
            began = time.perf_counter()
            kind = kind_of(text)
            seconds.append(time.perf_counter() - began)
            counts[entry.get("category", path.stem)][kind] += 1
    print("".join(f"{name:>26}" if name == "category" else f"{name:>8}" for name in ("category", *KINDS)))
    for category, found in counts.items():
        print(f"{category:>26}" + "".join(f"{found[kind]:8}" for kind in KINDS))
    print(f"\n{len(seconds)} prompts, median {statistics.median(seconds) * 1e6:.0f} µs each")


if __name__ == "__main__":
    main()
