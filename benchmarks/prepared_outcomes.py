"""Share of verifications whose outcome a draft worker has prepared: `python benchmarks/prepared_outcomes.py`.

The target generates texts without drafts. Then a draft worker's scheduler and core draft for all texts of a temperature at once
under coupled verification, round after round; prepared branches are counted, not drafted. *By average*: planned with the
average acceptance of each position. *By gap*: planned as a draft worker does. Both plan the same rounds. Full acceptance with
the draft's own next token counts as prepared. `--noise`: the draft is the target with Gaussian noise on its logits, in place of
`--draft`.
"""

import argparse
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.sampling import SamplingParams
from paceline.models.drafts.load import find_draft, load_draft
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.runner import ModelRunner, Span
from paceline.runtime.draft_worker.core import DraftBranch, DraftedToken
from paceline.runtime.draft_worker.model_core import ModelCore
from paceline.runtime.draft_worker.scheduler import DraftLimits, DraftScheduler, TargetSession
from paceline.runtime.wire.messages import Open, RoundRequest
from paceline.speculation.verification.distribution import pick
from paceline.speculation.verification.rows import RowContext

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {
    "history": "A short history of the bicycle, from the first wooden machines to the racing bikes of today.\n\n",
    "code": 'def parse_csv(path: str) -> list[dict[str, str]]:\n    """Read a CSV file with a header; return its rows."""\n',
    "story": "Once upon a time, in a small village by the sea, there lived a clockmaker who",
    "advice": CHAT.format("How do I keep tomatoes healthy on a balcony?"),
    "maths": CHAT.format("A train travels 120 km in 1.5 hours, then 80 km in 1 hour. What is its mean speed?"),
    "list": "Ten facts about the planets of the solar system:\n\n1. Mercury",
    "letter": "Dear Dr. Ahmed,\n\nThank you for your letter about the water supply of the school. I am writing to",
    "recipe": CHAT.format("Give me a recipe for lentil soup."),
}


@dataclass(slots=True)
class Text:
    name: str
    sampling: SamplingParams
    seed: int
    ids: list[int]
    num_prompt: int


@dataclass(slots=True)
class Score:
    """Rounds of one temperature, by text; prepared outcomes by text, number of branches and whether gaps were used."""

    rounds: Counter[str] = field(default_factory=Counter)
    prepared: Counter[tuple[str, int, bool]] = field(default_factory=Counter)
    accepted: int = 0
    tested: int = 0

    def share(self, branches: int, by_gap: bool) -> float:
        prepared = sum(self.prepared[name, branches, by_gap] for name in self.rounds)
        return prepared / self.rounds.total()


class NoisyCore(ModelCore):
    """Adds noise to the logits, keyed by the text; without effect for `noise` 0."""

    def __init__(self, draft: LoadedModel, num_blocks: int, noise: float) -> None:
        size = draft.config.vocab_size
        super().__init__(ModelRunner(draft.model, num_blocks), 8192, size, size)
        self._noise = noise

    def _choose(self, logits: torch.Tensor, branches: Sequence[DraftBranch]) -> list[DraftedToken]:
        if self._noise:
            logits = logits + self._noise * torch.stack([_noise(branch.ids, logits.shape[1]) for branch in branches])
        return super()._choose(logits, branches)


def _noise(ids: Sequence[int], size: int) -> torch.Tensor:
    seed = zlib.crc32(array("q", ids).tobytes())
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def generate(target: LoadedModel, length: int, temperatures: Sequence[float]) -> list[Text]:
    texts = []
    for temperature in temperatures:
        for seed, (name, prompt) in enumerate(PROMPTS.items()):
            ids = list(target.tokenizer.encode(prompt))
            texts.append(Text(name, SamplingParams(temperature=temperature), seed, ids, len(ids)))
    per_text = 1 + (length + max(text.num_prompt for text in texts)) // 16
    runner = ModelRunner(target.model, per_text * len(texts))
    tables = [list(range(i * per_text, (i + 1) * per_text)) for i in range(len(texts))]
    cached = [0] * len(texts)
    for _ in range(length):
        spans = [Span(table, n, text.ids[n:], 1) for table, n, text in zip(tables, cached, texts, strict=True)]
        logits = runner.forward(spans).logits
        assert logits is not None
        rows = [RowContext(text.sampling, text.seed, 0, len(text.ids), text.ids, text.num_prompt) for text in texts]
        cached = [len(text.ids) for text in texts]
        for text, token in zip(texts, pick(logits, rows).tolist(), strict=True):
            text.ids.append(token)
    return texts


