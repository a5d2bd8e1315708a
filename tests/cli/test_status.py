from dataclasses import replace

from rich.console import Console

from paceline.cli.status import view
from paceline.core.worker_status import HandoffCounts, Symptom, WorkerStatus


def shown(*workers: WorkerStatus, width: int = 200) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view(workers))
    return capture.get()


def test_a_row_for_each_worker_and_a_line_for_each_symptom() -> None:
    page = shown(
        WorkerStatus(
            "target-0",
            "target",
            "target",
            "ready",
            "tcp://127.0.0.1:1",
            running=12,
            waiting=3,
            kv_use=0.344,
            depth=3.14,
            alpha=0.712,
            round_trip=0.00041,
            answers=200,
            hits=124,
            late=2,
            symptoms=(Symptom("slow_draft", 0.0312, 0.01, "depth is cut"),),
        ),
        WorkerStatus("draft-0", "draft", "draft", "suspected", "tcp://127.0.0.1:2", queue_seconds=0.0021),
    )
    lines = [line.split() for line in page.splitlines()]
    assert lines[1] == ["target-0", "target", "ready", "12", "3", "34%", "3.1", "0.71", "0.41", "ms", "62%", "1%"]
    assert "! target-0: slow_draft, 0.0312 against 0.01; depth is cut" in page
    assert lines[2] == ["draft-0", "draft", "suspected", "0", "2.1", "ms", "-", "-", "-", "-", "-", "-"]


def test_figures_are_whole_on_a_narrow_terminal() -> None:
    busy = WorkerStatus(
        "target-0", "target", "target", "loading 12/30 layers from 2 peers", "tcp://127.0.0.1:1", running=12, kv_use=0.344,
        depth=3.14, alpha=0.712, round_trip=0.12341, answers=200, hits=124, late=2,
    )  # fmt: skip
    draft = replace(busy, name="draft-0", role="draft", state="suspected", queue_seconds=0.0123, resting=0.31)
    page = shown(busy, replace(busy, name="target-1", state="ready"), draft, width=80)
    assert "…" not in page
    lines = [line.split() for line in page.splitlines()]
    assert lines[1] == ["target-0", "target", "loading", "12", "0", "34%", "3.1", "0.71", "123.41", "ms", "62%", "1%"]
    assert lines[-1][:3] == ["draft-0", "draft", "suspected"]
    assert lines[-1][-5:] == ["123.41", "ms", "off:", "31%", "1%"]


def test_a_draft_worker_that_has_stopped_drafting_ahead_says_so() -> None:
    draft = WorkerStatus("draft-0", "draft", "draft", "ready", "tcp://127.0.0.1:2", answers=200, hits=124)
    assert "62%" in shown(draft)
    page = shown(replace(draft, resting=0.016))
    assert "off: 2%" in page
    assert "62%" not in page


def test_prompts_that_were_handed_over_have_a_column_where_there_are_any() -> None:
    target = WorkerStatus("target-0", "target", "target", "ready", "tcp://127.0.0.1:1")
    given, taken = HandoffCounts(7, 0, 7000, 10**6, 1.0), HandoffCounts(7, 2, 7000, 10**6, 1.0)
    assert "handed" not in shown(target)
    page = shown(
        replace(target, handoffs=taken),
        WorkerStatus("prefill-0", "prefill", "prefill", "ready", "tcp://127.0.0.1:2", handoffs=given),
        WorkerStatus("draft-0", "draft", "draft", "ready", "tcp://127.0.0.1:3"),
    )
    lines = page.splitlines()
    assert lines[0].split()[-1] == "handed"
    assert lines[1].endswith("7 (2 failed)")
    assert lines[2].split()[:3] + lines[2].split()[-1:] == ["prefill-0", "prefill", "ready", "7"]
    assert lines[3].split()[-1] == "-"


def test_hand_overs_are_whole_on_a_narrow_terminal() -> None:
    prefill = WorkerStatus(
        "prefill-0", "prefill", "prefill", "ready", "tcp://127.0.0.1:1", running=12, kv_use=0.344, depth=3.14, alpha=0.712,
        round_trip=0.00123, answers=200, hits=124, late=2, handoffs=HandoffCounts(1234, 0, 7000, 10**6, 1.0),
    )  # fmt: skip
    title, row = (line.split() for line in shown(prefill, width=80).splitlines())
    assert title[-1] == "handed"
    assert row[-2:] == ["1%", "1234"]
