"""The audit passes for a correct engine and finds injected bugs."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.engine.start.llm import LLM
from paceline.tools.audit import auditor as module
from paceline.tools.audit.auditor import Auditor
from tests.tools.audit.planted import COUPLED, REJECTION, Bug
from tests.tools.audit.tiny import audited, workload

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "truncated": {"temperature": 1.2, "top_p": 0.8, "top_k": 12, "min_p": 0.01},
    "penalised": {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3},
}


PAIRS = [
    (method, sampling)
    if method == "draft_model" or sampling == "truncated"
    else pytest.param(method, sampling, marks=pytest.mark.slow)
    for method in ("draft_model", "layer_skip", "ngram")
    for sampling in SAMPLINGS
]
"""`make test` has every sampling with a draft model, and every method with one sampling."""


@pytest.mark.parametrize(("method", "sampling"), PAIRS)
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_correct_engine_is_clean(llm: LLM, verification: str, method: str, sampling: str) -> None:
    report = audited(llm, workload(4, verification, method, **SAMPLINGS[sampling]))
    assert report.is_clean, report.findings
    assert report.findings == ()
    assert report.num_drafted > 0
    tokens = sum(len(text.origins) for text in report.texts)
    assert tokens == 4 * 16
    assert {check.kind: check.num_checked for check in report.checks} == (
        {"token": tokens, "text": 4, "logits": tokens}
        if report.is_coupled
        else _rejection_counts(report.num_drafted, tokens, method, report)
    )


def _rejection_counts(drafted: int, tokens: int, method: str, report: Any) -> dict[str, int]:
    tested = sum(len(text.q_divergence) for text in report.texts)
    assert (tested > 0) == (method != "ngram")
    assert tested <= drafted
    return {"p": tokens, "q": tested, "sample": tested, "distribution": 2 * tokens}


@pytest.mark.parametrize("bug", COUPLED)
def test_bugs_in_coupled_rounds_are_found(llm: LLM, bug: str) -> None:
    kinds = {"token", "text", "logits"} if "KV" in bug else {"token", "text"}
    check_found(llm, COUPLED[bug], "coupled", kinds)


@pytest.mark.parametrize(
    ("bug", "kinds"),
    [
        ("verification ignores the temperature", {"p"}),
        ("the draft ignores the temperature", {"sample"}),
        ("q rounded after sampling", {"q"}),
        ("a stale KV slot", {"p"}),
    ],
)
def test_bugs_in_rejection_rounds_are_found(llm: LLM, bug: str, kinds: set[str]) -> None:
    check_found(llm, REJECTION[bug], "rejection", kinds)


def check_found(llm: LLM, bug: Bug, verification: str, kinds: set[str]) -> None:
    """Seeds are fixed, so the result is deterministic. A bug in three of four texts is missed in 12 with probability 10^-7."""
    load = workload(12, verification, "draft_model", temperature=0.5)
    with bug(llm.engine):
        report = audited(llm, load)
    assert not report.is_clean
    assert {finding.kind for finding in report.findings} == kinds
    assert sum(bool(text.findings) for text in report.texts) >= 9
    again = replace(load, prompts=load.prompts[:4])
    assert audited(llm, again).is_clean, "the prefix cache still holds results of the bug"


def test_rare_stale_slot(llm: LLM) -> None:
    """A bug in one round of ten is found in the texts that have one."""
    with COUPLED["a stale KV slot"](llm.engine, 10):  # type: ignore[call-arg]
        report = audited(llm, workload(20, "coupled", "draft_model", temperature=0.5))
    assert 5 <= sum(bool(text.findings) for text in report.texts) < 20


def test_finding_has_token_and_gap(llm: LLM) -> None:
    with COUPLED["verification ignores the temperature"](llm.engine):
        report = audited(llm, workload(6, "coupled", "draft_model", temperature=0.5))
    finding = next(one for one in report.findings if one.kind == "token")
    assert finding.token != finding.other
    assert 1e-4 < finding.figure < 50
    assert finding.origin in ("accepted", "recovered", "bonus")


def test_two_sample_test_finds_a_bug_alone(llm: LLM) -> None:
    """The two-sample test finds a wrong temperature without p or q."""
    load = workload(40, "rejection", "draft_model", temperature=0.3)
    assert audited(llm, load).two_sample.p_value > 1e-3
    with REJECTION["verification ignores the temperature"](llm.engine):
        found = audited(llm, load)
    assert found.two_sample.is_different
    assert found.checks[-1].num_wrong == 1


def test_engine_is_unchanged_afterwards(llm: LLM) -> None:
    hooks = list(llm.engine.hooks)
    audited(llm, workload(3))
    pool = llm.engine.scheduler.tables.pool
    assert (list(llm.engine.hooks), pool.num_free) == (hooks, pool.num_blocks)


def test_long_texts_have_smaller_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_BYTES", 2 * 12 * 4 * llm.engine.runner.model.config.vocab_size)
    done: list[int] = []
    Auditor(llm).run(workload(5, max_tokens=4), done.append)
    Auditor(llm).run(workload(2, max_tokens=12), done.append)
    assert done == [2, 2, 1, 1, 1]
