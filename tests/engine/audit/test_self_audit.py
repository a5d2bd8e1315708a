"""Self-audit: an engine checks its own texts while it serves and while it is idle."""

import logging
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import EngineConfig
from paceline.core.request import Request, SamplingParams
from paceline.core.status import AuditCounts
from paceline.engine import loop as loop_module
from paceline.engine.audit.rescoring import Rescored
from paceline.engine.audit.self_audit import BUSY_SHARE, MAX_PENDING, MAX_TRIES, ROWS, BusyShare, SelfAudit, _Watched
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.engine.scheduler import Scheduler
from paceline.engine.start.build import build_engine
from paceline.kv.block_tables import BlockTables
from paceline.models.runner.runner import ModelRunner
from paceline.speculation.distribution.distribution import log_distribution
from paceline.speculation.rows.rows import RowContext
from tests.engine.harness import PROMPT, SAMPLED, engine_of, outputs_of, tokens_of
from tests.engine.harness import request as seeded
from tests.engine.start.test_build import save_checkpoint
from tests.engine.test_endings import SCHEMA
from tests.engine.test_loop import Inbox
from tests.exactness.suite import mixed_requests
from tests.fakes import TINY, draft_model, request, run, tiny_engine, tiny_model
from tests.tools.audit.planted import stale_slot, verification_ignores_the_temperature

MODEL = tiny_model()


def engine(fraction: float = 1.0, **options: Any) -> Engine:
    return tiny_engine(MODEL, draft_model(tiny_model(perturb=0.1)), audit_fraction=fraction, **options)


def idle(subject: Engine) -> AuditCounts:
    """Run the idle work of the engine to its end."""
    while subject.hooks.has_idle_work:
        subject.hooks.use_idle_time()
    pool = subject.scheduler.tables.pool
    pool.check()
    assert pool.num_free == pool.num_blocks
    return subject.status.snapshot().audit


def requests(count: int, rule: str = "coupled", **sampling: Any) -> list[Request]:
    sampling = {"temperature": 0.5, "max_tokens": 20, **sampling}
    return [
        request(f"r{i}", [(i + j) % TINY.vocab_size for j in range(20)], {"verification": rule}, seed=i, **sampling)
        for i in range(count)
    ]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_correct_texts_show_no_drift(rule: str) -> None:
    subject = engine()
    batch = mixed_requests(MAX_PENDING, TINY.vocab_size, verification=rule)
    batch = [replace(one, sampling=replace(one.sampling, n=1)) for one in batch]
    tokens = run(subject, batch).tokens
    counts = idle(subject)
    assert (counts.audited, counts.drifted, counts.texts) == (sum(map(len, tokens.values())), 0, MAX_PENDING)
    assert subject.status.snapshot().audit.symptoms == ()


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("plant", [verification_ignores_the_temperature, stale_slot])
def test_drift_is_counted_and_logged(rule: str, plant: Any, caplog: pytest.LogCaptureFixture) -> None:
    subject = engine()
    with plant(subject):
        run(subject, requests(4, rule))
    counts = idle(subject)
    assert counts.audited == 80
    assert 4 <= counts.drifted <= 80
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any("drift: the text of request r" in line for line in lines)
    assert len(counts.findings) >= 1
    for finding in counts.findings:
        assert finding.num_tokens == 20
        assert 0 <= finding.first < 20
        assert "of a host step of" in finding.where
    (symptom,) = counts.symptoms
    assert (symptom.name, symptom.figure) == ("audit_drift", counts.drifted)


def test_a_fraction_of_the_texts_is_audited() -> None:
    subject = engine(0.25)
    audited = 0
    for one in requests(40, max_tokens=1):
        run(subject, [one])
        audited = idle(subject).audited
    assert 9 <= audited <= 11


@pytest.mark.parametrize("num_free", [4, 3])
def test_requests_that_need_its_blocks_interrupt_the_audit(num_free: int) -> None:
    subject = engine(kv_tokens=256)
    run(subject, requests(1, max_tokens=30))
    subject.hooks.use_idle_time()
    pool = subject.scheduler.tables.pool
    assert pool.num_blocks - pool.num_free == 4
    taken = pool.take(pool.num_free - 2 - num_free)  # blocks of others; the request needs 2
    subject.add(requests(2)[1])
    subject.step()
    held = pool.num_blocks - pool.num_free - len(taken)
    subject.step()
    assert pool.num_blocks - pool.num_free - len(taken) == (held if num_free == 4 else held - 4)
    pool.release(taken)
    while subject.has_work:
        subject.step()
    assert idle(subject).audited == 50


def test_a_request_that_waits_for_blocks_gets_those_of_the_audit() -> None:
    subject = engine(kv_tokens=128)
    run(subject, requests(1, max_tokens=30))
    subject.hooks.use_idle_time()
    assert subject.scheduler.tables.pool.num_free == 4
    subject.add(request("long", [i % 30 for i in range(90)], max_tokens=2, temperature=0.5, seed=1))
    while subject.has_work:
        subject.step()
    assert idle(subject).audited == 32


