"""Request metrics, engine metrics and the list in docs/metrics.md."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.core.output import StepOutput
from paceline.core.request import Request, SpeculationFlags
from paceline.core.sequence import FinishReason, Origin
from paceline.core.status import (
    AuditCounts,
    BreakerState,
    ClusterStatus,
    EngineStatus,
    HandoffCounts,
    Symptom,
    TierCounts,
    TrafficStatus,
    WorkerLife,
    WorkerStatus,
)
from paceline.gateway.admin.plan import PlannedSizes, PlannerStatus
from paceline.gateway.admin.routes import LearningMetrics
from paceline.gateway.metrics.metrics import MergedRegistry, Metrics, process_registry
from paceline.gateway.sessions.samples import SampleRing
from paceline.policy.overload import OverloadStage

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"

STATUS = EngineStatus(
    running=3,
    waiting=2,
    kv_used=10,
    kv_total=40,
    preemptions=4,
    invalid_drafts=5,
    flags=SpeculationFlags(True, "ngram", 6),
    traffic=(
        TrafficStatus(
            "ngram",
            "code",
            BreakerState.OPEN,
            (0.75, 0.5),
            1.5,
            {"declined": 7, "no_draft": 1},
            30,
            13,
            20,
            2,
            (0.8, 0.4),
        ),
        TrafficStatus("draft_model", "chat", BreakerState.CLOSED, (), 0.0, {}),
    ),
    advantage=1.75,
    seconds={"draft": 2.0, "verify": 3.0},
    executor_steps={"prefill": 4},
    audit=AuditCounts(audited=300, drifted=1, dropped=2),
    tiers=TierCounts(
        host_blocks=6, disk_blocks=7, device_hits=16, host_hits=32, disk_hits=48, bytes_to_disk=9, bad_blocks=1
    ),
)


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_request(name: str = "r", category: str = "chat", prompt: int = 3) -> Request:
    return Request(name, tuple(range(prompt)), category=category)


def make_output(count: int, drafted: int = 0, accepted: int = 0, choice: int = 0, **rest: Any) -> StepOutput:
    return StepOutput("r", 0, choice, (1,) * count, (Origin.PLAIN,) * count, "", drafted, accepted, **rest)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """{(name, label values without the model, sorted by label): value}."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        names = ("model_name", "engine") if family.name.startswith("vllm:") else ("model",)
        for one in family.samples:
            assert one.labels[names[0]] == "m"
            found[(one.name, *(value for label, value in sorted(one.labels.items()) if label not in names))] = one.value
    return found


