"""Requests at random over two targets and two prefill workers: cancelled, answers lost, a prefill worker stopped in the middle.
No text differs and nothing is held afterwards."""

import random
from dataclasses import replace

import pytest

from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.runtime.wire.stream_messages import PrefillStarted
from tests.engine.harness import engine_of, outputs_of, tokens_of
from tests.runtime.handoff.test_handoffs import Prefiller, Target, all_back, apart
from tests.runtime.target_harness import Heard


def requests(draw: random.Random, count: int) -> list[Request]:
    """Some begin like others, of the same tenant or another."""
    texts = [tuple(draw.randrange(40) for _ in range(230)) for _ in range(3)]
    return [
        Request(
            f"r{i}",
            draw.choice(texts)[: draw.randrange(50, 225)],
            SamplingParams(max_tokens=draw.randrange(1, 16), temperature=float(draw.randrange(2)), seed=i),
            cache_salt=draw.choice(["", "a"]),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_anything_may_happen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.routing.handoff.MOST_PATIENCE", 1.0)
    draw = random.Random(seed)
    targets = [
        Target("t0", engine_of(tokenizer=True, kv_tokens=draw.choice([512, 1024]))),
        Target("t1", engine_of(tokenizer=True)),
    ]
    prefillers = [
        Prefiller("p0", engine_of(tokenizer=True, max_batched_tokens=draw.choice([32, 200]))),
        Prefiller("p1", engine_of(tokenizer=True, kv_tokens=draw.choice([480, 1024]))),
    ]
    losses = iter([True, False] * seed)
    prefillers[0].listener.lose = lambda message: isinstance(message, PrefillStarted) and next(losses, False)  # type: ignore[method-assign]
    asked = requests(draw, 14)
    with apart(*targets, *prefillers) as pool:
        heard = {one.id: Heard(pool, one) for one in asked}
        for one in draw.sample(asked, 3):
            pool.cancel(one.id)
            del heard[one.id]
        if seed % 2:
            next(iter(heard.values())).some()
            prefillers[1].stop()
        said = {name: tokens_of(one.all(), name) for name, one in heard.items()}
        all_back(*targets, prefillers[0])
        assert all(target.engine.imports is not None and not target.engine.imports._landed for target in targets)
    alone = engine_of(tokenizer=True)
    for one in asked:
        if one.id in said:
            assert said[one.id] == tokens_of(outputs_of(alone, replace(one, cache_salt="")), one.id)