class VirtualTime:
    """A clock on which only passes take time: `SECONDS_PER_ROW` for each row."""

    SECONDS_PER_ROW = 0.001

    def __init__(self) -> None:
        self.seconds = 0.0
        self.audits: list[tuple[int, float]] = []
        """Step and time of each pass of the audit."""

    def now(self) -> float:
        return self.seconds

    def watch(self, subject: Engine) -> None:
        forward, audit = subject.runner.forward, subject.hooks.get(SelfAudit)
        advance = audit._pass

        def timed(spans: Any, *rest: Any) -> Any:
            self.seconds += self.SECONDS_PER_ROW * sum(len(span.tokens) for span in spans)
            return forward(spans, *rest)

        def noted() -> bool:
            began = self.seconds
            if did := advance():
                self.audits.append((subject.num_steps, self.seconds - began))
            return did

        subject.runner.forward = timed  # type: ignore[method-assign]
        audit._pass = noted  # type: ignore[method-assign]


def serve(subject: Engine, num_steps: int, rule: str = "coupled") -> None:
    """Steps under constant load: a request that ends is followed by another, so that the engine is never idle."""
    for step in range(num_steps):
        while len(subject.scheduler.running) + len(subject.scheduler.waiting) < 3:
            ids, rules = [(step + j) % TINY.vocab_size for j in range(20)], {"verification": rule}
            name = f"load{step}-{len(subject.scheduler.waiting)}"
            subject.add(request(name, ids, rules, temperature=0.5, max_tokens=20, seed=step))
        subject.step()


def test_the_audit_takes_at_most_a_hundredth_of_the_steps_and_of_their_time_under_load() -> None:
    assert BUSY_SHARE == 0.01
    clock, share = VirtualTime(), 0.05  # of fewer steps
    subject = engine(clock=clock)
    subject.hooks.get(SelfAudit)._share = BusyShare(share)
    clock.watch(subject)
    serve(subject, 400)
    counts, steps = subject.status.snapshot().audit, [step for step, _ in clock.audits]
    assert counts.busy_passes == len(clock.audits)
    assert counts.busy_steps == subject.num_steps == 400
    assert 6 <= len(steps) <= 400 * share
    assert all(later - earlier >= 1 / share for earlier, later in pairwise(steps))
    seconds = sum(took for _, took in clock.audits)
    assert 0.5 * share * clock.seconds < seconds <= share * clock.seconds
    assert counts.drifted == 0
    assert counts.texts >= 2


def test_a_slow_pass_is_followed_by_many_steps() -> None:
    share = BusyShare()
    for _ in range(99):
        share.step(0.01)
        assert not share.allows_pass
    share.step(0.01)
    assert share.allows_pass
    share.spend(0.05)  # as long as 5 steps: 500 steps follow
    for _ in range(499):
        share.step(0.01)
        assert not share.allows_pass
    for _ in range(2):  # the debt is a sum of many fractions
        share.step(0.01)
    assert share.allows_pass


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_fault_is_found_while_the_engine_is_never_idle(rule: str) -> None:
    subject, share = engine(max_num_seqs=3), 0.05
    subject.hooks.get(SelfAudit)._share = BusyShare(share)
    with verification_ignores_the_temperature(subject):
        while not subject.status.snapshot().audit.drifted and subject.num_steps < 5000:
            serve(subject, 20, rule)
    counts = subject.status.snapshot().audit
    (finding, *_) = counts.findings
    assert finding.request_id.startswith("load")
    assert "of a host step of" in finding.where
    assert "drafted tokens" in finding.where
    assert counts.busy_passes <= share * subject.num_steps


def test_an_audit_pass_is_small() -> None:
    subject = engine(kv_tokens=2048)
    run(subject, [request("r", range(30), max_tokens=100)])
    rows = []
    forward = subject.runner.forward
    subject.runner.forward = lambda spans, *rest: rows.append(len(spans[0].tokens)) or forward(spans, *rest)  # type: ignore
    idle(subject)
    assert max(rows) == ROWS
    assert sum(rows) == 129


def test_texts_without_time_or_blocks_are_dropped() -> None:
    subject = engine()
    run(subject, requests(MAX_PENDING + 3, max_tokens=2))
    assert subject.status.snapshot().audit.dropped == 3
    counts = idle(subject)
    assert (counts.audited, counts.dropped) == (2 * MAX_PENDING, 3)
    run(subject, requests(1, max_tokens=20))
    pool = subject.scheduler.tables.pool
    for _ in range(MAX_TRIES):
        subject.hooks.use_idle_time()
        taken = pool.take(pool.num_free)  # blocks that requests need
        subject.add(requests(2, max_tokens=1)[1])
        subject.step()
        pool.release(taken)
        while subject.has_work:
            subject.step()
        subject.hooks.get(SelfAudit)._pending.pop()
    assert not subject.hooks.has_idle_work
    assert subject.status.snapshot().audit.dropped == 4


