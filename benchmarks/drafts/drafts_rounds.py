"""Tokens per round of every method and every shipped draft, with 95% intervals.

    python benchmarks/drafts/drafts_rounds.py PROMPTS.jsonl --results rounds.jsonl [--rows eagle:31 tree:16 …]
        [--temperatures 0 1] [--tokens 64] [--batch 16] [--each 5] [--skip 120] [--threads 1] [--whole]
        [--eagle FOLDER] [--distilled FOLDER] [--medusa FOLDER] [--verification coupled] [--model smollm2] [--device cpu]

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
import itertools
import json
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.request import Request, SamplingParams, SpeculationParams, Verification
from paceline.engine.start.build import build_engine
from paceline.kernels.cpu import native
from paceline.model_files.hub.hub import find_model
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.models.drafts.load import LoadedHead, load_draft, open_draft_folder
from paceline.models.heads.medusa import MedusaModel
from paceline.models.heads.vocabulary import proposable_ids
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.runners import make_runner
from paceline.speculation.drafts.drafts import Draft, DraftBatch, DraftTree
from paceline.speculation.proposer import Proposer, SequenceProgress
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.proposers.medusa import MedusaProposer
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from paceline.speculation.proposers.model.model_trees import BRANCHES
from paceline.speculation.proposers.suffix import NgramProposer, SuffixProposer
from paceline.tools.prompts.prompts import BenchPrompt, load_prompts

FIRST, PLAIN = "eagle:1", "plain:0"
"""The row that answers first: the head then has the states of the prompt in its cache. And plain decoding."""
REPLAYED = ("ngram", "suffix", "chain", "tree")
"""Methods that need nothing of the target but its text."""
WHOLE = ("lookahead", "layer_skip", "combined")
"""Methods whose drafts the engine always verifies whole."""
MAX_NODES = 31
PREFILL_ROWS = 256


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    eagle: str
    distilled: str
    medusa: str
    device: str
    batch: int
    window: int
    tokens: int
    """Tokens of an answer."""
    cache_tokens: int
    verification: Verification
    is_whole: bool
    """Whether the engine verifies all drafts, and whole."""


@dataclass(frozen=True, slots=True)
class Row:
    method: str
    nodes: int
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.method}:{self.nodes}"

    @property
    def key(self) -> str:
        """Method inside the engine."""
        return f"{self.name}@{self.temperature:g}"


class Conversation:
    """The turns of one prompt so far, and what a row needed for them."""

    def __init__(self, number: int, prompt: BenchPrompt) -> None:
        self.number, self.prompt = number, prompt
        self.messages: list[dict[str, str]] = []
        self.answers: list[list[int]] = []
        self.rounds = self.tokens = self.drafted = 0

    @property
    def is_open(self) -> bool:
        return len(self.answers) < len(self.prompt.turns)

    @property
    def seed(self) -> int:
        """Seed of the next answer, different for all answers."""
        return 100 * self.number + len(self.answers)

    def count(self, tokens: int, drafted: int) -> None:
        self.rounds += 1
        self.tokens += tokens
        self.drafted += drafted


Texts = Mapping[float, Mapping[int, Sequence[int]]]
"""Answers by temperature and seed."""


class KnownTexts:
    """A proposer whose drafts are cut to the nodes that will be accepted. `texts`: answers by seed."""

    def __init__(self, inner: Proposer, texts: Mapping[int, Sequence[int]]) -> None:
        self._inner, self._texts = inner, texts
        self._progress: dict[int, SequenceProgress] = {}
        self.traits = inner.traits
        self.drafted = Counter[int]()
        """Nodes before the cut, by seed."""

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self._progress.update((progress.sequence_id, progress) for progress in batch)
        self._inner.observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        batch = self._inner.collect(sequence_ids, deadline)
        return DraftBatch.trees(((i, self._cut(i, draft)) for i, draft in batch.split().items()), batch.cost)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._progress.pop(sequence_id, None)
        self._inner.close(sequence_ids)

    def _cut(self, sequence_id: int, draft: Draft) -> DraftTree:
        progress = self._progress[sequence_id]
        self.drafted[progress.seed] += len(draft)
        rest = self._texts[progress.seed][len(progress.ids) - progress.num_prompt :]
        count = DraftTree(draft.tokens, draft.parents).num_matched(rest)
        return DraftTree(tuple(rest[:count]), tuple(range(-1, count - 1)))


class Methods:
    """An engine whose methods are the rows."""

    def __init__(self, settings: Settings, rows: Sequence[Row], texts: Texts) -> None:
        self._settings, self._texts, self._loaded = settings, texts, list[LoadedModel]()
        self._sequence_ids = itertools.count(10**9)
        config = EngineConfig(
            model=settings.model,
            draft=settings.eagle,
            device=settings.device,
            max_num_seqs=settings.batch,
            max_model_len=settings.window,
            max_batched_tokens=settings.batch * (MAX_NODES + 1) + PREFILL_ROWS,  # all sequences draft in all rounds
            kv_tokens=max(settings.window, settings.cache_tokens),
            audit_fraction=0.0,
            speculation=SpeculationConfig(
                depth="fixed", max_depth=MAX_NODES, verification=settings.verification, breaker_rounds=10**9
            ),
        )
        self._engine = build_engine(config, load=self._load)
        assert self._engine.tokenizer is not None
        self._tokenizer, self._template = self._engine.tokenizer, ChatTemplate.of(self._engine.tokenizer)
        proposers = self._engine.speculator.proposers
        assert isinstance(proposers, dict)
        self._proposers: dict[Row, Proposer] = {}
        """Models share their weights, and lookups share nothing."""
        for row in rows:
            if row.name != PLAIN:
                found = self._proposer(row, proposers["eagle"])
                is_cut = not settings.is_whole and row.name != FIRST and row.method not in WHOLE + REPLAYED
                found = KnownTexts(found, texts[row.temperature]) if is_cut else found
                self._proposers[row] = proposers[row.key] = found

    def answer(self, row: Row, talks: Sequence[Conversation]) -> None:
        """Answers all turns of the conversations."""
        while batch := [talk for talk in talks if talk.is_open]:
            for talk in batch:
                talk.messages.append({"role": "user", "content": talk.prompt.turns[len(talk.answers)]})
            is_replayed = row.method in REPLAYED and not self._settings.is_whole
            texts = self._replay(row, batch) if is_replayed else self._generate(row, batch)
            for talk, ids in zip(batch, texts, strict=True):
                talk.answers.append(ids)
                talk.messages.append({"role": "assistant", "content": self._tokenizer.decode(ids)})

    def _generate(self, row: Row, batch: Sequence[Conversation]) -> list[list[int]]:
        """Texts of the next answers, through the engine."""
        texts: dict[str, list[int]] = {}
        for talk in batch:
            is_plain = row.name == PLAIN
            request = Request(
                f"{row.key}/{talk.seed}",
                self._prompt(talk),
                self._sampling(row, talk),
                SpeculationParams(not is_plain, None if is_plain else row.key, row.nodes),
            )
            self._engine.add(self._engine.validate(request))
            texts[request.id] = []
        by_id, used = dict(zip(texts, batch, strict=True)), self._proposers.get(row)
        is_cut = isinstance(used, KnownTexts)
        while self._engine.has_work:
            for output in self._engine.step():
                text = texts[output.request_id]
                if text:
                    by_id[output.request_id].count(len(output.tokens), 0 if is_cut else output.drafted)
                text.extend(output.tokens)
        if isinstance(used, KnownTexts):
            for talk in batch:
                talk.drafted += used.drafted[talk.seed]
        return list(texts.values())

    def _replay(self, row: Row, batch: Sequence[Conversation]) -> list[list[int]]:
        """The known texts, after rounds without the target."""
        proposer = self._proposers[row]
        texts = [list(self._texts[row.temperature][talk.seed]) for talk in batch]
        running = {next(self._sequence_ids): pair for pair in zip(batch, texts, strict=True)}
        prompts = {i: self._prompt(talk) for i, (talk, _) in running.items()}
        ids = {i: [*prompts[i], *text[:1]] for i, (_, text) in running.items()}
        while running := {i: pair for i, pair in running.items() if len(ids[i]) < len(prompts[i]) + len(pair[1])}:
            batch_progress = []
            for i, (talk, _) in running.items():
                levels = self._settings.tokens - (len(ids[i]) - len(prompts[i])) - 1
                depth = row.nodes if proposer.traits.is_tree and levels else min(row.nodes, levels)
                sampling = self._sampling(row, talk)
                batch_progress.append(
                    SequenceProgress(
                        i, ids[i], depth, sampling, talk.seed, 0, len(prompts[i]), "coupled", max_levels=levels
                    )
                )
            proposer.observe(batch_progress)
            drafts = proposer.collect(tuple(running), math.inf).split()
            for i, (talk, text) in running.items():
                draft, rest = drafts.get(i, Draft()), text[len(ids[i]) - len(prompts[i]) :]
                added = rest[: DraftTree(draft.tokens, draft.parents).num_matched(rest) + 1]
                talk.count(len(added), len(draft))
                ids[i].extend(added)
        proposer.close(tuple(ids))
        return texts

    def _prompt(self, talk: Conversation) -> tuple[int, ...]:
        ids = self._tokenizer.encode(self._template.render(talk.messages), add_special=False)
        return tuple(ids)[-(self._settings.window - self._settings.tokens - 1) :]

    def _sampling(self, row: Row, talk: Conversation) -> SamplingParams:
        return SamplingParams(max_tokens=self._settings.tokens, temperature=row.temperature, seed=talk.seed)

    def _load(self, *arguments: Any) -> LoadedModel:
        self._loaded.append(load_model(*arguments))
        return self._loaded[-1]

    @cached_property
    def _distilled(self) -> LoadedModel:
        draft = load_draft(open_draft_folder(find_model(self._settings.distilled)), self._loaded[0])
        assert isinstance(draft, LoadedModel)
        return draft

    @cached_property
    def _medusa(self) -> MedusaProposer:
        draft = load_draft(open_draft_folder(find_model(self._settings.medusa)), self._loaded[0])
        assert isinstance(draft, LoadedHead)
        assert isinstance(draft.model, MedusaModel)
        return MedusaProposer(draft.model)

    def _proposer(self, row: Row, eagle: Proposer) -> Proposer:
        blocks, rows = self._engine.runner.num_blocks, self._engine.scheduler.max_batched_tokens
        match row.method:
            case "chain" | "tree":
                target, draft = self._loaded[0], self._distilled
                sizes = rows, len(proposable_ids(target.config, draft.config)), target.config.vocab_size
                runner, branches = make_runner(draft.model, blocks, None), BRANCHES if row.method == "tree" else 1
                # The draft prefill of a prompt is done before its first round
                return DraftModelProposer(runner, *sizes, max_gap=blocks * rows, branches=branches)
            case "layer_skip":
                return self._engine.speculator.proposers["layer_skip"]
            case "eagle":
                return eagle
            case "medusa":
                return self._medusa
            case "combined":
                lookups = {"ngram": NgramProposer(), "suffix": SuffixProposer()}
                return CombinedProposer(lookups, {"eagle": eagle}, WallClock())
            case "ngram":
                return NgramProposer()
            case "suffix":
                return SuffixProposer()
            case "lookahead":
                return LookaheadProposer()
        raise SystemExit(f"no method is named {row.method!r}")


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
    done = {(result.row, result.temperature, result.prompt) for result in results}
    texts: dict[float, dict[int, Sequence[int]]] = {row.temperature: {} for row in rows}

    def learn(result: Result) -> None:
        talk = Conversation(result.prompt, BenchPrompt(()))
        for ids in result.answers:
            texts[result.temperature][talk.seed] = ids
            talk.answers.append(ids)

    for result in results:
        if result.row == FIRST and result.temperature in texts:
            learn(result)
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
            talks = [
                Conversation(*numbered) for numbered in batch if (row.name, row.temperature, numbered[0]) not in done
            ]
            methods.answer(row, talks)
            seconds[row.key] += time.process_time() - started
            for talk in talks:
                result = Result.of(row, talk)
                if row.name == FIRST:
                    learn(result)
                yield result
        times = ", ".join(f"{key} {value:.0f}" for key, value in seconds.items())
        print(
            f"{start + len(batch)} of {len(prompts)} prompts; processor seconds: {times}", file=sys.stderr, flush=True
        )


def interval(results: Sequence[Result]) -> str:
    """Tokens per round of all prompts, and the bounds of 95% of resamples."""
    tokens, rounds = (
        torch.tensor([getattr(result, name) for result in results]).double() for name in ("tokens", "rounds")
    )
    drawn = torch.randint(len(results), (RESAMPLES, len(results)), generator=torch.Generator().manual_seed(0))
    rates = (tokens[drawn].sum(1) / rounds[drawn].sum(1).clamp(min=1)).sort().values.tolist()
    low, high = rates[RESAMPLES // 40], rates[-RESAMPLES // 40 - 1]
    return f"{tokens.sum() / rounds.sum():.2f} ({low:.2f} to {high:.2f})"


def report(results: Iterable[Result], rows: Sequence[Row]) -> None:
    by_row: defaultdict[tuple[str, float], list[Result]] = defaultdict(list)
    texts: defaultdict[tuple[int, float], set[str]] = defaultdict(set)
    for result in results:
        by_row[result.row, result.temperature].append(result)
        texts[result.prompt, result.temperature].add(json.dumps(result.answers))
    categories = sorted({result.category for some in by_row.values() for result in some})
    print(f"| method | temperature | prompts | drafted | tokens per round | {' | '.join(categories)} |")
    print("|---" * (5 + len(categories)) + "|")
    for row in rows:
        own = by_row[row.name, row.temperature]
        if not (rounds := sum(result.rounds for result in own)):
            continue
        cells = []
        for category in categories:
            some = [result for result in own if result.category == category]
            cells.append(f"{sum(result.tokens for result in some) / max(1, sum(result.rounds for result in some)):.2f}")
        drafted = sum(result.drafted for result in own) / rounds
        cells = [row.name, f"{row.temperature:g}", f"{len(own)}", f"{drafted:.1f}", interval(own), *cells]
        print(f"| {' | '.join(cells)} |")
    print(f"prompts with different texts: {sum(len(answers) > 1 for answers in texts.values())} of {len(texts)}")


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
        for result in measure(options, rows, tuple(results)):
            results.append(result)
            print(json.dumps(asdict(result)), file=file, flush=True)
    report(results, rows)


if __name__ == "__main__":
    main()
