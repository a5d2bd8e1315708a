"""Give a trained draft a smaller vocabulary: its head costs less, and its other weights stay.

    python benchmarks/drafts/trim_draft_vocab.py MODEL DRAFT OUT --prompts FOLDER --keep OTHER_DRAFT [--size 20480]

Ids of DRAFT that OTHER_DRAFT also has come first, then those that are most frequent in the training prompts, the .jsonl files
of FOLDER. The card keeps the scores of the training and says of which vocabulary they are.
"""

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.clock import WallClock
from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from paceline.models.loading.load import open_checkpoint
from paceline.tools.progress.progress import PlainProgress
from paceline.tools.train.card import read_record, write_card
from paceline.tools.train.layers import DraftVocabulary
from paceline.tools.train.saved_draft import load_draft, save_draft
from paceline.tools.train.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--size", type=int, default=20480)
    options = parser.parse_args()

    saved, record = load_draft(options.draft), read_record(options.draft)
    frequency = frequencies(options.model, options.prompts, saved.vocabulary.size)
    vocabulary = trim(saved.vocabulary, load_draft(options.keep).vocabulary, frequency, options.size)
    target = Target(open_checkpoint(options.model), torch.device("cpu"), torch.float32)
    save_draft(options.out, saved.draft, vocabulary, target, saved.config["target"])
    inside = vocabulary.contains(torch.arange(vocabulary.size))
    command = "python benchmarks/drafts/trim_draft_vocab.py MODEL DRAFT OUT --prompts PROMPTS"
    record = replace(
        record,
        command=f"{record.command}\n    {command} --keep {options.keep.name} --size {options.size}",
        draft_vocab=options.size,
        coverage=round(float(frequency[inside].sum() / frequency.sum()), 4),
        scored_vocab=record.draft_vocab,
    )
    write_card(options.out, record, PlainProgress(WallClock()))
    print(f"{options.size} of {record.scored_vocab} ids, {record.coverage:.2%} of the prompts")


def frequencies(model: str, folder: Path, vocab_size: int) -> Tensor:
    """[V]: how often each id occurs in the prompts."""
    tokenizer = load_tokenizer(model)
    found: Counter[int] = Counter()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").rstrip("\n").split("\n"):
            found.update(tokenizer.encode(json.loads(line)["prompt"], add_special=False))
    return torch.tensor([found[i] for i in range(vocab_size)])


def trim(own: DraftVocabulary, kept: DraftVocabulary, frequency: Tensor, size: int) -> DraftVocabulary:
    """`size` ids of `own`: those that `kept` has as well, then the most frequent."""
    if own.ids is None:
        raise SystemExit("the draft has the whole vocabulary of the target: train one with a smaller vocabulary")
    score = frequency[own.ids] + kept.contains(own.ids) * (1 + int(frequency.max()))
    chosen = torch.sort(score, descending=True, stable=True).indices[:size]
    return DraftVocabulary(own.size, own.ids[chosen].sort().values)


if __name__ == "__main__":
    main()
