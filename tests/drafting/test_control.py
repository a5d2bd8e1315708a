"""Draft workers that join, leave and fill up while targets run: the text does not change."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from paceline.core.output import StepOutput
from paceline.core.request import Request, SpeculationFlags
from paceline.drafting.control import PoolControl
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.worker import DraftWorker
from paceline.engine.loop import EngineLoop
from paceline.targets.pool import TargetPool
from paceline.wire.gateway_messages import TO_TARGET_WORKER
from paceline.wire.transport import Listener
from paceline.wire.worker_spec import Member
from tests.engine.harness import MODEL, letters, tokens_of
from tests.exactness.suite import mixed_requests, plain_text
from tests.fakes import TINY, tiny_engine, tiny_model
from tests.processes.pools import TOKENIZER, PatientProposer, draft_worker, model_core, never_lose_workers
from tests.processes.target_harness import Gate, Members, StreamReader, WorkerThread, cluster, engine_server, until

REQUESTS = [
    replace(one, sampling=replace(one.sampling, max_tokens=20, ignore_eos=True, seed=one.sampling.seed or 0))
    for one in mixed_requests(8, TINY.vocab_size, max_prompt=20)
]
EXPECTED = plain_text(MODEL, REQUESTS)


@pytest.fixture(autouse=True)
def _workers_are_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    never_lose_workers(monkeypatch)


class Target(WorkerThread):
    """A target worker that drafts with the pool and waits for every draft."""

    def __init__(self, steps: int | None = None) -> None:
        self.proposer = PoolProposer((), TOKENIZER, TINY.vocab_size, name="target-0")
        self.engine = tiny_engine(MODEL, PatientProposer(self.proposer, 1.0), max_num_seqs=16, tokenizer=letters())
        self.gate = None if steps is None else Gate(self.engine, steps)
        loop = EngineLoop(self.engine)
        self.listener = Listener("tcp://127.0.0.1:0", TO_TARGET_WORKER)  # type: ignore[assignment]
        self.worker = engine_server("target-0", loop, self.listener, drafts=PoolControl(self.proposer, loop))
        self._start()


@contextmanager
def served(target: Target, *drafts: DraftWorker) -> Iterator[tuple[TargetPool, Members]]:
    members = Members(target)
    members.known += [draft_member(draft) for draft in drafts]
    pool = TargetPool(cluster(), members)
    try:
        until(lambda: states(pool) == {"target-0": "ready"} | {draft.name: "ready" for draft in drafts})
        yield pool, members
    finally:
        pool.close()
        target.stop()


def draft_member(draft: DraftWorker) -> Member:
    return Member(draft.name, "draft", "draft", draft.address)


def states(pool: TargetPool) -> dict[str, str]:
    return {worker.name: worker.state for worker in pool.workers()}


def texts(outputs: list[StepOutput], asked: list[Request] = REQUESTS) -> dict[tuple[str, int], list[int]]:
    return {(one.id, i): tokens_of(outputs, one.id, i) for one in asked for i in range(one.sampling.n)}


def test_draft_workers_join_and_leave() -> None:
    core = model_core(tiny_model(perturb=0.1))
    target = Target(steps=4)
    with (
        draft_worker(core, TINY.vocab_size) as first,
        draft_worker(model_core(tiny_model(perturb=0.1)), TINY.vocab_size, name="draft-1") as second,
        served(target, first) as (pool, members),
    ):
        reader = StreamReader(pool, *REQUESTS)
        assert target.gate is not None
        assert target.gate.reached.wait(20)
        members.known[1:] = [draft_member(second)]
        until(lambda: [drafter.name for drafter in pool._targets._worker_lists[""].drafts] == ["draft-1"])
        target.gate.open()
        assert texts(reader.read_all()) == EXPECTED
        until(lambda: states(pool) == {"target-0": "ready", "draft-1": "ready"})
        until(lambda: not first._scheduler.targets)  # it received a goodbye
        again = StreamReader(pool, *[replace(one, id=f"{one.id}-again") for one in REQUESTS]).read_all()
        assert sum(output.accepted for output in again) > 0
        assert second.status().rounds > 0


def test_speculation_enabled_under_load_is_answered_with_busy() -> None:
    """The draft pool has room for three sequences. Ten are running when speculation is enabled."""
    core = model_core(tiny_model(perturb=0.1), num_blocks=12)
    target = Target(steps=4)
    with (
        draft_worker(core, TINY.vocab_size, DraftLimits(max_sequences=3, max_tokens=12 * 16)) as draft,
        served(target, draft) as (pool, _),
    ):
        pool.set_flags(SpeculationFlags(enabled=False))
        until(lambda: target.engine.speculator.enabled is False)
        reader = StreamReader(pool, *REQUESTS)
        assert target.gate is not None
        assert target.gate.reached.wait(20)
        assert draft.status().sequences == 0
        pool.set_flags(SpeculationFlags(enabled=True))
        until(lambda: pool._targets._flags == SpeculationFlags(enabled=True))
        target.gate.open()
        outputs = reader.read_all()
        assert texts(outputs) == EXPECTED
        assert sum(output.accepted for output in outputs) > 0
        assert target.proposer.connections[0].counters.busy > 0
        until(lambda: draft.status().sequences == 0)
        assert core.num_free_blocks == 12


def test_draft_that_does_not_fit_is_refused_and_the_target_goes_on() -> None:
    target = Target()
    other = replace(TOKENIZER, vocabulary="another one")
    with (
        draft_worker(model_core(tiny_model()), TINY.vocab_size, tokenizer=other) as wrong,
        draft_worker(model_core(tiny_model()), TINY.vocab_size, name="draft-1") as right,
        served(target) as (pool, members),
    ):
        members.known.append(draft_member(wrong))
        until(lambda: states(pool).get("draft-0") == "refused")
        refusal = next(worker.refusal for worker in pool.workers() if worker.name == "draft-0")
        expected = f"sha256 of the target's {TOKENIZER.vocabulary}, of the draft's another one"
        assert refusal == f"target and draft differ in their vocabulary: {expected}"
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert wrong.status().rounds == 0
        members.known.append(draft_member(right))
        until(lambda: states(pool).get("draft-1") == "ready")
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert (wrong.status().rounds, states(pool)["draft-0"]) == (0, "refused")
        assert right.status().rounds > 0


def test_draft_with_another_chat_template_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    target = Target()
    other = replace(TOKENIZER, chat_template="another one")
    with (
        draft_worker(model_core(tiny_model()), TINY.vocab_size, tokenizer=other) as draft,
        served(target) as (pool, members),
    ):
        members.known.append(draft_member(draft))
        until(lambda: states(pool).get("draft-0") == "ready")
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert draft.status().rounds > 0
    assert sum("differ in their chat template" in message for message in caplog.messages) == 1
