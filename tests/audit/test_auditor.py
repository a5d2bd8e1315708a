"""The audit passes on what is right and finds what was planted."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.audit import auditor as module
from paceline.audit.auditor import Auditor
from paceline.core.errors import InvalidConfig
from paceline.engine.llm import LLM
from tests.audit.planted import COUPLED, REJECTION, Plant
from tests.audit.tiny import audited, workload

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "truncated": {"temperature": 1.2, "top_p": 0.8, "top_k": 12, "min_p": 0.01},
    "penalised": {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("method", ["draft_model", "layer_skip", "ngram"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_what_is_right_is_clean(llm: LLM, verification: str, method: str, sampling: str) -> None:
    report = audited(llm, workload(4, verification, method, **SAMPLINGS[sampling]))
    assert report.is_clean, report.findings
    assert report.findings == ()
    assert report.num_drafted > 0
    tokens = sum(len(text.origins) for text in report.texts)
    assert tokens == 4 * 16
    assert {check.kind: check.num_checked for check in report.checks} == (
        {"token": tokens, "text": 4, "logits": tokens}
        if report.is_coupled
        else _of_rejection(report.num_drafted, tokens, method, report)
    )


def _of_rejection(drafted: int, tokens: int, method: str, report: Any) -> dict[str, int]:
    tested = sum(len(text.q_divergence) for text in report.texts)
    assert (tested > 0) == (method != "ngram")
    assert tested <= drafted
    return {"p": tokens, "q": tested, "draw": tested, "law": 2 * tokens}


@pytest.mark.parametrize("bug", COUPLED)
def test_planted_in_coupled_rounds(llm: LLM, bug: str) -> None:
    kinds = {"token", "text", "logits"} if "KV" in bug else {"token", "text"}
    check_caught(llm, COUPLED[bug], "coupled", kinds)


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [
        ("temperature on one side only: verification", {"p"}),
        ("temperature on one side only: the draft", {"draw"}),
        ("q rounded after sampling", {"q"}),
        ("a stale KV slot", {"p"}),
    ],
)
def test_planted_in_rejection_rounds(llm: LLM, bug: str, kinds: set[str]) -> None:
    check_caught(llm, REJECTION[bug], "rejection", kinds)


def check_caught(llm: LLM, plant: Plant, verification: str, kinds: set[str]) -> None:
    """Seeds are fixed: it is caught always or never. What shows in three texts of four is overlooked in 12 once in 10^7."""
    load = workload(12, verification, "draft_model", temperature=0.5)
    with plant(llm.engine):
        report = audited(llm, load)
    assert not report.is_clean
    assert {finding.kind for finding in report.findings} == kinds
    assert sum(bool(text.findings) for text in report.texts) >= 9
    again = replace(load, prompts=load.prompts[:4])
    assert audited(llm, again).is_clean, "the bug is gone, and so must be what it left in the cache"


def test_a_stale_slot_once_in_a_while(llm: LLM) -> None:
    """One round of ten: the texts that have one are found, and a prefix hit on what it left behind is no excuse."""
    with COUPLED["a stale KV slot"](llm.engine, 10):  # type: ignore[call-arg]
        report = audited(llm, workload(20, "coupled", "draft_model", temperature=0.5))
    assert 5 <= sum(bool(text.findings) for text in report.texts) < 20


def test_a_finding_says_where_and_what(llm: LLM) -> None:
    with COUPLED["temperature on one side only"](llm.engine):
        report = audited(llm, workload(6, "coupled", "draft_model", temperature=0.5))
    finding = next(one for one in report.findings if one.kind == "token")
    assert finding.token != finding.other
    assert 1e-4 < finding.figure < 50
    assert finding.origin in ("accepted", "recovered", "bonus")


def test_the_law_alone_tells(llm: LLM) -> None:
    """The two-sample test sees a draft that lies about its temperature, without looking at any p or q."""
    load = workload(40, "rejection", "draft_model", temperature=0.3)
    assert audited(llm, load).two_sample.p_value > 1e-3
    with REJECTION["temperature on one side only: verification"](llm.engine):
        found = audited(llm, load)
    assert found.two_sample.is_different
    assert found.checks[-1].num_wrong == 1


def test_the_engine_is_left_as_it_was(llm: LLM) -> None:
    audited(llm, workload(3))
    pool = llm.engine.scheduler.tables.pool
    assert (llm.engine.witness, pool.num_free) == (None, pool.num_blocks)


def test_several_devices_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "config", replace(llm.config, tensor_parallel_size=2))
    with pytest.raises(InvalidConfig, match="audit_fraction"):
        Auditor(llm)


def test_long_texts_are_audited_fewer_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEDGER_BYTES", 2 * 12 * 4 * llm.engine.runner.model.config.vocab_size)
    done: list[int] = []
    Auditor(llm).run(workload(5, max_tokens=4), done.append)
    Auditor(llm).run(workload(2, max_tokens=12), done.append)
    assert done == [2, 2, 1, 1, 1]
