"""An engine that checks itself while nobody is served."""

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.config import EngineConfig
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.worker_status import AuditCounts
from paceline.engine import loop as loop_module
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.engine.hooks.self_audit import MAX_PENDING, MAX_TRIES, ROWS, SelfAudit, _Watched
from paceline.engine.loop import EngineLoop
from paceline.kv.block_tables import BlockTables
from paceline.models.runner import ModelRunner
from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.rescoring import Rescored
from paceline.speculation.verification.rows import RowContext
from tests.audit.planted import stale_slot, temperature_of_drafts_forgotten_by_verification
from tests.engine.harness import PROMPT, SAMPLED, engine_of, outputs_of, tokens_of
from tests.engine.harness import request as seeded
from tests.engine.test_build import save_checkpoint
from tests.engine.test_endings import SCHEMA
from tests.engine.test_loop import Inbox
from tests.exactness.suite import mixed_requests
from tests.fakes import TINY, draft_model, request, run, tiny_engine, tiny_model

MODEL = tiny_model()


def engine(fraction: float = 1.0, **options: Any) -> Engine:
    return tiny_engine(MODEL, draft_model(tiny_model(perturb=0.1)), audit_fraction=fraction, **options)


def idle(made: Engine) -> AuditCounts:
    """Let it use its idle time to the end."""
    while made.has_idle_work:
        made.use_idle_time()
    pool = made.scheduler.tables.pool
    pool.check()
    assert pool.num_free == pool.num_blocks
    return made.snapshot().audit


def requests(count: int, rule: str = "coupled", **sampling: Any) -> list[Request]:
    sampling = {"temperature": 0.5, "max_tokens": 20, **sampling}
    return [
        request(f"r{i}", [(i + j) % TINY.vocab_size for j in range(20)], {"verification": rule}, seed=i, **sampling)
        for i in range(count)
    ]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_what_is_right_is_found_right(rule: str) -> None:
    made = engine()
    batch = mixed_requests(MAX_PENDING, TINY.vocab_size, verification=rule)
    batch = [replace(one, sampling=replace(one.sampling, n=1)) for one in batch]
    tokens = run(made, batch).tokens
    assert idle(made) == AuditCounts(audited=sum(map(len, tokens.values())))
    assert made.snapshot().audit.symptoms == ()


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("plant", [temperature_of_drafts_forgotten_by_verification, stale_slot])
def test_what_is_wrong_is_counted_and_logged(rule: str, plant: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    with plant(made):
        run(made, requests(4, rule))
    counts = idle(made)
    assert counts.audited == 80
    assert 4 <= counts.drifted <= 80
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any("drift: the text of request r" in line for line in lines)
    (symptom,) = counts.symptoms
    assert (symptom.name, symptom.figure) == ("audit_drift", counts.drifted)


def test_a_share_of_the_texts_is_audited() -> None:
    made = engine(0.25)
    audited = 0
    for one in requests(40, max_tokens=1):
        run(made, [one])
        audited = idle(made).audited
    assert 9 <= audited <= 11


def test_nothing_is_computed_while_somebody_is_served_and_all_is_given_back() -> None:
    made = engine()
    run(made, requests(1, max_tokens=30))
    made.use_idle_time()
    pool = made.scheduler.tables.pool
    assert pool.num_free < pool.num_blocks
    seen = []
    forward = made.runner.forward
    made.runner.forward = lambda spans, *rest: seen.append(len(spans)) or forward(spans, *rest)  # type: ignore
    made.add(requests(2)[1])
    made.step()
    assert seen == [1]
    assert made.snapshot().kv_used == 2  # those of the one that is served
    while made.has_work:
        made.step()
    assert idle(made) == AuditCounts(audited=50)


def test_a_pass_is_small() -> None:
    made = engine(kv_tokens=2048)
    run(made, [request("r", range(30), max_tokens=100)])
    rows = []
    forward = made.runner.forward
    made.runner.forward = lambda spans, *rest: rows.append(len(spans[0].tokens)) or forward(spans, *rest)  # type: ignore
    idle(made)
    assert max(rows) == ROWS
    assert sum(rows) == 129


def test_texts_that_find_no_idle_moment_are_dropped() -> None:
    made = engine()
    run(made, requests(MAX_PENDING + 3, max_tokens=2))
    assert made.snapshot().audit.dropped == 3
    counts = idle(made)
    assert (counts.audited, counts.dropped) == (2 * MAX_PENDING, 3)
    run(made, requests(1, max_tokens=20))
    for _ in range(MAX_TRIES):
        made.use_idle_time()
        made.step()
    assert not made.has_idle_work
    assert made.snapshot().audit.dropped == 4


def test_cancelled_texts_are_not_audited() -> None:
    made = engine()
    made.add(requests(1)[0])
    made.step()
    made.cancel("r0")
    assert not made.has_idle_work


def test_a_continued_text_is_audited_as_far_as_it_was_seen() -> None:
    whole = run(engine(), requests(1, "rejection", max_tokens=12)).tokens["r0", 0]
    made = engine()
    run(made, [replace(requests(1, "rejection", max_tokens=12)[0], committed=(tuple(whole[:5]),))])
    assert idle(made) == AuditCounts(audited=7)


def test_an_audit_that_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    made = engine()
    run(made, requests(2))
    forward = made.runner.forward

    def broken(*_: Any) -> None:
        raise RuntimeError("out of luck")

    made.runner.forward = broken  # type: ignore[method-assign, assignment]
    assert idle(made) == AuditCounts()
    assert "no further text is audited" in caplog.text
    made.runner.forward = forward  # type: ignore[method-assign]
    run(made, requests(2))
    assert not made.has_idle_work


def test_the_loop_audits_when_it_has_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "REST", 0.01)
    made = engine()
    done, use = threading.Event(), made.use_idle_time

    def used() -> None:
        use()
        if not made.has_idle_work:
            done.set()

    made.use_idle_time = used  # type: ignore[method-assign]
    loop = EngineLoop(made)
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
    assert made.snapshot().audit.audited >= 20


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_json_is_audited_under_its_grammar(rule: str) -> None:
    made = engine_of(draft_model(tiny_model(perturb=0.1)), depth=5, tokenizer=True, audit_fraction=1.0)
    sampling = {"json_schema": SCHEMA, "max_tokens": 80, **SAMPLED}
    outputs = outputs_of(made, seeded("r", PROMPT, {"verification": rule}, **sampling))
    assert idle(made) == AuditCounts(audited=len(tokens_of(outputs)))