def test_cancelled_texts_are_not_audited() -> None:
    subject = engine()
    subject.add(requests(1)[0])
    subject.step()
    subject.cancel("r0")
    assert not subject.hooks.has_idle_work


def test_only_tokens_generated_here_are_audited() -> None:
    whole = run(engine(), requests(1, "rejection", max_tokens=12)).tokens["r0", 0]
    subject = engine()
    run(subject, [replace(requests(1, "rejection", max_tokens=12)[0], committed=(tuple(whole[:5]),))])
    assert (idle(subject).audited, idle(subject).drifted) == (7, 0)


def test_a_failing_audit_is_disabled(caplog: pytest.LogCaptureFixture) -> None:
    subject = engine()
    run(subject, requests(2))
    forward = subject.runner.forward

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    subject.runner.forward = broken  # type: ignore[method-assign, assignment]
    assert idle(subject).audited == 0
    assert "no further text is audited" in caplog.text
    subject.runner.forward = forward  # type: ignore[method-assign]
    run(subject, requests(2))
    assert not subject.hooks.has_idle_work


def test_the_loop_audits_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "IDLE_AFTER", 0.01)
    subject = engine()
    done, use = threading.Event(), subject.hooks.use_idle_time

    def used() -> None:
        use()
        if not subject.hooks.has_idle_work:
            done.set()

    subject.hooks.use_idle_time = used  # type: ignore[method-assign]
    loop = EngineLoop(subject)
    try:
        inbox = Inbox()
        loop.submit(requests(1)[0], inbox)
        assert len(inbox.tokens()[0]) == 20
        assert done.wait(30)
        again = Inbox()
        loop.submit(requests(2)[1], again)
        assert len(again.tokens()[0]) == 20
    finally:
        loop.close()
    assert subject.status.snapshot().audit.audited >= 20


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_json_is_audited_under_its_grammar(rule: str) -> None:
    subject = engine_of(draft_model(tiny_model(perturb=0.1)), depth=5, tokenizer=True, audit_fraction=1.0)
    sampling = {"json_schema": SCHEMA, "max_tokens": 80, **SAMPLED}
    outputs = outputs_of(subject, seeded("r", PROMPT, {"verification": rule}, **sampling))
    assert (idle(subject).audited, idle(subject).drifted) == (len(tokens_of(outputs)), 0)


def test_a_text_that_violates_its_grammar_has_drifted() -> None:
    subject = engine_of(tokenizer=True, audit_fraction=1.0)
    outputs_of(subject, seeded("r", PROMPT, json_schema=SCHEMA, max_tokens=80))
    work = subject.hooks.get(SelfAudit)._pending[0]
    work.text = replace(work.text, output_ids=(0, *work.text.output_ids[1:]))  # no JSON object begins with an `a`
    assert idle(subject).drifted >= 1


def test_rounding_at_the_edge_of_a_truncation_is_no_drift() -> None:
    """Token 1 was slightly above token 2 when it was sampled; here it is slightly below, and cut off."""
    audit = SelfAudit(ModelRunner(MODEL, 1), Scheduler(BlockTables(1), 1, 16), 1.0)
    params = SamplingParams(temperature=0.5, top_k=2)
    row = RowContext(params, 3, 0, 2, (1, 2), 2)

    def unlike(p: float, *logits: float) -> list[tuple[int, str]]:
        rescored = Rescored(0, (1,), torch.tensor([logits]), (row,))
        return audit._unlike(_Watched(None, False, 0, [p]), rescored)

    p = float(log_distribution(torch.tensor([[1.0, 0.50001, 0.5]]), [row])[0, 1].exp())
    assert unlike(p, 1.0, 0.50001, 0.5) == []
    assert unlike(p, 1.0, 0.49999, 0.5) == []
    assert len(unlike(p, 1.0, 0.4, 0.5)) == 1
    assert len(unlike(p + 0.001, 1.0, 0.50001, 0.5)) == 1


def test_audit_fraction_enables_the_audit(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    options: dict[str, Any] = {"device": "cpu", "kv_tokens": 1024, "max_model_len": 256}
    subject = build_engine(EngineConfig(model=model, audit_fraction=1.0, **options))
    run(subject, requests(2, ignore_eos=True))
    assert (idle(subject).audited, idle(subject).drifted) == (40, 0)
    disabled = build_engine(EngineConfig(model=model, audit_fraction=0.0, **options))
    run(disabled, requests(2, ignore_eos=True))
    assert idle(disabled).audited == 0
