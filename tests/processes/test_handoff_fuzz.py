"""Random requests on two targets and two prefill workers, with cancellations, lost replies and a stopped prefill worker.
The texts must be exact, and no block may be held afterwards."""

import random
from dataclasses import replace

import pytest

from paceline.core.request import Request, SamplingParams
from paceline.engine.hooks.handoff import KvImports
from paceline.wire.gateway_messages import PrefillStarted
from tests.engine.harness import engine_of, outputs_of, tokens_of
from tests.processes.target_harness import StreamReader
from tests.worker.handoff.test_handoffs import PrefillWorker, Target, assert_all_released, split_cluster


def requests(rng: random.Random, count: int) -> list[Request]:
    """Requests of two tenants; some share a prefix."""
    texts = [tuple(rng.randrange(40) for _ in range(230)) for _ in range(3)]
    return [
        Request(
            f"r{i}",
            rng.choice(texts)[: rng.randrange(50, 225)],
            SamplingParams(max_tokens=rng.randrange(1, 16), temperature=float(rng.randrange(2)), seed=i),
            cache_salt=rng.choice(["", "a"]),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_change_no_text(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.policy.routing.handoff.MAX_TIMEOUT", 1.0)
    rng = random.Random(seed)
    targets = [
        Target("t0", engine_of(tokenizer=True, kv_tokens=rng.choice([512, 1024]))),
        Target("t1", engine_of(tokenizer=True)),
    ]
    prefill_workers = [
        PrefillWorker("p0", engine_of(tokenizer=True, max_batched_tokens=rng.choice([32, 200]))),
        PrefillWorker("p1", engine_of(tokenizer=True, kv_tokens=rng.choice([480, 1024]))),
    ]
    losses = iter([True, False] * seed)
    prefill_workers[0].listener.lose = lambda message: isinstance(message, PrefillStarted) and next(losses, False)  # type: ignore[method-assign]
    submitted = requests(rng, 14)
    with split_cluster(*targets, *prefill_workers) as pool:
        outputs = {one.id: StreamReader(pool, one) for one in submitted}
        for one in rng.sample(submitted, 3):
            pool.cancel(one.id)
            del outputs[one.id]
        if seed % 2:
            next(iter(outputs.values())).read()
            prefill_workers[1].stop()
        tokens = {name: tokens_of(one.read_all(), name) for name, one in outputs.items()}
        assert_all_released(*targets, prefill_workers[0])
        assert all(not target.engine.hooks.get(KvImports)._unscheduled for target in targets)
    alone = engine_of(tokenizer=True)
    for one in submitted:
        if one.id in tokens:
            assert tokens[one.id] == tokens_of(outputs_of(alone, replace(one, cache_salt="")), one.id)
