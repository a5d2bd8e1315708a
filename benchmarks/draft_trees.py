"""Chains and trees of a draft model, side by side through the engine: tokens per round, or tokens per second.

    python benchmarks/draft_trees.py PROMPTS.jsonl [--each 2] [--tokens 96] [--nodes 4 8 16] [--temperature 0] [--noise 0]
        [--draft smollm2-distilled] [--model smollm2] [--threads 2] [--pool]
    python benchmarks/draft_trees.py PROMPTS.jsonl --speed --nodes 0 4 [--max-depth 8] …

The first turn of `--each` prompts of every category is answered, one request at a time, once with chains and once with trees
of as many nodes. `--noise` adds noise to the matrices of the draft, in standard deviations of each. Intervals hold 95% of 2,000
resamples of the prompts; those of *tree / chain* resample pairs. With `--nodes 0` the rule `goodput` decides how many nodes are
drafted. With `--speed` plain decoding is a third row. The prompts alternate between the rows. With `--pool` a draft worker
drafts, in the same process; the target waits for every draft, so that tokens per second say nothing. The texts of all rows are
compared.
"""

import argparse
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

import paceline
from paceline.bench.prompts import load_prompts
from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.models.drafts.compatibility import Fingerprint
from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.runtime.draft_pool.connection import DraftAddress
from paceline.runtime.draft_pool.proposer import PoolProposer
from paceline.runtime.draft_worker.model_core import ModelCore
from paceline.runtime.draft_worker.worker import DraftWorker
from paceline.runtime.wire.messages import TO_DRAFT_WORKER
from paceline.runtime.wire.transport import Listener
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress
from paceline.speculation.proposers.draft_model import DraftModelProposer

Shape = Literal["plain", "chain", "tree"]
RESAMPLES = 2_000


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    """Steps after the one with the first token."""
    drafted: int = 0
    seconds: float = 0.0
    """Time of those rounds."""


class PatientPool:
    """A pool of one draft worker, on a thread, whose drafts are waited for."""

    def __init__(self, core: ModelCore, vocab_size: int, trees: bool) -> None:
        tokenizer = Fingerprint("vocabulary", "merges", "special", "stop", "template")
        listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
        worker = DraftWorker("draft-0", core, listener, tokenizer, vocab_size)
        threading.Thread(target=worker.run, daemon=True).start()
        address = DraftAddress("draft-0", worker.address)
        self._pool = PoolProposer([address], tokenizer, vocab_size, verifies_trees=trees)
        self.traits = self._pool.traits

    def observe(self, batch: Sequence[Progress]) -> None:
        self._pool.observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        return self._pool.collect(sequence_ids, WallClock().now() + 5.0)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._pool.close(sequence_ids)


def noisy_copy(draft: str, noise: float, folder: Path) -> str:
    """The draft with noise on its matrices."""
    source = Path(paceline.__file__).parent / "drafts" / draft
    source = source if source.is_dir() else Path(draft)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(source / "model.safetensors")
    for name, values in weights.items():
        if values.dim() == 2 and values.is_floating_point():
            drawn = torch.randn(values.shape, generator=generator)
            weights[name] = (values.float() + noise * values.float().std() * drawn).to(values.dtype)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def engine_for(options: argparse.Namespace, draft: str, shape: Shape, nodes: int | None) -> Engine:
    """`nodes`: of every draft; None: `goodput` decides."""
    speculation = SpeculationConfig(
        method="draft_model",
        enabled=shape != "plain",
        depth="goodput" if nodes is None else "fixed",
        max_depth=nodes or options.max_depth,
        breaker_rounds=10**9,
    )
    engine = build_engine(
        EngineConfig(
            model=options.model,
            draft=draft,
            device="cpu",
            max_num_seqs=1,
            max_model_len=options.window,
            speculation=speculation,
        )
    )
    proposers = engine.speculator.proposers
    assert isinstance(proposers, dict)
    tree = proposers["draft_model"]
    assert isinstance(tree, DraftModelProposer)
    drafter = tree.drafter
    sizes = drafter.max_rows, drafter.num_proposable, drafter.vocab_size
    if options.pool:
        proposers["draft_model"] = PatientPool(ModelCore(drafter.runner, *sizes), drafter.vocab_size, shape == "tree")
    elif shape == "chain":
        proposers["draft_model"] = DraftModelProposer(drafter.runner, *sizes, max_gap=tree.max_gap)
    return engine


