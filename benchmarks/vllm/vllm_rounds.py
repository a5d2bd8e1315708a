"""The runs of vllm_plugin.py: which prompts each contender gets, in which order, and the tables of the results."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

Tokens = list[list[int]]

NEW, NEXT, REPEATED = "new prompts", "next turns", "repeated prompts"
WARM_UP = "warm-up"
WITHOUT_LOOKUP = {"plain", "plain_sync", "draft_model", "paceline_plain", "paceline", "paceline_head"}
"""Contenders for which a repeated prompt is like a new one."""


class NotEnoughPrompts(Exception):
    """A prompt would have to serve twice."""


class Run(NamedTuple):
    """One batch of prompts, which all contenders decode in turn."""

    group: str
    index: int
    """Runs of the same group and size before it."""
    prompts: Tokens
    next_turn: "Run | None" = None
    """The same conversations one turn later. A contender decodes it right after this run, while its prefix cache holds the
    prompts."""

    @property
    def turns(self) -> list["Run"]:
        """This run, and its next turn if it has one."""
        return [self] if self.next_turn is None else [self, self.next_turn]

    def includes(self, contender: str) -> bool:
        """Repeated prompts are decoded by contenders that look drafts up, and by one to compare them with."""
        return self.group != REPEATED or contender not in WITHOUT_LOOKUP or contender == "plain_sync"

    def __str__(self) -> str:
        return f"{self.group} {self.index + 1}, {len(self.prompts)} sequences"


def plan(
    sizes: Sequence[int], repeats: int, prompts: Tokens, warm_up: Tokens, has_lookups: bool = True, turn_tokens: int = 0
) -> list[Run]:
    """A warm-up of every size, then runs of new prompts. With lookups, the same prompts follow once more, and a prompt is in
    one size and one `index` only: `suffix` drafts from all texts that a process has decoded. Without them prompts may serve
    again in a later `index`, in other batches.

    With `turn_tokens`, every run has a next turn of that many tokens more, and prefix caching is on: a prompt is in one run
    only, and none is repeated, because its second run would find it in the cache."""
    needed = sum(sizes)
    measured = repeats * needed if has_lookups or turn_tokens else max(sizes, default=0)
    for name, found, wanted in (("measured", len(prompts), measured), ("warm-up", len(warm_up), needed)):
        if found < wanted:
            raise NotEnoughPrompts(
                f"{wanted} {name} prompts are needed and {found} are short enough: give more prompts, or lower --repeats "
                "or --sizes"
            )
    runs = _split(WARM_UP, 0, sizes, warm_up)
    for index in range(repeats):
        some = [prompts[i % len(prompts)] for i in range(index * needed, (index + 1) * needed)]
        runs += _split(NEW, index, sizes, some)
        if has_lookups and not turn_tokens:
            runs += _split(REPEATED, index, sizes, some)
    return _with_next_turns(runs, turn_tokens) if turn_tokens else runs


def _with_next_turns(runs: Sequence[Run], num_tokens: int) -> list[Run]:
    """The runs with next turns: their prompts, each with the first `num_tokens` tokens of the prompts that follow it in the
    plan. All contenders get the same tokens; the answers, which may differ, are not among them."""
    prompts = [ids for run in runs for ids in run.prompts]
    extended = []
    for i, ids in enumerate(prompts):
        others = prompts[i + 1 :] + prompts[: i + 1]
        extended.append([*ids, *islice(chain.from_iterable(cycle(others)), num_tokens)])
    found, result = iter(extended), []
    for run in runs:
        group = WARM_UP if run.group == WARM_UP else NEXT
        result.append(run._replace(next_turn=Run(group, run.index, list(islice(found, len(run.prompts))))))
    return result


def _split(group: str, index: int, sizes: Sequence[int], prompts: Tokens) -> list[Run]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Run(group, index, prompts[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def read_prompts(file: Path, model: str, longest: int) -> Tokens:
    """Token ids of the prompts with at most `longest` tokens, in an order that mixes categories."""
    if file.suffix == ".json":
        found = [list(ids) for ids in json.loads(file.read_text("utf-8"))]
    else:
        from paceline.model_files.tokenizer.chat_template import ChatTemplate
        from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
        from paceline.tools.prompts.prompts import load_prompts

        tokenizer = load_tokenizer(model)
        template = ChatTemplate.of(tokenizer)
        found = []
        for prompt in load_prompts(file):
            messages = [{"role": "user", "content": prompt.turns[0]}]
            found.append(list(tokenizer.encode(template.render(messages), add_special=False)))
    found = [ids for ids in found if len(ids) <= longest]
    random.Random(0).shuffle(found)
    return found


HEADER = (
    "| sequences | contender | tok/s, median | min to max | / plain | / plain_sync | texts that differ | counted |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Outcome(NamedTuple):
    """One run of one contender."""

    group: str
    index: int
    size: int
    contender: str
    seconds: float
    tokens: Tokens
    counted: dict[str, int]
    """Steps, drafted and accepted tokens, microseconds of the plugin, and prompt tokens found in the prefix cache."""

    @classmethod
    def of(cls, run: Run, contender: str, answer: dict[str, Any]) -> "Outcome":
        seconds, tokens, counted = answer["seconds"], answer["tokens"], answer["counted"]
        return cls(run.group, run.index, len(run.prompts), contender, seconds, tokens, counted)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds


def tables(outcomes: Sequence[Outcome]) -> str:
    """A table of each group of prompts. Ratios compare medians. Texts are compared with those of plain_sync, else of plain."""
    parts = []
    for group in (NEW, NEXT, REPEATED):
        keys = list(dict.fromkeys((outcome.size, outcome.contender) for outcome in outcomes if outcome.group == group))
        keys.sort(key=lambda key: key[0])
        rows = [_row(outcomes, group, *key) for key in keys]
        if rows:
            parts.append("\n".join([f"{group[0].upper()}{group[1:]}:\n", HEADER, *rows]))
    return "\n\n".join(parts)


def _row(outcomes: Sequence[Outcome], group: str, size: int, contender: str) -> str:
    own = _select(outcomes, group, size, contender)
    rates = [run.rate for run in own]
    ratios = []
    for base in ("plain", "plain_sync"):
        others = _base(outcomes, own, base)
        ratios.append(f"{median(rates) / median([run.rate for run in others]):.2f}" if others else "")
    texts = _base(outcomes, own, "plain_sync") or _base(outcomes, own, "plain")
    by_index = {run.index: run.tokens for run in texts}
    compared = [run for run in own if run.index in by_index]
    same = [a == b for run in compared for a, b in zip(run.tokens, by_index[run.index], strict=True)]
    differing = f"{same.count(False)} of {len(same)}" if same else ""
    total: Counter[str] = Counter()
    for run in own:
        total.update(run.counted)
    counted = ", ".join(f"{value} {key}" for key, value in total.items())
    spread = f"{min(rates):.0f} to {max(rates):.0f}"
    return f"| {size} | {contender} | {median(rates):.0f} | {spread} | {' | '.join(ratios)} | {differing} | {counted} |"


def _base(outcomes: Sequence[Outcome], own: Sequence[Outcome], base: str) -> list[Outcome]:
    """Runs of `base` with the prompts of `own`: of the same group, or those of new prompts if it repeats none."""
    group, indices = own[0].group, {run.index for run in own}
    found = _select(outcomes, group, own[0].size, base)
    if group == REPEATED and not found:
        found = _select(outcomes, NEW, own[0].size, base)
    return [run for run in found if run.index in indices]


def _select(outcomes: Sequence[Outcome], group: str, size: int, contender: str) -> list[Outcome]:
    return [o for o in outcomes if (o.group, o.size, o.contender) == (group, size, contender)]
