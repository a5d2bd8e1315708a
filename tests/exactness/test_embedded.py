"""The embedded model on real prompts. `make test` runs 8 short ones, `make test-slow` 20, `make test-exact` the full matrix."""

import json
from pathlib import Path

import pytest
import torch

from paceline.core.request import Request, SamplingParams
from paceline.kernels.cpu import native
from paceline.kernels.formats.weights import Dense
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import open_checkpoint
from paceline.models.weights.checkpoint import Float32Activations
from paceline.speculation.proposers.suffix import NgramProposer
from tests.exactness.contract import check_contract, differences
from tests.fakes import MixedDepth, Unreliable, draft_model, random_tree, run, tiny_engine

PROMPTS = Path(__file__).parent.parent / "data" / "short_prompts.jsonl"
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.3, "seed": 1},
    "warm": {"temperature": 1.0, "seed": 2},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 3},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.3, "seed": 4},
}


class Noisy:
    """The target's weights with noise on them: a draft that is right about four times in five."""

    def __init__(self, weights, noise):
        self._weights, self._noise = weights, noise
        self.vector, self.names = weights.vector, weights.names

    def matrix(self, name):
        values = self._weights.matrix(name).dequantize()
        if "proj" not in name:
            return Dense(values)
        generator = torch.Generator().manual_seed(len(name))
        return Dense(values + self._noise * values.std() * torch.randn(values.shape, generator=generator))


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def target(checkpoint):
    return DecoderModel(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def draft(checkpoint):
    weights = Noisy(checkpoint.weights, 0.05)
    return DecoderModel(checkpoint.config, weights, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def prompts(checkpoint):
    tokenizer = checkpoint.read_tokenizer()
    template = ChatTemplate.of(tokenizer)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    chats = [template.render([{"role": "user", "content": text}]) for text in texts]
    return [tuple(tokenizer.encode(chat, add_special=False)) for chat in chats]


def engine(model, proposer=None, depth=4, **options):
    options = {"kv_tokens": 8192, "max_model_len": 1024, "max_batched_tokens": 256, **options}
    return tiny_engine(model, proposer, depth, **options)


def requests_for(prompts, tokens, **sampling):
    return [Request(f"p{i}", ids, SamplingParams(max_tokens=tokens, **sampling)) for i, ids in enumerate(prompts)]


def check(model, requests, speculative):
    plain = run(engine(model), requests).tokens
    result = run(speculative, requests)
    assert result.drafted > 0
    check_contract(differences(model, requests, plain, result.tokens), is_bitwise=native.available())
    return result


@pytest.mark.parametrize(
    ("sampling", "count"),
    [("greedy", 8), *(pytest.param(name, 20, marks=pytest.mark.slow) for name in ("greedy", "warm"))],
)
def test_short_prompts(target, draft, prompts, sampling, count):
    requests = requests_for(prompts[:count], 10, **SAMPLINGS[sampling])
    result = check(target, requests, engine(target, draft_model(draft, 512, 256), MixedDepth(5)))
    assert result.accepted / result.drafted > 0.3


def test_short_prompts_with_trees(target, draft, prompts):
    requests = requests_for(prompts[:4], 10, **SAMPLINGS["warm"])
    result = check(target, requests, engine(target, draft_model(draft, 512, 256, branches=8), MixedDepth(8)))
    assert result.accepted > 15


def test_activations_in_float32(checkpoint, draft, prompts):
    weights = Float32Activations(checkpoint.weights)
    model = DecoderModel(checkpoint.config, weights, torch.device("cpu"), torch.float32)
    requests = requests_for(prompts[:4], 8, **SAMPLINGS["greedy"])
    check(model, requests, engine(model, draft_model(draft, 512, 256), MixedDepth(5)))


@pytest.mark.exact
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("depth", [1, 4, 8])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", ["draft_model", "model tree", "ngram", "tree", "unreliable"])
def test_matrix(target, draft, prompts, method, sampling, depth, batch):
    proposers = {
        "draft_model": lambda: draft_model(draft, 512, 256),
        "model tree": lambda: draft_model(draft, 512, 256, branches=8),
        "ngram": lambda: NgramProposer(min_ngram=1),
        "tree": lambda: random_tree(400),
        "unreliable": lambda: Unreliable(draft_model(draft, 512, 256)),
    }
    requests = requests_for(prompts[:8], 24, **SAMPLINGS[sampling])
    check(target, requests, engine(target, proposers[method](), depth, max_num_seqs=batch))


@pytest.mark.exact
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_preemption_and_chunks(target, draft, prompts, sampling):
    requests = requests_for(prompts[2:8], 64, ignore_eos=True, **SAMPLINGS[sampling])
    speculative = engine(target, draft_model(draft, 512, 256), MixedDepth(6), kv_tokens=448, max_batched_tokens=48)
    check(target, requests, speculative)
    assert speculative.scheduler.num_preemptions > 0
