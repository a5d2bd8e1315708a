"""What every proposer must pass. `test_coupled.py` and `test_rejection.py` run it; `test_planted_bugs.py` shows it can fail."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from paceline.core.request import Request, SamplingParams
from paceline.engine.engine import Engine
from paceline.models.decoder.forward import DecoderModel
from paceline.models.runner.runner import ModelRunner, Span
from paceline.speculation.distribution.distribution import log_distribution
from paceline.speculation.rows.rows import RowContext
from tests.fakes import Result, request, run, tiny_engine

SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 5, "seed": 2},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 3},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "seed": 4},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {3: 2.0, 7: -100.0}},
    {"temperature": 1.0, "seed": 5, "n": 3},
    {"temperature": 0.8, "seed": 6, "stop_token_ids": (11,)},
    {"temperature": 0.9, "seed": 7, "stop_token_ids": (1, 3, 5, 7, 9, 11), "min_tokens": 8},
)


def mixed_requests(
    count: int, vocab_size: int, seed: int = 0, max_prompt: int = 40, max_tokens: int = 24, **speculation: object
) -> list[Request]:
    """Prompts of different lengths, some sharing a beginning, under every kind of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(max_prompt)]
    requests = []
    for i in range(count):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, max_prompt))]
        prompt = shared[: rng.choice((0, 16, 32))] + own
        sampling: dict[str, Any] = {**SAMPLINGS[i % len(SAMPLINGS)], "max_tokens": rng.randint(1, max_tokens)}
        if "min_tokens" in sampling:
            sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
        requests.append(request(f"r{i}", prompt, speculation, **sampling))
    return requests


def plain_text(model: DecoderModel, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
    """The reference: every request alone, no drafts, no chunks, no shared prefix. It is computed once for each model and
    request, however many proposers are compared with it."""
    known = _PLAIN.setdefault(model, {})
    tokens = {}
    for one in requests:
        key = repr(one)
        if key not in known:
            engine = tiny_engine(model, prefix_caching=False, max_batched_tokens=256)
            known[key] = run(engine, [one]).tokens
        tokens.update({choice: list(ids) for choice, ids in known[key].items()})
    return tokens


_PLAIN: WeakKeyDictionary[DecoderModel, dict[str, dict[tuple[str, int], list[int]]]] = WeakKeyDictionary()
"""Tokens of plain decoding, by model and request."""


def check_identical(
    model: DecoderModel, engine: Engine, requests: Sequence[Request], arrivals: int | None = None
) -> Result:
    """Token for token what plain decoding says."""
    result = run(engine, requests, arrivals=arrivals)
    expected = plain_text(model, requests)
    assert result.tokens == expected
    return result


def joint_law(model: DecoderModel, prompt: Sequence[int], sampling: SamplingParams, length: int) -> np.ndarray:
    """[V] * length: the exact probability of every output of `length` tokens, from plain passes of the target."""
    vocab = model.config.vocab_size
    joint = np.ones((1,))
    for step in range(length):
        paths = list(itertools.product(range(vocab), repeat=step))
        p = torch.stack([next_law(model, [*prompt, *path], len(prompt), sampling) for path in paths])
        joint = (joint[:, None] * p.double().numpy()).reshape(-1)
    return joint


def next_law(model: DecoderModel, ids: list[int], num_prompt: int, sampling: SamplingParams) -> Tensor:
    context = RowContext(sampling, 0, 0, len(ids), ids, num_prompt)
    return log_distribution(next_logits(model, ids).unsqueeze(0), [context])[0].exp()


def next_logits(model: DecoderModel, ids: Sequence[int]) -> Tensor:
    runner = ModelRunner(model, num_blocks=-(-len(ids) // 16))
    logits = runner.forward([Span(range(runner.num_blocks), 0, ids, num_logits=1)]).logits
    assert logits is not None
    return logits[0]


def check_distribution(
    model: DecoderModel,
    make_engine: Callable[[], Engine],
    prompt: Sequence[int],
    sampling: SamplingParams,
    draws: int,
    length: int = 4,
    extra: int = 0,
    level: float = 1e-4,
) -> float:
    """Chi-square of the joint of `length` tokens against the target's own law. Seeds are fixed: it passes always or never."""
    law = joint_law(model, prompt, sampling, length)
    counts = np.zeros_like(law)
    per_request = 100
    requests = [
        request(
            f"r{i}",
            prompt,
            {"verification": "rejection"},
            **{f: getattr(sampling, f) for f in ("temperature", "top_k", "top_p")},
            seed=i,
            n=per_request,
            max_tokens=length + extra,  # a draft never reaches past the end: more room makes deeper rounds
        )
        for i in range(draws // per_request)
    ]
    vocab = model.config.vocab_size
    for tokens in run(make_engine(), requests).tokens.values():
        index = 0
        for token in tokens[:length]:
            index = index * vocab + token
        counts[index] += 1
    assert counts.sum() == draws
    assert counts[law == 0].sum() == 0, "a token outside the truncated support was generated"
    expected = law * draws
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    p_value = float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
    assert p_value > level, f"the joint of {length} tokens is not the target's: p = {p_value:.2e} over {draws} draws"
    return p_value