def test_a_request_from_arrival_to_end() -> None:
    clock = ManualClock()
    metrics = Metrics("m", clock)
    request = make_request()
    metrics.record_submit(request)
    metrics.record_outputs([(request, make_output(1, num_cached=2, waited=0.25))], 100.4)
    metrics.record_outputs([(request, make_output(3, drafted=4, accepted=2))], 100.5)
    metrics.record_outputs([(request, make_output(5, drafted=4, accepted=4))], 100.6)
    metrics.record_outputs([(request, make_output(2, drafted=2, accepted=1, finish_reason=FinishReason.STOP))], 100.9)
    metrics.record_finish(request, "stop", 100.9)
    clock.now = 101.0
    found = samples(metrics)
    expected = {
        ("paceline_prompt_tokens_total", "chat"): 3,
        ("paceline_cached_prompt_tokens_total", "chat"): 2,
        ("paceline_generated_tokens_total", "chat"): 11,
        ("paceline_drafted_tokens_total", "chat"): 10,
        ("paceline_accepted_tokens_total", "chat"): 7,
        ("paceline_rounds_total", "chat"): 3,
        ("paceline_accepted_tokens_by_position_total", "chat", "1"): 3,
        ("paceline_accepted_tokens_by_position_total", "chat", "2"): 2,
        ("paceline_accepted_tokens_by_position_total", "chat", "4"): 1,
        ("paceline_draft_depth_sum", "chat"): 10,
        ("paceline_draft_depth_bucket", "chat", "2.0"): 1,
        ("paceline_requests_total", "chat", "stop"): 1,
        ("paceline_requests_total", "chat", "error"): 0,
        ("paceline_effective_tokens_per_second", "chat"): 1.1,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert found["paceline_draft_acceptance_rate", "chat"] == pytest.approx(0.7, abs=0.01)
    assert found["paceline_time_to_first_token_seconds_sum", "chat"] == pytest.approx(0.4)
    assert found["paceline_queue_seconds_sum", "chat"] == pytest.approx(0.25)
    assert found["paceline_queue_seconds_count", "chat"] == 1
    assert found["paceline_time_per_output_token_seconds_sum", "chat"] == pytest.approx(0.5 / 10)
    assert found["paceline_request_duration_seconds_sum", "chat"] == pytest.approx(0.9)


def test_choices_share_one_first_token_and_have_their_own_speed() -> None:
    metrics = Metrics("m", ManualClock())
    request = make_request()
    metrics.record_submit(request)
    for choice, start in ((0, 101.0), (1, 102.0)):
        metrics.record_outputs([(request, make_output(1, choice=choice))], start)
    for choice, end in ((0, 103.0), (1, 105.0)):
        metrics.record_outputs([(request, make_output(2, choice=choice, finish_reason=FinishReason.LENGTH))], end)
    metrics.record_finish(request, "length", 105.0)
    found = samples(metrics)
    assert found["paceline_time_to_first_token_seconds_count", "chat"] == 1
    assert found["paceline_time_per_output_token_seconds_count", "chat"] == 2
    assert found["paceline_time_per_output_token_seconds_sum", "chat"] == pytest.approx(1.0 + 1.5)


def test_times_need_tokens() -> None:
    metrics = Metrics("m", ManualClock())
    one, none = make_request("one"), make_request("none")
    metrics.record_submit(one)
    metrics.record_submit(none)
    metrics.record_outputs([(one, make_output(1, finish_reason=FinishReason.STOP))], 101.0)
    metrics.record_finish(one, "stop", 101.0)
    metrics.record_finish(none, "cancelled", 101.0)
    found = samples(metrics)
    assert found["paceline_time_per_output_token_seconds_count", "chat"] == 0
    assert found["paceline_time_to_first_token_seconds_count", "chat"] == 1
    assert found["paceline_requests_total", "chat", "cancelled"] == 1


def test_tokens_per_second_cover_ten_seconds() -> None:
    clock = ManualClock()
    metrics = Metrics("m", clock)
    request = make_request()
    metrics.record_submit(request)
    key = ("paceline_effective_tokens_per_second", "chat")
    for second in range(20):
        clock.now = 100.0 + second
        metrics.record_outputs([(request, make_output(5))], clock.now)
    assert samples(metrics)[key] == 5.0
    clock.now += 5.0
    assert samples(metrics)[key] == 2.5
    clock.now += 60.0
    assert samples(metrics)[key] == 0.0


def test_tokens_of_the_last_minute_or_since_the_start() -> None:
    clock = ManualClock()
    clock.now = 100.0
    metrics = Metrics("m", clock)
    request = make_request()
    metrics.record_submit(request)
    for second in range(1, 121):
        clock.now = 100.0 + second
        metrics.record_outputs([(request, make_output(6))], clock.now)
        if second in (20, 120):
            assert metrics.tokens_per_second() == 6.0
    clock.now += 30.0
    assert metrics.tokens_per_second() == 3.0


def test_rejections_are_counted_by_reason() -> None:
    metrics = Metrics("m")
    metrics.record_rejection("overloaded")
    metrics.record_rejection("overloaded")
    metrics.record_rejection("draining")
    found = samples(metrics)
    assert found["paceline_rejected_total", "overloaded"] == 2
    assert found["paceline_rejected_total", "draining"] == 1


def test_categories_are_bounded() -> None:
    metrics = Metrics("m")
    for i in range(100):
        request = make_request(str(i), category=f"kind {i}")
        metrics.record_submit(request)
        metrics.record_finish(request, "stop", 0.0)
    stopped = {key[1]: v for key, v in samples(metrics).items() if key[0] == "paceline_requests_total" and v}
    assert len(stopped) == 33
    assert stopped["other"] == 68
    assert metrics._running == {}
    assert len(metrics._categories) == 33


def test_engine_metrics_are_read_at_every_scrape() -> None:
    metrics = Metrics("m")
    statuses = [STATUS]
    metrics.add_engine(lambda: statuses[-1])
    found = samples(metrics)
    expected = {
        ("paceline_sequences_running",): 3,
        ("paceline_sequences_waiting",): 2,
        ("paceline_kv_blocks_used",): 10,
        ("paceline_kv_blocks_total",): 40,
        ("paceline_kv_use_ratio",): 0.25,
        ("paceline_kv_tier_blocks", "disk"): 7,
        ("paceline_kv_tier_hit_tokens_total", "host"): 32,
        ("paceline_kv_tier_bytes_total", "disk", "down"): 9,
        ("paceline_kv_tier_bad_blocks_total",): 1,
        ("paceline_preemptions_total",): 4,
        ("paceline_invalid_drafts_total",): 5,
        ("paceline_audited_tokens_total",): 300,
        ("paceline_audit_drifted_tokens_total",): 1,
        ("paceline_audit_dropped_texts_total",): 2,
        ("paceline_speculation_enabled",): 1,
        ("paceline_max_depth",): 6,
        ("paceline_alpha", "code", "ngram", "1"): 0.75,
        ("paceline_alpha", "code", "ngram", "2"): 0.5,
        ("paceline_depth", "code", "ngram"): 1.5,
        ("paceline_breaker_state", "code", "ngram"): 2,
        ("paceline_breaker_state", "chat", "draft_model"): 0,
        ("paceline_fallbacks_total", "code", "ngram", "declined"): 7,
        ("paceline_fallbacks_total", "code", "ngram", "no_draft"): 1,
        ("paceline_tested_drafts_total", "code", "ngram"): 20,
        ("paceline_kept_drafts_total", "code", "ngram"): 13,
        ("paceline_drifts_total", "code", "ngram"): 2,
        ("paceline_drift_level", "code", "ngram", "before"): 0.8,
        ("paceline_drift_level", "code", "ngram", "after"): 0.4,
        ("paceline_speculation_gain",): 1.75,
        ("paceline_step_seconds_total", "draft"): 2,
        ("paceline_step_seconds_total", "verify"): 3,
        ("paceline_steps_total", "prefill"): 4,
    }
    assert {key: found.get(key) for key in expected} == expected
    statuses.append(EngineStatus(0, 0, 0, 40, 4, 5, SpeculationFlags(False, "ngram", 0), ()))
    found = samples(metrics)
    assert (found["paceline_sequences_running",], found["paceline_speculation_enabled",]) == (0, 0)
    assert ("paceline_speculation_gain",) not in found


def test_the_documentation_lists_every_metric() -> None:
    metrics = Metrics("m")
    metrics.add_engine(lambda: STATUS)
    symptom = Symptom("slow_draft", 2.0, 1.0, "less depth")
    worker = WorkerStatus(
        "target-0",
        "target",
        "target",
        "ready",
        "tcp://a:1",
        kv_use=0.5,
        queue_seconds=0.1,
        round_trip=0.1,
        depth=2.0,
        alpha=0.7,
        pass_seconds=0.001,
        handoffs=HandoffCounts(1, 0, 16, 1024, 0.1),
        indexed_blocks=1,
        prefill_seconds=0.1,
        symptoms=(symptom,),
        life=WorkerLife(2, 100.0, "SIGKILL"),
        price=2.0,
    )
    draft = WorkerStatus("draft-0", "draft", "draft", "ready", "tcp://a:2", answers=1)
    metrics.add_cluster(lambda: ClusterStatus((worker, draft), 0))
    metrics.add_queue(lambda: 0, lambda: 0)
    metrics.add_memory(lambda: 0, 1, lambda: 0)
    metrics.record_overload(OverloadStage.DROP)
    metrics.record_cpu("text", 0.1)
    metrics.record_submit(make_request())
    metrics.record_outputs([(make_request(), make_output(2, drafted=1, accepted=1))], 0.0)
    metrics.record_rejection("overloaded")
    board, sizes = PlannerStatus(), {"target": 1}
    board.add(
        PlannedSizes(
            time=0.0, sizes=sizes, before=sizes, cause="hold", reason="", load=1.0, forecast=1.0, capacity=1.0,
            dollars_per_hour=1.0, is_enough=True, is_acting=False,
        )
    )  # fmt: skip
    metrics.registry.register(board)
    metrics.registry.register(LearningMetrics("m", SampleRing(1, 1)))
    exported = set()
    for family in MergedRegistry([metrics.registry, process_registry()]).collect():
        labels = {label for sample in family.samples for label in sample.labels} - {
            "model",
            "model_name",
            "engine",
            "le",
        }
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        exported.add((name, family.type, frozenset(labels)))
    rows = re.findall(
        r"^\| `((?:paceline_|process_|vllm:)\w+)` \| (\w+) \| ([\w, ]*)\|", DOCS.read_text("utf-8"), re.MULTILINE
    )
    listed = {(name, kind, frozenset(re.findall(r"\w+", labels))) for name, kind, labels in rows}
    assert listed == exported


def test_counting_and_scraping_from_many_threads() -> None:
    metrics = Metrics("m")

    def work(number: int) -> None:
        for i in range(50):
            request = make_request(f"{number}-{i}", category=f"kind {i % 5}")
            metrics.record_submit(request)
            metrics.record_outputs([(request, make_output(2, drafted=2, accepted=1))], float(i))
            metrics.record_finish(request, "stop", float(i))
            metrics.render() if i % 25 == 0 else None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = samples(metrics)
    assert sum(value for key, value in found.items() if key[0] == "paceline_requests_total") == 200
    assert sum(value for key, value in found.items() if key[0] == "paceline_drafted_tokens_total") == 400


def test_vllm_counters_are_the_sums_over_categories() -> None:
    """`vllm bench serve` reads lines that start with `vllm:spec_decode` and end in `_total`; positions count from 0."""
    metrics = Metrics("m")
    for name, accepted in (("a", 2), ("b", 0), ("c", 3)):
        request = make_request(name, category=name)
        metrics.record_submit(request)
        metrics.record_outputs([(request, make_output(1, drafted=3, accepted=accepted))], 0.0)
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("vllm:")]
    assert lines == [
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0',
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 9.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 5.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0',
    ]
