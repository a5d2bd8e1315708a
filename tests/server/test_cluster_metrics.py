from paceline.core.worker_status import ClusterStatus, Symptom, WorkerStatus
from paceline.server.metrics import Metrics

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
)
DRAFT = WorkerStatus("draft-0", "draft", "draft", "suspected", "tcp://127.0.0.1:2")


def scraped(*workers: WorkerStatus) -> str:
    metrics = Metrics("m")
    metrics.bind_cluster(lambda: ClusterStatus(workers, 5) if workers else None)
    return metrics.render().decode()


def test_every_worker_has_its_series() -> None:
    page = scraped(TARGET, DRAFT)
    assert 'paceline_worker_ready{model="m",role="target",worker="target-0"} 1.0' in page
    assert 'paceline_worker_ready{model="m",role="draft",worker="draft-0"} 0.0' in page
    assert 'paceline_worker_sequences_running{model="m",role="target",worker="target-0"} 3.0' in page
    assert 'paceline_worker_prespeculation_hits_total{model="m",role="target",worker="target-0"} 7.0' in page
    assert 'paceline_continued_streams_total{model="m"} 5.0' in page
    assert 'paceline_symptom{model="m",role="target",symptom="slow_network",worker="target-0"} 1.0' in page


def test_what_is_not_known_has_no_value() -> None:
    page = scraped(TARGET, DRAFT)
    assert 'paceline_worker_round_trip_seconds{model="m",role="target",worker="target-0"} 0.002' in page
    assert 'paceline_worker_round_trip_seconds{model="m",role="draft"' not in page


def test_one_process_has_no_workers() -> None:
    assert "paceline_worker" not in scraped()
    assert "paceline_continued" not in scraped()