def test_a_text_that_left_its_grammar_has_drifted() -> None:
    made = engine_of(tokenizer=True, audit_fraction=1.0)
    outputs_of(made, seeded("r", PROMPT, json_schema=SCHEMA, max_tokens=80))
    work = made.audit._pending[0]
    work.text = replace(work.text, output_ids=(0, *work.text.output_ids[1:]))  # no JSON object begins with an `a`
    assert idle(made).drifted >= 1


def test_the_edge_of_a_truncation_is_rounding() -> None:
    """Token 1 was drawn by whoever computed it a hair above token 2; here it is a hair below, and cut off."""
    audit, params = SelfAudit(ModelRunner(MODEL, 1), BlockTables(1), 1.0), SamplingParams(temperature=0.5, top_k=2)
    row = RowContext(params, 3, 0, 2, (1, 2), 2)

    def unlike(p: float, *logits: float) -> list[str]:
        rescored = Rescored(0, (1,), torch.tensor([logits]), (row,))
        return audit._unlike(_Watched(None, False, 0, [p]), rescored)

    p = float(log_distribution(torch.tensor([[1.0, 0.50001, 0.5]]), [row])[0, 1].exp())
    assert unlike(p, 1.0, 0.50001, 0.5) == []
    assert unlike(p, 1.0, 0.49999, 0.5) == []
    assert len(unlike(p, 1.0, 0.4, 0.5)) == 1
    assert len(unlike(p + 0.001, 1.0, 0.50001, 0.5)) == 1


def test_a_configured_engine_audits_itself(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    options: dict[str, Any] = {"device": "cpu", "kv_tokens": 1024, "max_model_len": 256}
    made = build_engine(EngineConfig(model=model, audit_fraction=1.0, **options))
    run(made, requests(2, ignore_eos=True))
    assert idle(made) == AuditCounts(audited=40)
    assert build_engine(EngineConfig(model=model, audit_fraction=0.0, **options)).witness is None
