"""Tokens per round of every method and every shipped draft, with 95% intervals.

    python benchmarks/drafts_rounds.py PROMPTS.jsonl --results rounds.jsonl [--rows eagle:31 tree:16 …] [--temperatures 0 1]
        [--tokens 64] [--batch 16] [--each 5] [--skip 120] [--threads 1] [--whole] [--eagle FOLDER] [--distilled FOLDER]
        [--medusa FOLDER] [--verification coupled] [--model smollm2] [--device cpu]

A row is a method and the most nodes of its drafts. All turns of every prompt are answered (`--each`: of the first prompts of
every category); a later turn follows the answers before it. The step with the first token of an answer is no round. All rows
answer `--batch` prompts before the next ones begin, in a shuffled order, so that an unfinished run covers all categories. Every
row has lookups of its own: none finds the texts of another row.

Under coupled verification no draft changes a text, so that the texts are known once the row `eagle:1` has answered. This saves
most of the target's work: methods that need nothing of the target but its text are replayed without it, and of the trees of
`eagle` and `medusa` the engine verifies the nodes that will be accepted. The rounds are the same. `--whole` verifies all nodes
of all methods, as is always done for `lookahead`, `layer_skip` and `combined`: they use what the target says after rejected
nodes, or its time. So are all under `--verification rejection`, where sampled texts differ between rows.

Results are appended to `--results`, and the same command continues an interrupted run; the stores of `suffix` and `combined`
then start empty. Intervals hold 95% of 2,000 resamples of the prompts. `combined` decides by measured time, so that load on the
machine changes its figure.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from drafts_rows import FIRST, Conversation, Methods, Row, Settings

from paceline.bench.prompts import BenchPrompt, load_prompts
from paceline.kernels.cpu import native

ROWS = "ngram:8 suffix:31 lookahead:8 layer_skip:2 medusa:31 chain:5 tree:16 eagle:31 combined:31"
"""Methods and nodes of the table. `chain` and `tree` draft with the distilled model, `combined` with lookups and the head."""
RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Result:
    """All answers of one row to one prompt."""

    row: str
    temperature: float
    prompt: int
    category: str
    rounds: int
    tokens: int
    """Tokens of these rounds."""
    drafted: int
    answers: list[list[int]]
    """Token ids of every answer."""

    @classmethod
    def of(cls, row: Row, talk: Conversation) -> "Result":
        counts = talk.rounds, talk.tokens, talk.drafted
        return cls(row.name, row.temperature, talk.number, talk.prompt.category, *counts, talk.answers)


def first_of_each(prompts: Sequence[BenchPrompt], each: int | None) -> list[tuple[int, BenchPrompt]]:
    """Prompts with their numbers, in a shuffled order."""
    seen = Counter[str]()
    kept = []
    for number, prompt in enumerate(prompts):
        seen[prompt.category] += 1
        if each is None or seen[prompt.category] <= each:
            kept.append((number, prompt))
    random.Random(0).shuffle(kept)
    return kept


def measure(options: argparse.Namespace, rows: Sequence[Row], results: Sequence[Result]) -> Iterator[Result]:
    prompts = first_of_each(load_prompts(options.prompts), options.each)[options.skip :]
    done = {(one.row, one.temperature, one.prompt) for one in results}
    texts: dict[float, dict[int, Sequence[int]]] = {row.temperature: {} for row in rows}

    def learn(one: Result) -> None:
        talk = Conversation(one.prompt, BenchPrompt(()))
        for ids in one.answers:
            texts[one.temperature][talk.seed] = ids
            talk.answers.append(ids)

    for one in results:
        if one.row == FIRST and one.temperature in texts:
            learn(one)
    settings = Settings(
        options.model, options.eagle, options.distilled, options.medusa, options.device, options.batch,
        options.window, options.tokens, options.cache_tokens, options.verification,
        options.whole or options.verification == "rejection",
    )  # fmt: skip
    methods = Methods(settings, rows, texts)
    seconds = Counter[str]()
    for start in range(0, len(prompts), options.batch):
        batch = prompts[start : start + options.batch]
        for row in rows:
            started = time.process_time()
            talks = [Conversation(*one) for one in batch if (row.name, row.temperature, one[0]) not in done]
            methods.answer(row, talks)
            seconds[row.key] += time.process_time() - started
            for talk in talks:
                one = Result.of(row, talk)
                if row.name == FIRST:
                    learn(one)
                yield one
        times = ", ".join(f"{key} {value:.0f}" for key, value in seconds.items())
        print(
            f"{start + len(batch)} of {len(prompts)} prompts; processor seconds: {times}", file=sys.stderr, flush=True
        )


def interval(results: Sequence[Result]) -> str:
    """Tokens per round of all prompts, and the bounds of 95% of resamples."""
    tokens, rounds = (torch.tensor([getattr(one, name) for one in results]).double() for name in ("tokens", "rounds"))
    drawn = torch.randint(len(results), (RESAMPLES, len(results)), generator=torch.Generator().manual_seed(0))
    rates = (tokens[drawn].sum(1) / rounds[drawn].sum(1).clamp(min=1)).sort().values.tolist()
    low, high = rates[RESAMPLES // 40], rates[-RESAMPLES // 40 - 1]
    return f"{tokens.sum() / rounds.sum():.2f} ({low:.2f} to {high:.2f})"


def report(results: Iterable[Result], rows: Sequence[Row]) -> None:
    by_row: defaultdict[tuple[str, float], list[Result]] = defaultdict(list)
    texts: defaultdict[tuple[int, float], set[str]] = defaultdict(set)
    for one in results:
        by_row[one.row, one.temperature].append(one)
        texts[one.prompt, one.temperature].add(json.dumps(one.answers))
    categories = sorted({one.category for some in by_row.values() for one in some})
    print(f"| method | temperature | prompts | drafted | tokens per round | {' | '.join(categories)} |")
    print("|---" * (5 + len(categories)) + "|")
    for row in rows:
        own = by_row[row.name, row.temperature]
        if not (rounds := sum(one.rounds for one in own)):
            continue
        cells = []
        for category in categories:
            some = [one for one in own if one.category == category]
            cells.append(f"{sum(one.tokens for one in some) / max(1, sum(one.rounds for one in some)):.2f}")
        drafted = sum(one.drafted for one in own) / rounds
        cells = [row.name, f"{row.temperature:g}", f"{len(own)}", f"{drafted:.1f}", interval(own), *cells]
        print(f"| {' | '.join(cells)} |")
    print(f"prompts with different texts: {sum(len(one) > 1 for one in texts.values())} of {len(texts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=ROWS.split())
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--each", type=int)
    parser.add_argument(
        "--skip", type=int, default=0, help="prompts to leave out, so that several processes share a run"
    )
    parser.add_argument("--whole", action="store_true", help="verify all nodes of all drafts")
    parser.add_argument("--verification", choices=("coupled", "rejection"), default="coupled")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--cache-tokens", type=int, default=32768, help="tokens of the KV cache")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    for draft in ("eagle", "distilled", "medusa"):
        parser.add_argument(f"--{draft}", default=f"smollm2-{draft}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native.set_num_threads(options.threads)
    named = [name.split(":") for name in dict.fromkeys((FIRST, *options.rows))]
    rows = [Row(method, int(nodes), temperature) for temperature in options.temperatures for method, nodes in named]
    results = []
    if options.results.exists():
        results = [Result(**json.loads(line)) for line in options.results.read_text("utf-8").splitlines()]
    with options.results.open("a", encoding="utf-8") as file:
        for one in measure(options, rows, tuple(results)):
            results.append(one)
            print(json.dumps(asdict(one)), file=file, flush=True)
    report(results, rows)


if __name__ == "__main__":
    main()
