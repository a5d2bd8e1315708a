"""Log-probabilities that are reported while decoding equal, bit for bit, those of one pass that scores the finished text."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.core.output import TokenLogprobs
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.kernels.cpu import native
from paceline.speculation.proposer import Proposer
from tests.exactness.suite import mixed_requests
from tests.exactness.test_coupled import PROPOSERS
from tests.fakes import TINY, MixedDepth, draft_model, request, tiny_engine, tiny_model
from tests.tools.audit.planted import stale_slot

TOP = 3
USED = ("sometimes", "tree", "model tree", "eagle", "medusa", "ngram", "layer_skip", "combined")
Scores = tuple[TokenLogprobs, ...]
Texts = dict[tuple[str, int], tuple[list[int], Scores]]


def texts(engine: Engine, requests: list[Request]) -> Texts:
    """Prompt and output of each choice, and the log-probabilities of its output."""
    found: Texts = {(r.id, c): (list(r.prompt_ids), ()) for r in requests for c in range(r.sampling.n)}
    for one in requests:
        asked = replace(one, sampling=replace(one.sampling, logprobs=TOP))
        engine.add(engine.validate(asked))
    while engine.has_work:
        for output in engine.step():
            ids, scores = found[output.request_id, output.choice]
            assert output.logprobs is not None
            found[output.request_id, output.choice] = [*ids, *output.tokens], (*scores, *output.logprobs)
    return found


def scored(engine: Engine, ids: list[int], count: int) -> Scores:
    """The log-probabilities of the last `count` of these tokens, from a request whose prompt they are."""
    engine.add(engine.validate(request("score", ids, max_tokens=1, temperature=0.0, prompt_logprobs=TOP)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    return scores[len(scores) - count :]


def largest_difference(decoded: Texts, engine: Engine) -> float:
    """Between the log-probabilities of decoding and those of a scoring pass. Infinite if tokens or ranks differ."""
    largest = 0.0
    for ids, scores in decoded.values():
        for mine, theirs in zip(scores, scored(engine, ids, len(scores)), strict=True):
            if mine != theirs:
                gap = abs(mine.logprob - theirs.logprob)
                largest = max(largest, gap or float("inf"))
    return largest


def check(proposer: Callable[[], Proposer] | None, max_tokens: int = 24, **options: Any) -> Engine:
    engine = tiny_engine(tiny_model(), proposer and proposer(), MixedDepth(5), **options)
    decoded = texts(engine, mixed_requests(16, TINY.vocab_size, seed=8, max_tokens=max_tokens))
    for size in (7, 256):  # tokens of a step of the scoring pass
        assert largest_difference(decoded, tiny_engine(tiny_model(), max_batched_tokens=size)) == 0.0
    return engine


@pytest.mark.parametrize("proposer", USED)
def test_they_equal_those_of_a_scoring_pass(proposer: str) -> None:
    if not native.available():
        pytest.skip("the torch reference rounds")
    check(PROPOSERS[proposer])


def test_plain_decoding_preemption_and_small_batches() -> None:
    if not native.available():
        pytest.skip("the torch reference rounds")
    check(None, max_num_seqs=3)
    engine = check(PROPOSERS["sometimes"], max_tokens=80, kv_tokens=16 * 12, max_model_len=160)
    assert engine.scheduler.num_preemptions > 0


def test_64_sampled_texts_in_a_batch_with_drafts() -> None:
    if not native.available():
        pytest.skip("the torch reference rounds")
    engine = tiny_engine(
        tiny_model(), draft_model(tiny_model(perturb=0.2)), 4, max_num_seqs=64, max_batched_tokens=512, kv_tokens=8192
    )
    prompts = [[(i * j + i) % TINY.vocab_size for j in range(1, 5 + i % 23)] for i in range(64)]
    requests = [request(f"r{i}", ids, temperature=0.8, seed=i, max_tokens=24) for i, ids in enumerate(prompts)]
    decoded = texts(engine, requests)
    assert sum(len(scores) for _, scores in decoded.values()) == 64 * 24
    assert largest_difference(decoded, tiny_engine(tiny_model())) == 0.0


def test_a_stale_slot_is_found() -> None:
    engine = tiny_engine(tiny_model(), draft_model(tiny_model(perturb=0.2)), 4)
    requests = [request(f"r{i}", range(i, 20 + i), temperature=0.8, seed=i) for i in range(4)]
    with stale_slot(engine):
        decoded = texts(engine, requests)
    assert largest_difference(decoded, tiny_engine(tiny_model())) > 1e-3


def test_a_last_bit_is_found() -> None:
    decoded = texts(tiny_engine(tiny_model()), [request("r", range(20), temperature=0.8, seed=1)])
    (key, (ids, (first, *rest))), *_ = decoded.items()
    nearest = float(torch.tensor(first.logprob).nextafter(torch.tensor(0.0)))
    decoded[key] = ids, (replace(first, logprob=nearest), *rest)
    assert 0.0 < largest_difference(decoded, tiny_engine(tiny_model())) < 1e-5
