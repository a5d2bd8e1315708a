"""The symptom of an engine whose steps leave the CUDA graphs."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.worker.server.symptoms import LEAST_STEPS, HostSteps
from tests.worker.server.test_kv_pressure import STATUS


def seen(counts: Mapping[str, int], times: int = 3) -> list[tuple[str, float]]:
    """The symptoms after these steps were counted so often."""
    steps = HostSteps()
    for i in range(1, times + 1):
        steps.observe(replace(STATUS, executor_steps={reason: i * count for reason, count in counts.items()}))
    return [(symptom.remedy, symptom.figure) for symptom in steps.active]


def test_steps_on_the_host_are_named_with_their_most_frequent_reason() -> None:
    ((remedy, share),) = seen({"graph": 900, "sampling": 80, "blocks": 20, "idle": 5000})
    assert share == pytest.approx(0.1)
    assert remedy.startswith("most often because of sampling: requests have grammars")


@pytest.mark.parametrize(
    "counts",
    [{"graph": 960, "sampling": 40}, {"no_graphs": 900, "sampling": 100}, {"graph": 900, "idle": 900}],
    ids=["few", "an engine without graphs", "the first of each request"],
)
def test_nothing_is_wrong(counts: Mapping[str, int]) -> None:
    assert not seen(counts)


def test_few_steps_show_nothing_until_there_are_enough() -> None:
    few = {"sampling": LEAST_STEPS // 4}
    assert not seen(few, times=7)
    assert seen(few, times=8)
