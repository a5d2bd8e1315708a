"""Where a draft is wrong, is the right token its second choice? `python benchmarks/pools_rivals.py`.

The embedded model reads a text of its own making; the draft is the same logits with Gaussian noise, as strong as alpha asks.
Both pick with the same noise, as coupled verification does, and the draft ranks its rivals as a draft worker does.
"""

import argparse
from collections import Counter

import torch

from paceline.core.sampling import SamplingParams
from paceline.models.loading.load import load_model
from paceline.models.runner import ModelRunner, Span
from paceline.runtime.draft_worker.model_core import NUM_ALTERNATIVES, rank
from paceline.speculation.proposers.model_drafter import SequenceParams
from paceline.speculation.verification.distribution import pick
from paceline.speculation.verification.rows import RowContext

PROMPT = "A short history of the bicycle, from the first wooden machines to the racing bikes of today.\n\n"


def text_and_logits(length: int, temperature: float) -> tuple[list[int], torch.Tensor]:
    loaded = load_model("smollm2", torch.device("cpu"), torch.float32)
    runner = ModelRunner(loaded.model, 2 + length // 16)
    ids = list(loaded.tokenizer.encode(PROMPT))
    rows, cached, blocks = [], 0, list(range(runner.num_blocks))
    while len(ids) < length:
        logits = runner.forward([Span(blocks, cached, ids[cached:], 1)]).logits
        assert logits is not None
        cached = len(ids)
        rows.append(logits[0].clone())
        ids.append(int(pick(logits, [RowContext(SamplingParams(temperature=temperature), 1, 0, len(ids), ids, 1)])))
    return ids, torch.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--alpha", type=float, default=0.8)
    args = parser.parse_args()
    print("| temperature | alpha | " + " | ".join(f"rival {r}" for r in range(NUM_ALTERNATIVES)) + " | none of them |")
    print("|---|---:|" + "---:|" * (NUM_ALTERNATIVES + 1))
    for temperature in (0.0, 0.7, 1.0):
        params = SamplingParams(temperature=temperature)
        ids, logits = text_and_logits(args.length, temperature)
        first = len(ids) - len(logits)
        rows = [RowContext(params, 1, 0, first + i, ids, 1) for i in range(len(logits))]
        sequences = [SequenceParams(params, 1, 0, 1, "coupled", "")] * len(rows)
        truth = torch.tensor(ids[first:])
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        low, high = 0.0, 8.0
        for _ in range(12):
            middle = (low + high) / 2
            alpha = (pick(logits + middle * noise, rows) == truth).float().mean().item()
            low, high = (middle, high) if alpha > args.alpha else (low, middle)
        draft = logits + low * noise
        own = pick(draft, rows).tolist()
        ranks: Counter[int | None] = Counter()
        for token, mine, ranked in zip(truth.tolist(), own, rank(draft, rows, sequences), strict=True):
            if token != mine:
                rivals = [rival for rival in ranked if rival != mine][:NUM_ALTERNATIVES]
                ranks[rivals.index(token) if token in rivals else None] += 1
        total = sum(ranks.values())
        shares = " | ".join(f"{ranks[r] / total:.2f}" for r in (*range(NUM_ALTERNATIVES), None))
        print(f"| {temperature} | {1 - total / len(own):.2f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
