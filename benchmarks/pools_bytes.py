"""Bytes on the wire per sequence and round, both directions, at depth 7: `python benchmarks/pools_bytes.py`.

Real messages of a real round as the codecs write them: `Advance` + `Drafts`, shared over a batch of sequences. Drafts for
rejection come from the embedded model's own distributions at temperature 1.0.
"""

import argparse
import random

import torch

from paceline.core.sampling import SamplingParams
from paceline.models.load import load_model
from paceline.models.runner import ModelRunner
from paceline.runtime import laws
from paceline.runtime.draft_core import Drawn, Facts, Ride
from paceline.runtime.messages import (
    TO_DRAFT_WORKER,
    TO_TARGET,
    Advance,
    Ahead,
    Branch,
    Branches,
    Drafted,
    Drafts,
    Load,
    Step,
)
from paceline.runtime.model_core import ModelCore

PROMPT = "The three most surprising things about the history of the bicycle are"


def chains(rule: str, temperature: float, depth: int, count: int) -> list[list[Drawn]]:
    """Drafts of the embedded model after one prompt, another seed each."""
    loaded = load_model("smollm2", torch.device("cpu"), torch.float32)
    size = loaded.config.vocab_size
    core = ModelCore(ModelRunner(loaded.model, 64), 512, size, size)
    ids = loaded.tokenizer.encode(PROMPT)
    rides = [
        Ride(i, Facts(SamplingParams(temperature=temperature), i, 0, len(ids), rule, ""), list(ids), len(ids))
        for i in range(count)
    ]
    drawn: list[list[Drawn]] = [[] for _ in rides]
    for _ in range(depth):
        for ride, chain, token in zip(rides, drawn, core.step(rides), strict=True):
            assert token is not None
            chain.append(token)
            ride.ids.append(token.token)
    return drawn


def sizes(drawn: list[list[Drawn]], depth: int, branches: int = 0) -> float:
    """Bytes per sequence of one Advance, its Drafts, and `branches` sent ahead."""
    rng, batch, epoch = random.Random(0), len(drawn), 2**47 + 1
    committed = [[rng.randrange(49_152) for _ in range(depth + 1)] for _ in drawn]  # the worst: all accepted
    steps = [Step(1000 + i, 250, 1800, tokens, depth) for i, tokens in enumerate(committed)]
    drafts = []
    for i, chain in enumerate(drawn):
        data = laws.encode([one.law for one in chain if one.law is not None])
        drafts.append(Drafted(1000 + i, 250, [one.token for one in chain], data, True))
    total = len(TO_DRAFT_WORKER.encode(Advance(epoch, steps, branches > 0)))
    total += len(TO_TARGET.encode(Drafts(epoch, drafts, Load(64, 3, 2000))))
    if branches:
        ahead = [
            Ahead(d.sequence, 250, [Branch(j % (depth + 1), 40_000 + j, d.tokens, d.laws) for j in range(branches)])
            for d in drafts
        ]
        total += len(TO_TARGET.encode(Branches(epoch, ahead)))
    return total / batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    vocab = 49_152
    coupled = chains("coupled", 1.0, args.depth, args.batch)
    rejection = chains("rejection", 1.0, args.depth, args.batch)
    print(f"depth {args.depth}, embedded model (vocabulary {vocab}), temperature 1.0, bytes per sequence and round\n")
    print(f"| what | batch 1 | batch {args.batch} |\n|---|---:|---:|")
    for name, drawn, branches in (
        ("coupled", coupled, 0),
        ("coupled, 3 branches sent ahead", coupled, 3),
        ("rejection", rejection, 0),
        ("rejection, 3 branches sent ahead", rejection, 3),
    ):
        print(f"| {name} | {sizes(drawn[:1], args.depth, branches):.0f} | {sizes(drawn, args.depth, branches):.0f} |")
    print(f"| dense float32 rows instead | {args.depth * vocab * 4} | {args.depth * vocab * 4} |")


if __name__ == "__main__":
    main()