def answer(engine: Engine, number: int, ids: tuple[int, ...], options: argparse.Namespace) -> Answer:
    sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=number)
    engine.add(Request(f"r{number}", ids, sampling))
    found, started = Answer(), 0.0
    while engine.has_work:
        for output in engine.step():
            if not found.tokens:
                started = time.perf_counter()
            else:
                found.rounds += 1
                found.drafted += output.drafted
            found.tokens.extend(output.tokens)
    found.seconds = time.perf_counter() - started
    return found


def interval(count: int, figure: Callable[[Sequence[int]], float]) -> str:
    """`figure` of all prompts, and the bounds of 95% of resamples."""
    rng = random.Random(0)
    drawn = sorted(figure([rng.randrange(count) for _ in range(count)]) for _ in range(RESAMPLES))
    low, high = drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40 - 1]
    return f"{figure(range(count)):6.2f} ({low:.2f} to {high:.2f})"


def compare(
    options: argparse.Namespace,
    draft: str,
    prompts: Sequence[tuple[int, ...]],
    shapes: Sequence[Shape],
    nodes: int | None,
) -> None:
    engines = {shape: engine_for(options, draft, shape, nodes) for shape in shapes}
    answers: dict[Shape, list[Answer]] = {shape: [] for shape in shapes}
    for number, ids in enumerate(prompts):
        for shape in shapes:
            answers[shape].append(answer(engines[shape], number, ids, options))
    kept = [i for i in range(len(prompts)) if all(answers[shape][i].rounds for shape in shapes)]

    def rate(shape: Shape, chosen: Sequence[int], by_time: bool) -> float:
        some = [answers[shape][kept[i]] for i in chosen]
        done = sum(len(one.tokens) - 1 for one in some)
        return done / sum(one.seconds if by_time else one.rounds for one in some)

    for shape in shapes:
        cost = sum(one.drafted for one in answers[shape]) / sum(one.rounds for one in answers[shape])
        rounds = interval(len(kept), lambda chosen, shape=shape: rate(shape, chosen, False))  # type: ignore[misc]
        speed = interval(len(kept), lambda chosen, shape=shape: rate(shape, chosen, True))  # type: ignore[misc]
        print(f"{nodes or 'goodput'!s:8} {shape:6} {cost:8.2f}  {rounds:24}  {speed}", flush=True)
    for by_time, what in ((False, "tokens/round"), (True, "tokens/s")):
        ratio = interval(len(kept), lambda c, t=by_time: rate("tree", c, t) / rate("chain", c, t))  # type: ignore[misc]
        print(f"{'':8} tree / chain, {what}: {ratio}", flush=True)
    texts = [{tuple(answers[shape][i].tokens) for shape in shapes} for i in range(len(prompts))]
    print(f"{'':8} texts that differ: {sum(len(one) > 1 for one in texts)} of {len(texts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--draft", default="smollm2-distilled")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--pool", action="store_true")
    parser.add_argument("--max-depth", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept: dict[str, list[str]] = {}
    for prompt in load_prompts(options.prompts):
        if len(same := kept.setdefault(prompt.category, [])) < options.each:
            same.append(prompt.turns[0])
    with tempfile.TemporaryDirectory() as folder:
        draft = noisy_copy(options.draft, options.noise, Path(folder) / "noisy") if options.noise else options.draft
        tokenizer = engine_for(options, draft, "tree", 1).tokenizer
        assert tokenizer is not None
        template = ChatTemplate.of(tokenizer)
        texts = [template.render([{"role": "user", "content": text}]) for same in kept.values() for text in same]
        ids = [tuple(tokenizer.encode(text, add_special=False)) for text in texts]
        prompts = [one[-(options.window - options.tokens - 1) :] for one in ids]
        what = (
            f"{len(prompts)} prompts, {options.tokens} tokens, temperature {options.temperature}, noise {options.noise}"
        )
        print(f"{what}\n{'nodes':8} {'shape':6} {'drafted':>8}  {'tokens per round':24}  tokens per second", flush=True)
        shapes: tuple[Shape, ...] = ("plain", "chain", "tree") if options.speed else ("chain", "tree")
        for nodes in options.nodes:
            compare(options, draft, prompts, shapes, nodes or None)


if __name__ == "__main__":
    main()
