"""Published checkpoints: equal to transformers, with sensible answers, and with texts that drafts do not change."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from paceline.core.request import SamplingParams, SpeculationParams
from paceline.engine.start.llm import LLM
from paceline.models.decoder.forward import DecoderModel
from paceline.models.weights.checkpoint import Float32Activations
from paceline.models.weights.gguf import open_gguf
from tests.gateway.process import server_process
from tests.models.paged import PagedRunner, relative_error
from tests.real.conftest import FILES

pytestmark = pytest.mark.real

PROMPTS = [
    "The capital of France is Paris. The capital of Italy is",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was a little girl who",
    "Water boils at a temperature of",
    "import json\n\ndef read_config(path):\n    with open(path) as",
    "The three primary colours are red,",
    "SELECT name, age FROM users WHERE",
    "She opened the door and saw",
]
NEW_TOKENS = 64
TOLERANCE = 1e-3
"""Largest difference of a logit, as a share of the largest logit. The sums of both are in float32, in other orders."""
Model = Callable[[str], Path]


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_those_of_transformers(name: str, model: Model) -> None:
    """Of greedy texts of 8 prompts, in float32: the arg-max of every position, and the distance of all logits."""
    from transformers import AutoModelForCausalLM

    path = model(name)
    checkpoint = open_gguf(path)
    tokenizer = checkpoint.read_tokenizer()
    weights = Float32Activations(checkpoint.weights)
    ours = DecoderModel(checkpoint.config, weights, torch.device("cpu"), torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=name, dtype=torch.float32).eval()
    wrong, compared, furthest = [], 0, 0.0
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode(prompt)])
            text = theirs.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, repetition_penalty=1.0)
            expected = theirs(text).logits[0]
            logits = PagedRunner(ours, num_blocks=64).step({0: text[0].tolist()}).logits
            assert logits is not None
            picks, expected_picks = logits.argmax(-1), expected.argmax(-1)
            wrong += [(prompt, int(at)) for at in (picks != expected_picks).nonzero().flatten()]
            compared, furthest = compared + len(picks), max(furthest, relative_error(logits, expected))
    del theirs, ours
    gc.collect()
    print(f"{name}: {compared - len(wrong)} of {compared} arg-maxes equal, largest relative difference {furthest:.1e}")
    assert compared > 8 * 8
    assert furthest < TOLERANCE
    assert not wrong


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        ("qwen-coder-1.5b.gguf", "What is the capital of Italy? Answer with one word.", "Rome"),
        ("qwen-coder-0.5b.gguf", "Which Python function returns the length of a list? Answer with its name.", "len"),
        ("tinyllama.gguf", "What is the capital of France?", "Paris"),
    ],
)
def test_an_answer_over_http_is_sensible(name: str, question: str, answer: str, model: Model) -> None:
    with (
        server_process(model=str(model(name)), max_model_len=2048, kv_tokens=4096) as process,
        OpenAI(base_url=f"{process.url}/v1", api_key="-") as client,
    ):
        served = client.models.list().data[0].id
        reply = client.chat.completions.create(
            model=served, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=64
        )
    text = reply.choices[0].message.content or ""
    print(f"{name}: {text!r}")
    assert answer.lower() in text.lower()


def test_a_story_continues(model: Model) -> None:
    with LLM(str(model("stories15m.gguf")), draft=None, kv_tokens=1024) as llm:
        (story,) = llm.generate(
            ["Once upon a time, there was a little girl"], SamplingParams(max_tokens=48, temperature=0)
        )
    text = story.text
    print(f"stories15m: {text!r}")
    words = text.split()
    assert len(words) > 20
    assert {"the", "to", "and", "a", "was", "she", "her"} & {word.lower().strip(".,") for word in words}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_do_not_change_a_text(temperature: float, model: Model) -> None:
    """Qwen2.5-Coder 1.5B with the 0.5B as its draft, at a fixed depth, so that every round drafts."""
    target, draft = model("qwen-coder-1.5b.gguf"), model("qwen-coder-0.5b.gguf")
    sampling = SamplingParams(max_tokens=48, temperature=temperature, seed=7)
    options = {"kv_tokens": 4096, "max_model_len": 1024, "speculation": {"depth": "fixed"}}
    with LLM(str(target), draft=str(draft), **options) as llm:
        prompts = PROMPTS[:4]
        drafted = llm.generate(prompts, sampling)
        plain = llm.generate(prompts, sampling, speculation=SpeculationParams(enabled=False))
    assert [answer.completions[0].token_ids for answer in drafted] == [
        answer.completions[0].token_ids for answer in plain
    ]
    accepted = sum(answer.completions[0].speculation.num_accepted_draft_tokens for answer in drafted)
    print(f"temperature {temperature}: {accepted} accepted drafts in {len(prompts)} texts of 48 tokens")
    assert accepted > 0
