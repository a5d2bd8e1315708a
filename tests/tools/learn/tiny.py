"""A tiny target, its drafts, and samples of its greedy text."""

import random
from pathlib import Path

import torch

from paceline.core.clock import VirtualClock
from paceline.gateway.sessions.samples import LearningSample
from paceline.tools.progress.progress import PlainProgress
from paceline.tools.train.corpus import Script, turn_tokens
from paceline.tools.train.further import DraftTraining, Pacer
from paceline.tools.train.generator import TextGenerator
from paceline.tools.train.plan import Kind, LearnPlan, TrainPlan
from paceline.tools.train.run import make_draft
from paceline.tools.train.saved_draft import save_draft
from paceline.tools.train.target import identity
from paceline.tools.train.text_files import generate_text
from tests.tools.train.tiny import VOCAB, open_tiny, some_states


def save_tiny_draft(folder: Path, model: Path, kind: Kind) -> Path:
    """An untrained draft for the tiny model in `model`."""
    target, tokenizer, _ = open_tiny(model)
    torch.manual_seed(0)
    known = identity(target.name, tokenizer)
    plan = TrainPlan(kind=kind, out=folder, model=str(model), steps=1, layers=1)
    draft, vocabulary = make_draft(plan, target, known, torch.zeros(1, 1, dtype=torch.long))
    draft.calibrate(target, some_states(target, draft.state_layers))
    save_draft(folder, draft, vocabulary, target, known)
    return folder


def make_training(model: Path, **options: object) -> DraftTraining:
    values: dict[str, object] = {
        "server": "http://server", "draft": "draft", "out": Path("out"), "model": str(model), "length": 48, "rows": 8,
        "epochs": 12.0, "learning_rate": 0.1, "share": 1.0,
    }  # fmt: skip
    plan = LearnPlan(**values | options)  # type: ignore[arg-type]
    clock = VirtualClock()
    return DraftTraining(plan, "the command", clock, PlainProgress(clock), Pacer(1.0, clock, clock.advance))


def greedy_samples(model: Path, count: int, seed: int = 0, length: int = 40) -> list[LearningSample]:
    """Samples whose outputs the tiny target generated: their prompts begin alike, as traffic of one kind does."""
    target, tokenizer, _ = open_tiny(model)
    turns = turn_tokens(tokenizer)
    draw = random.Random(seed)
    scripts = [
        Script("chat", (*turns.opening, 65, 66, draw.randrange(97, 100), *turns.to_answer)) for _ in range(count)
    ]
    generator = TextGenerator(target, turns, count, length, seed)
    text = generate_text(generator, scripts, 0.0, lambda done: None)
    found = []
    for row in range(count):
        prompt, ids = len(scripts[row].ids), text.ids[row].tolist()
        found.append(LearningSample(row + 1, tuple(ids[:prompt]), tuple(ids[prompt:]), (), 0, 1, "tenant", "chat"))
    return found


def garbage_samples(count: int, seed: int = 0, length: int = 40) -> list[LearningSample]:
    draw = random.Random(seed)
    rows = [[draw.randrange(VOCAB) for _ in range(length)] for _ in range(count)]
    return [
        LearningSample(i + 1, tuple(ids[:8]), tuple(ids[8:]), (), 0, 1, "tenant", "chat") for i, ids in enumerate(rows)
    ]
