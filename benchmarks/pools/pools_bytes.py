"""Bytes on the wire per sequence and round, both directions, at depth 7: `python benchmarks/pools/pools_bytes.py`.

Encoded `Advance` and `Drafts` messages of a round, shared by a batch of sequences. Drafts are sampled from the
embedded model at temperature 1.0. *Sent ahead* counts the bytes of a worker that sends branches before the
verification ends: rounds whose outcome was not among the branches, and rounds whose draft had been sent.
"""

import argparse
import random
from functools import cache

import torch

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Verification
from paceline.models.drafts.compatibility import Fingerprint
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.runner import ModelRunner
from paceline.runtime.draft_worker import distributions
from paceline.runtime.draft_worker.branches import BranchKey, unpack
from paceline.runtime.draft_worker.core import DraftBranch, DraftedToken
from paceline.runtime.draft_worker.model_core import ModelCore
from paceline.runtime.draft_worker.scheduler import DraftLimits
from paceline.runtime.draft_worker.worker import DraftWorker
from paceline.runtime.wire.messages import (
    TO_DRAFT_WORKER,
    TO_TARGET,
    VERSION,
    Advance,
    Branches,
    Drafts,
    Hello,
    Load,
    Open,
    RoundDraft,
    RoundRequest,
)
from paceline.runtime.wire.transport import Connection, Listener
from paceline.speculation.proposers.model_drafter import SequenceParams

TOKENIZER = Fingerprint("v", "", "", "", None)
PROMPT = "The three most surprising things about the history of the bicycle are"


@cache
def model() -> LoadedModel:
    return load_model("smollm2", torch.device("cpu"), torch.float32)


def embedded() -> tuple[LoadedModel, ModelCore]:
    loaded = model()
    size = loaded.config.vocab_size
    return loaded, ModelCore(ModelRunner(loaded.model, 512), 512, size, size)


def chains(rule: Verification, temperature: float, depth: int, count: int) -> list[list[DraftedToken]]:
    """Drafts of the embedded model after one prompt, with different seeds."""
    loaded, core = embedded()
    ids = loaded.tokenizer.encode(PROMPT)
    branches = [
        DraftBranch(
            i, SequenceParams(SamplingParams(temperature=temperature), i, 0, len(ids), rule, ""), list(ids), len(ids)
        )
        for i in range(count)
    ]
    drawn: list[list[DraftedToken]] = [[] for _ in branches]
    for _ in range(depth):
        for branch, chain, token in zip(branches, drawn, core.step(branches), strict=True):
            assert token is not None
            chain.append(token)
            branch.ids.append(token.token)
    return drawn


def sizes(drawn: list[list[DraftedToken]], depth: int) -> float:
    """Bytes per sequence of one Advance and its Drafts."""
    rng, batch, epoch = random.Random(0), len(drawn), 2**47 + 1
    steps = [RoundRequest(1000 + i, 250, 1800, [rng.randrange(49_152)], depth, 0, depth) for i in range(batch)]
    drafts = []
    for i, chain in enumerate(drawn):
        data = distributions.encode([one.distribution for one in chain if one.distribution is not None])
        drafts.append(RoundDraft(1000 + i, 250, [one.token for one in chain], data, True))
    total = len(TO_DRAFT_WORKER.encode(Advance(epoch, steps)))
    total += len(TO_TARGET.encode(Drafts(epoch, drafts, Load(64, 3, 2000))))
    return total / batch


def far_away(rule: Verification, depth: int, batch: int, is_foreseen: bool, rounds: int = 2) -> float:
    """Bytes of a worker that sends branches ahead. All drafts are accepted; the next token is among the branches if
    `is_foreseen`."""
    loaded, core = embedded()
    size, ids = loaded.config.vocab_size, loaded.tokenizer.encode(PROMPT)
    listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
    worker = DraftWorker("draft-0", core, listener, TOKENIZER, size, DraftLimits(ahead_nodes=32, max_batch=256))
    line = Connection(worker.address, TO_TARGET)
    line.send(Hello(VERSION, 1, TOKENIZER))
    for i in range(batch):
        line.send(Open(worker.epoch, 1000 + i, ids, len(ids), SamplingParams(), i, rule=rule))
    length, counted = len(ids), 0
    steps = [RoundRequest(1000 + i, 1, length, [], depth) for i in range(batch)]
    offered: dict[int, list[int]] = {}
    for round_ in range(1, rounds + 2):
        if round_ == 2:  # the first message opens the sequence
            counted = line.traffic.bytes_sent + line.traffic.bytes_received
        line.send(Advance(worker.epoch, steps, True))
        offered = {step.sequence: offered[step.sequence] for step in steps if step.num_held}
        is_answered = not offered
        sent: dict[int, tuple[BranchKey, list[int]]] = {}
        is_working = True
        # Wait until all branches are drafted and received.
        while is_working or len(offered) < batch or (is_foreseen and len(sent) < batch):
            is_working = worker.run_once(0.01)
            while (message := line.receive(0.001)) is not None:
                if isinstance(message, Drafts):
                    offered.update((one.sequence, one.tokens) for one in message.drafts)
                elif isinstance(message, Branches):
                    for one in message.sequences:
                        sent.update((one.sequence, branch) for branch in unpack(one) if branch[0].accepted == depth)
        length += depth + 1 if round_ > 1 else 0
        steps = []
        for i, tokens in offered.items():
            kept = depth if is_answered else 0
            token = sent[i][0].token if is_foreseen else 40_000 + round_
            steps.append(
                RoundRequest(i, round_ + 1, length, [*tokens[kept:], token], depth, depth if is_foreseen else 0, kept)
            )
            offered[i] = sent[i][1] if is_foreseen else []
    total = line.traffic.bytes_sent + line.traffic.bytes_received - counted
    line.close()
    worker.stop()
    worker.run()
    return total / rounds / batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    vocab = 49_152
    coupled = chains("coupled", 1.0, args.depth, args.batch)
    rejection = chains("rejection", 1.0, args.depth, args.batch)
    print(f"depth {args.depth}, embedded model (vocabulary {vocab}), temperature 1.0, bytes per sequence and round\n")
    print(f"| messages | batch 1 | batch {args.batch} |\n|---|---:|---:|")
    tables: tuple[tuple[Verification, list[list[DraftedToken]]], ...] = (("coupled", coupled), ("rejection", rejection))
    for rule, drawn in tables:
        print(f"| {rule} | {sizes(drawn[:1], args.depth):.0f} | {sizes(drawn, args.depth):.0f} |")
        for foreseen in (False, True) if rule == "coupled" else (False,):  # under rejection nothing is sent ahead
            far = [far_away(rule, args.depth, batch, foreseen) for batch in (1, args.batch)]
            name = f"{rule}, worker drafts ahead{', prediction right' if foreseen else ''}"
            print(f"| {name} | {far[0]:.0f} | {far[1]:.0f} |", flush=True)
    print(f"| dense float32 rows instead | {args.depth * vocab * 4} | {args.depth * vocab * 4} |")


if __name__ == "__main__":
    main()
