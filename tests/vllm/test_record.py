"""How often the drafts of a sequence were right."""

import pytest

from paceline.core.traffic import TrafficClass
from paceline.vllm.sequences import DraftRecord, traffic_classes


def test_expected_tokens_follow_the_drafts() -> None:
    good, poor = DraftRecord(), DraftRecord()
    for _ in range(20):
        good.add(4, 4)
        poor.add(4, 0)
    assert good.tokens(4) == pytest.approx(5.0, abs=0.6)
    assert poor.tokens(4) == pytest.approx(1.0, abs=0.05)
    for _ in range(20):
        good.add(0, 0)  # lookups without a draft
    assert good.tokens(4) < 1.5


def test_a_sequence_without_a_record_is_of_the_kind_of_the_others() -> None:
    good, poor = DraftRecord(), DraftRecord()
    good.add(4, 4)
    poor.add(4, 0)
    assert [one.category for one in traffic_classes("m", [good, DraftRecord(), poor, good])] == [
        "good",
        "good",
        "poor",
        "good",
    ]
    assert traffic_classes("m", [DraftRecord()]) == [TrafficClass("m", "poor")]
