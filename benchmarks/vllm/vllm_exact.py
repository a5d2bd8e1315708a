"""Texts and heads in vLLM's CPU build, in float32; `make test-vllm` installs it.

    python benchmarks/vllm/vllm_exact.py text --requests 100   # sampled requests with and without drafts: texts that differ
    python benchmarks/vllm/vllm_exact.py engine                # the same requests in our engine
    python benchmarks/vllm/vllm_exact.py head                  # tokens a round of the EAGLE head in both

Run it from the root of the repository: it uses the environment of tests/vllm.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.vllm.environment import ROOT, run_vllm

from paceline.core.request import SamplingParams
from paceline.engine.start.llm import LLM
from paceline.kernels.cpu.eagle_head import TreeRoot
from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from paceline.models.drafts.load import find_draft
from paceline.models.drafts.load import load_draft as load_head
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.loading.load import load_model, open_checkpoint
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.eagle.eagle_trees import EagleTrees, TreeStart
from paceline.tools.inflate.inflate import write_folder
from paceline.tools.train.card import export_head
from paceline.tools.train.evaluate import evaluate
from paceline.tools.train.saved_draft import load_draft
from paceline.tools.train.target import Target
from paceline.tools.train.text_files import Text

MODEL = "smollm2"
HEAD = ROOT / "src" / "paceline" / "drafts" / "smollm2-eagle"
TOPICS = (
    "a fox", "the sea", "numbers from one to thirty", "a recipe for bread", "the moon", "python code that sorts a list",
    "a letter to a friend", "colours", "a poem about rain", "history of Rome",
)  # fmt: skip
TEMPERATURES = (0.7, 1.0, 0.5, 0.0)
DEPTH = 3


def make_requests(count: int, tokens: int) -> list[dict[str, Any]]:
    """Three of four are sampled, some of them with top-p, top-k or a repetition penalty."""
    tokenizer = load_tokenizer(MODEL)
    made: list[dict[str, Any]] = []
    for i in range(count):
        text = f"<|im_start|>user\nWrite about {TOPICS[i % 10]}, version {i}.<|im_end|>\n<|im_start|>assistant\n"
        sampling: dict[str, Any] = {"temperature": TEMPERATURES[i % 4], "seed": i}
        sampling |= {"top_p": 0.9} if i % 3 == 1 else {}
        sampling |= {"top_k": 20} if i % 5 == 2 else {}
        sampling |= {"repetition_penalty": 1.1} if i % 7 == 3 else {}
        made.append({"ids": tokenizer.encode(text), "sampling": {**sampling, "max_tokens": tokens, "ignore_eos": True}})
    return made


def job(folder: Path, requests: list[dict[str, Any]], coupled: bool, **llm: Any) -> dict[str, Any]:
    arguments = {"model": str(folder / "model"), "dtype": "float32", "max_model_len": 512, **llm}
    return {"llm": arguments, "coupled": coupled, "requests": requests}


def compare_texts(folder: Path, requests: list[dict[str, Any]]) -> None:
    plugin = {
        "speculative_config": {
            "method": "custom_class",
            "model": "paceline.vllm.LocalProposer",
            "num_speculative_tokens": 4,
        },
        "additional_config": {"paceline": {"depth": "fixed"}},
    }
    plain = run_vllm(folder, "plain", job(folder, requests, coupled=True))["tokens"]
    drafted = run_vllm(folder, "drafted", job(folder, requests, coupled=True, **plugin))
    differing = sum(a != b for a, b in zip(plain, drafted["tokens"], strict=True))
    print(f"{differing} of {len(plain)} texts differ; {drafted['metrics']}")


def compare_engines(folder: Path, requests: list[dict[str, Any]]) -> None:
    theirs = run_vllm(folder, "plain", job(folder, requests, coupled=True))["tokens"]
    params = [SamplingParams(**request["sampling"]) for request in requests]
    with LLM(MODEL, draft=None, activations="float32", max_model_len=512, max_num_seqs=16) as llm:
        outputs = llm.generate([request["ids"] for request in requests], params)
    ours = [list(output.completions[0].token_ids) for output in outputs]
    print(f"{sum(a != b for a, b in zip(ours, theirs, strict=True))} of {len(ours)} texts differ")


def compare_heads(folder: Path, requests: list[dict[str, Any]]) -> None:
    export_head(HEAD, MODEL, folder / "head")
    drafts = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": DEPTH}
    for request in requests:
        request["sampling"] = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    result = run_vllm(folder, "eagle", job(folder, requests, coupled=False, speculative_config=drafts))
    rounds, accepted = (result["metrics"][f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    print_rounds("vLLM, chains", rounds, accepted)
    prompts, theirs = [request["ids"] for request in requests], result["tokens"]
    run_engine("our engine, chains", prompts, theirs, {"method": "chain"}, proposers={"chain": ChainProposer.load()})
    run_engine("our engine, trees", prompts, theirs, {}, draft=str(HEAD))
    rows = [request["ids"] + tokens for request, tokens in zip(requests, result["tokens"], strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    answer = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (request, row) in enumerate(zip(requests, rows, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        answer[i, len(request["ids"]) : len(row)] = True
    saved = load_draft(HEAD)
    target = Target(open_checkpoint(MODEL), torch.device("cpu"), torch.float32)
    text = Text(ids, answer, ("all",) * len(rows))
    score = evaluate(saved.draft, target, saved.vocabulary, text, depth=DEPTH).chain_overall
    print_rounds("our evaluation, chains", score.rounds, sum(score.accepted))


def run_engine(name: str, prompts: Any, theirs: Any, speculation: dict[str, Any], **options: Any) -> None:
    """Drafts of `DEPTH` nodes in every round of our engine, also in the last one, as in vLLM."""
    speculation |= {"depth": "fixed", "max_depth": DEPTH, "breaker_rounds": 10**6}
    limits = {"draft": None, "activations": "float32", "max_model_len": 512, "max_num_seqs": 16, "audit_fraction": 0.0}
    rounds = accepted = differing = 0
    with LLM(MODEL, device="cpu", speculation=speculation, **limits | options) as llm:
        for prompt, expected in zip(prompts, theirs, strict=True):
            tokens: list[int] = []
            sampling = SamplingParams(temperature=0.0, max_tokens=len(expected) + DEPTH, ignore_eos=True)
            for step in llm.stream(prompt, sampling):
                tokens += step.tokens
                rounds += step.drafted > 0
                accepted += step.accepted
                if len(tokens) >= len(expected):
                    break
            differing += tokens[: len(expected)] != expected
    print_rounds(name, rounds, accepted)
    print(f"  {differing} of {len(prompts)} texts differ from vLLM's")


def print_rounds(name: str, rounds: int, accepted: int) -> None:
    print(f"{name}: {rounds} rounds, {accepted} accepted, {1 + accepted / rounds:.3f} tokens a round")


class Chains(EagleTrees):
    """Trees in which every node has one child, as vLLM drafts."""

    def roots(self, starts: Sequence[TreeStart]) -> tuple[list[TreeRoot], int, int]:
        return super().roots(starts)[0], 1, 1


class ChainProposer(EagleProposer):
    """The shipped head, with the same weights and kernels as the proposer `eagle`."""

    def __init__(self, runner: EagleRunner) -> None:
        super().__init__(runner, max_rows=512)
        assert runner.model.native(runner.cache) is not None  # only the native function asks for `roots`
        self._trees = Chains(runner)

    @classmethod
    def load(cls) -> "ChainProposer":
        folder = find_draft(HEAD)
        assert folder is not None
        head = load_head(folder, load_model(MODEL, activations="float32")).model
        assert isinstance(head, EagleModel)
        return cls(EagleRunner(head, num_blocks=1024, num_lanes=128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("text", "engine", "head"))
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(open_checkpoint(MODEL), folder / "model")
        run = {"text": compare_texts, "engine": compare_engines, "head": compare_heads}[options.what]
        run(folder, make_requests(options.requests, options.tokens))


if __name__ == "__main__":
    main()
