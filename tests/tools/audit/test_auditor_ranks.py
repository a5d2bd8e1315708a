"""The audit of an engine with two ranks on the CPU: clean if it is correct, and with findings if it is not."""

from collections.abc import Iterator

import pytest

from paceline.engine.start.llm import LLM
from paceline.kernels.cpu import native
from paceline.models.parallel.runner import ParallelRunner
from tests.tools.audit.planted import COUPLED
from tests.tools.audit.tiny import audited, tiny_llm, workload


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(tmp_path_factory.mktemp("models"), tensor_parallel_size=2) as llm:
        yield llm
    native.set_num_threads(1)


@pytest.mark.parametrize(
    ("verification", "method"), [("coupled", "draft_model"), ("coupled", "layer_skip"), ("rejection", "layer_skip")]
)
def test_texts_of_two_ranks_are_rescored_by_both(ranks: LLM, verification: str, method: str) -> None:
    assert isinstance(ranks.engine.runner, ParallelRunner)
    report = audited(ranks, workload(3, verification, method, temperature=0.8))
    assert report.is_clean, report.findings
    assert report.num_drafted > 0
    assert all(check.num_checked for check in report.checks)


def test_a_planted_bug_is_found(ranks: LLM) -> None:
    with COUPLED["verification ignores the temperature"](ranks.engine):
        report = audited(ranks, workload(3, "coupled", "draft_model", temperature=0.5))
    assert {finding.kind for finding in report.findings} == {"token", "text"}