def replay(texts: Sequence[Text], core: ModelCore, depth: int, budgets: Sequence[int]) -> Score:
    """Draft for all texts, and let each round commit what their target has chosen."""
    score, target = Score(), TargetSession("target", 0.0)
    limits = DraftLimits(ahead_nodes=(max(budgets) + 1) * depth, max_batch=len(texts))
    scheduler = DraftScheduler(core, core.drafter.vocab_size, limits)
    scheduler.targets[b"target"] = target
    for i, text in enumerate(texts):
        opened = Open(0, i, text.ids[: text.num_prompt + 1], text.num_prompt, text.sampling, text.seed)
        if error := scheduler.open(target, opened):
            raise SystemExit(error)
    committed: dict[int, list[int]] = {i: [] for i in range(len(texts))}
    number = 0
    while committed:
        number += 1
        states = [target.sequences[i] for i in committed]
        for i, tokens in committed.items():
            request = RoundRequest(i, number, target.sequences[i].length, tokens, depth)
            if error := scheduler.start_round(target, request):
                raise SystemExit(str(error))
        while not all(state.is_due for state in states):
            run_pass(scheduler.schedule(), core)
        plans = []
        for state in states:
            state.mark_answered()
            gaps = [drafted.gap for drafted in state.draft]
            # Without gaps the scheduler plans by averages
            plans.append([scheduler.plan(depth, depth, True, gaps), scheduler.plan(depth, depth, True, ())])
        run_pass([state.branches[0] for state in states], core)
        for (i, state), plan in zip(list(zip(list(committed), states, strict=True)), plans, strict=True):
            text, chain = texts[i], state.branches[0].chain
            right = text.ids[state.length : state.length + depth + 1]
            if len(right) <= depth:
                scheduler.close(target, [i])
                del committed[i]
                continue
            accepted = next((n for n in range(depth + 1) if chain[n].token != right[n]), depth + 1)
            committed[i] = right[: accepted + 1]  # all of it if the bonus token is right too
            score.accepted += min(accepted, depth)
            score.tested += min(depth, accepted + 1)
            score.rounds[text.name] += 1
            for branches in budgets:
                for by_gap, outcomes in zip((True, False), plan, strict=True):
                    found = accepted > depth or right[accepted] in {
                        alternative
                        for outcome in outcomes[:branches]
                        if outcome.accepted == accepted
                        for alternative in chain[accepted].alternatives[outcome.alternative :][:1]
                    }
                    score.prepared[text.name, branches, by_gap] += found
    return score


def run_pass(branches: Sequence[DraftBranch], core: ModelCore) -> None:
    for branch, drafted in zip(branches, core.step(branches), strict=True):
        branch.append(drafted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2-distilled")
    parser.add_argument("--noise", type=float, default=0.0, help="deviation of the noise on the target's logits")
    parser.add_argument("--length", type=int, default=160, help="tokens of each text")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--branches", type=int, nargs="+", default=[5, 11], help="outcomes prepared per round")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    args = parser.parse_args()
    target = load_model(args.target, torch.device("cpu"), torch.float32)
    folder = find_draft(args.draft)
    draft = target
    if not args.noise and folder is not None:
        loaded = load_draft(folder, target)
        if not isinstance(loaded, LoadedModel):
            raise SystemExit(f"{args.draft} is not a draft of a draft worker: choose a distilled one")
        draft = loaded
    texts = generate(target, args.length, args.temperatures)
    print("| temperature | alpha | rounds | branches | by average | by gap | texts with more / fewer prepared |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for temperature in args.temperatures:
        chosen = [text for text in texts if text.sampling.temperature == temperature]
        num_blocks = sum(2 + (len(text.ids) + args.depth) // 16 for text in chosen)
        score = replay(chosen, NoisyCore(draft, num_blocks, args.noise), args.depth, args.branches)
        alpha, rounds = score.accepted / score.tested, score.rounds.total()
        for branches in args.branches:
            changes = [score.prepared[name, branches, True] - score.prepared[name, branches, False] for name in PROMPTS]
            more, fewer = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
            shares = f"{score.share(branches, False):.3f} | {score.share(branches, True):.3f}"
            print(f"| {temperature} | {alpha:.2f} | {rounds} | {branches} | {shares} | {more} / {fewer} |", flush=True)


if __name__ == "__main__":
    main()
