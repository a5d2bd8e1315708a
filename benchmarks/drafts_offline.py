"""Tokens per round of methods without a model, replayed on the target's greedy text.

    python benchmarks/drafts_offline.py PROMPTS.jsonl [--text FILE.json] [--each 4] [--tokens 256] [--depth 8] [--lookahead 1]

The embedded model generates the text once (first turn of `--each` prompts of every category, stored in `--text`).
Greedy verification accepts drafts that equal the text, so methods are replayed without the model, in the order of the
file; `suffix` uses earlier requests. `lookahead` needs the target's tokens after wrong drafts: `--lookahead N` runs
the model on N prompts of every category. A row has the method and its tokens per round by category, with drafted
tokens per round in brackets, and the microseconds of a draft.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline import LLM, SamplingParams
from paceline.bench.prompts import load_prompts
from paceline.core.clock import WallClock
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.loading.load import load_model
from paceline.models.runner import ModelRunner, Span
from paceline.speculation.drafts import DraftTree
from paceline.speculation.proposer import Progress, Proposer
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.proposers.ngram import NgramProposer
from paceline.speculation.proposers.suffix import SuffixProposer
from paceline.speculation.trees.tree import ancestors, depths

METHODS: dict[str, Callable[[], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "combined": lambda: CombinedProposer({"ngram": NgramProposer(), "suffix": SuffixProposer()}, {}, WallClock()),
}


@dataclass(frozen=True, slots=True)
class Text:
    category: str
    prompt: list[int]
    output: list[int]


@dataclass(slots=True)
class Score:
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    seconds: float = 0.0

    def add(self, other: "Score") -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.seconds += other.seconds

    def __str__(self) -> str:
        return f"{self.tokens / self.rounds:.2f} ({self.drafted / self.rounds:.1f})"


def generate_text(path: Path, model: str, each: int, num_tokens: int) -> list[Text]:
    taken: defaultdict[str, int] = defaultdict(int)
    prompts = []
    for prompt in load_prompts(path):
        taken[prompt.category] += 1
        if taken[prompt.category] <= each:
            prompts.append(prompt)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    with LLM(model) as llm:
        done = llm.generate(
            [[{"role": "user", "content": prompt.turns[0]}] for prompt in prompts],
            sampling,
            speculation={"enabled": False},
        )
    return [
        Text(prompt.category, list(one.prompt_token_ids), list(one.completions[0].token_ids))
        for prompt, one in zip(prompts, done, strict=True)
    ]


def draft(
    proposer: Proposer, sequence_id: int, ids: list[int], num_prompt: int, depth: int, picks: Sequence[int]
) -> DraftTree:
    greedy = SamplingParams(temperature=0.0)
    proposer.observe([Progress(sequence_id, ids, depth, greedy, 0, 0, num_prompt, "coupled", picks=picks)])
    found = proposer.collect([sequence_id], deadline=0.0).split().get(sequence_id)
    return DraftTree(found.tokens, found.parents) if found else DraftTree()


def replay(proposer: Proposer, number: int, text: Text, depth: int, target: "Target | None" = None) -> Score:
    ids, score = list(text.prompt), Score()
    end = len(ids) + len(text.output)
    whole = ids + text.output
    picks: Sequence[int] = ()
    while len(ids) < end:
        limit = min(depth, end - len(ids) - 1)
        started = time.perf_counter()
        tree = draft(proposer, number, ids, len(text.prompt), limit, picks) if limit else DraftTree()
        score.seconds += time.perf_counter() - started
        rest = whole[len(ids) :]
        if target is not None:
            picks = target.picks(ids, tree)
        matched = tree.num_matched(rest[:-1])
        ids += rest[: matched + 1]
        score.rounds += 1
        score.tokens += matched + 1
        score.drafted += len(tree)
    proposer.close([number])
    return score


class Target:
    """The model on one sequence: its arg-maxes after the last committed token and after every node of a draft."""

    def __init__(self, model: str, max_tokens: int) -> None:
        loaded = load_model(model, torch.device("cpu"), torch.float32)
        self._runner = ModelRunner(loaded.model, -(-max_tokens // BLOCK_SIZE))
        self._blocks = list(range(self._runner.num_blocks))
        self._num_cached = 0

    def start(self) -> None:
        self._num_cached = 0

    def picks(self, ids: Sequence[int], tree: DraftTree) -> list[int]:
        new = list(ids[self._num_cached : -1])
        for start in range(0, len(new), 512):
            chunk = new[start : start + 512]
            self._runner.forward([Span(self._blocks, self._num_cached + start, chunk, 0)])
        self._num_cached = context = len(ids) - 1
        positions = [context, *(context + depth for depth in depths(tree.parents))]
        tokens = [ids[-1], *tree.tokens]
        span = Span(self._blocks, context, tokens, len(tokens), positions, ancestors(tree.parents))
        logits = self._runner.forward([span]).logits
        assert logits is not None
        picked: list[int] = logits.argmax(dim=1).tolist()
        return picked


def table(name: str, scores: dict[str, Score]) -> str:
    total = Score()
    for score in scores.values():
        total.add(score)
    cells = "  ".join(f"{category} {score}" for category, score in scores.items())
    return f"{name}: all {total}  {cells}  [{1e6 * total.seconds / total.rounds:.0f} us]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--text", type=Path, help="file of the generated text; created if missing")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--each", type=int, default=4, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--lookahead", type=int, default=0, help="prompts of each category for lookahead")
    args = parser.parse_args()
    if args.text and args.text.exists():
        texts = [Text(**entry) for entry in json.loads(args.text.read_text())]
    else:
        texts = generate_text(args.prompts, args.model, args.each, args.tokens)
        if args.text:
            entries = [{"category": t.category, "prompt": t.prompt, "output": t.output} for t in texts]
            args.text.write_text(json.dumps(entries))
    for name, make in METHODS.items():
        proposer, scores = make(), defaultdict(Score)
        for number, text in enumerate(texts):
            scores[text.category].add(replay(proposer, number, text, args.depth))
        print(table(name, scores), flush=True)
    if args.lookahead:
        target = Target(args.model, max(len(text.prompt) + len(text.output) for text in texts) + args.depth + 1)
        lookahead, scores = LookaheadProposer(), defaultdict(Score)
        taken: defaultdict[str, int] = defaultdict(int)
        for number, text in enumerate(texts):
            taken[text.category] += 1
            if taken[text.category] <= args.lookahead:
                target.start()
                scores[text.category].add(replay(lookahead, number, text, args.depth, target))
        print(table("lookahead", scores))


if __name__ == "__main__":
    main()
