import io
import json

from rich.console import Console

from paceline.cli.start_display import StartDisplay
from paceline.core.machine import PhaseReport


def record(level: str, message: str) -> str:
    values = {"time": "2026-01-02T03:04:05.000+00:00", "level": level, "logger": "paceline", "message": message}
    return json.dumps(values)


def shown(lines: list[str], later: list[str] = [], is_terminal: bool = True, is_verbose: bool = False) -> str:  # noqa: B006
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=60, color_system=None)
    with StartDisplay(console, "start the engine", is_verbose) as display:
        for line in lines:
            display.receive(line)
        display.finish()
        for line in later:
            display.receive(line)
    return file.getvalue()


REPORTS = [
    PhaseReport("read weights").to_json(),
    PhaseReport("compile kernels").to_json(),
    PhaseReport("compile kernels", done=0.5).to_json(),
    PhaseReport("compile kernels", seconds=3.25, note="once").to_json(),
    PhaseReport("read weights", seconds=12.0, note="1.1 GB").to_json(),
    PhaseReport("calibrate").to_json(),
    PhaseReport("calibrate", seconds=0.01).to_json(),
]


def test_each_phase_has_a_line_with_its_time_and_short_ones_have_none() -> None:
    text = shown(REPORTS)
    assert "compile kernels    3.2 s  once" in text
    assert "read weights      12.0 s  1.1 GB" in text
    assert "calibrate  " not in text.rpartition("read weights")[2].replace("calibrate ━", "")


def test_log_lines_of_level_info_wait_for_the_end_of_the_start() -> None:
    text = shown([record("info", "early"), record("warning", "careful"), "a traceback"], [record("info", "late")])
    assert "early" not in text
    assert "warning: careful" in text
    assert "a traceback" in text
    assert "late" in text
    assert "early" in shown([record("info", "early")], is_verbose=True)


def test_without_a_terminal_there_are_no_bars() -> None:
    text = shown([*REPORTS, record("warning", "careful")], is_terminal=False)
    assert text.split(" ", 1)[1] == "warning: careful\n"
