"""Metrics of a cluster's workers."""

from dataclasses import replace

from paceline.core.status import ClusterStatus, HandoffCounts, Symptom, WorkerStatus
from paceline.gateway.metrics.metrics import Metrics

TARGET = WorkerStatus(
    "target-0",
    "target",
    "target",
    "ready",
    "tcp://127.0.0.1:1",
    running=3,
    kv_use=0.5,
    round_trip=0.002,
    answers=10,
    hits=7,
    symptoms=(Symptom("slow_network", 0.002, 0.001, "less depth"),),
    preemptions=4,
    tokens=1000,
)
DRAFT = WorkerStatus("draft-0", "draft", "draft", "suspected", "tcp://127.0.0.1:2", pass_seconds=0.003)


def scrape(*workers: WorkerStatus) -> str:
    metrics = Metrics("m")
    metrics.add_cluster(lambda: ClusterStatus(workers, 5))
    return metrics.render().decode()


def test_every_worker_has_its_series() -> None:
    page = scrape(TARGET, DRAFT)
    assert 'paceline_worker_ready{model="m",role="target",worker="target-0"} 1.0' in page
    assert 'paceline_worker_ready{model="m",role="draft",worker="draft-0"} 0.0' in page
    assert 'paceline_worker_sequences_running{model="m",role="target",worker="target-0"} 3.0' in page
    assert 'paceline_worker_prespeculation_hits_total{model="m",role="target",worker="target-0"} 7.0' in page
    assert 'paceline_continued_streams_total{model="m"} 5.0' in page
    assert 'paceline_symptom{model="m",role="target",symptom="slow_network",worker="target-0"} 1.0' in page


def test_unknown_values_are_absent() -> None:
    page = scrape(TARGET, DRAFT)
    assert 'paceline_worker_round_trip_seconds{model="m",role="target",worker="target-0"} 0.002' in page
    assert 'paceline_worker_round_trip_seconds{model="m",role="draft"' not in page


def test_metrics_of_one_role_are_absent_for_others() -> None:
    page = scrape(TARGET, DRAFT)
    assert 'paceline_worker_generated_tokens_total{model="m",role="target",worker="target-0"} 1000.0' in page
    assert 'paceline_worker_preemptions_total{model="m",role="target",worker="target-0"} 4.0' in page
    assert 'paceline_worker_draft_pass_seconds{model="m",role="draft",worker="draft-0"} 0.003' in page
    assert 'preemptions_total{model="m",role="draft"' not in page
    assert 'tokens_total{model="m",role="draft"' not in page


def test_drafts_ahead() -> None:
    name = 'paceline_worker_drafts_ahead{model="m",role="draft",worker="draft-0"}'
    assert "paceline_worker_drafts_ahead{" not in scrape(TARGET, DRAFT), "no target has requested a draft yet"
    assert f"{name} 1.0" in scrape(replace(DRAFT, answers=9))
    assert f"{name} 0.0" in scrape(replace(DRAFT, answers=9, paused_share=0.02))


def test_handoff_counts() -> None:
    assert "paceline_worker_handoffs_total{" not in scrape(TARGET)
    page = scrape(replace(TARGET, handoffs=HandoffCounts(3, 1, 4096, 10**6, 2.5, in_place_bytes=5 * 10**5)))
    for name, value in {
        "handoffs": "3.0",
        "failed_handoffs": "1.0",
        "handoff_tokens": "4096.0",
        "handoff_bytes": "1e+06",
        "handoff_in_place_bytes": "500000.0",
        "handoff_seconds": "2.5",
    }.items():
        assert f'paceline_worker_{name}_total{{model="m",role="target",worker="target-0"}} {value}' in page


def test_cost_appears_with_prices() -> None:
    assert "paceline_dollars_per_hour{" not in scrape(TARGET, DRAFT)
    page = scrape(replace(TARGET, price=2.5), replace(DRAFT, price=0.5))
    assert 'paceline_dollars_per_hour{model="m"} 3.0' in page
    assert "paceline_dollars_per_million_tokens{" not in page, "no token was generated"
