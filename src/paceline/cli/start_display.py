"""What a terminal shows while a model loads: a bar for the phase that runs, and a line with the time of each that has ended."""

import json
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from paceline.core.machine import PhaseReport
from paceline.telemetry import text_line

PAUSE = "prepare"
"""Name of the bar while no phase runs."""
SHORT_SECONDS = 0.05
"""Phases that took less time have no line."""


class _Elapsed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0.0:.0f} s", "dim")


class StartDisplay:
    """A context that shows `first` until the first report. Threads may call `report` and `receive`. Without a terminal it shows
    nothing but log lines."""

    def __init__(self, console: Console, first: str, is_verbose: bool = False) -> None:
        """`is_verbose` says whether log lines of level `info` are shown while the model loads."""
        self._console, self._first, self._is_verbose = console, first, is_verbose
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._is_starting = False
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _Elapsed(),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._is_starting, self._began = True, time.perf_counter()
        self._progress.start()
        self._begin(self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """The start is over. Later log lines are all shown, and reports of phases no longer. May be called twice."""
        with self._lock:
            if self._is_starting:
                self._end(self._first, time.perf_counter() - self._began)
                self._is_starting = False
                self._progress.stop()

    def report(self, report: PhaseReport) -> None:
        with self._lock:
            if not self._is_starting:
                return
            self._end(self._first, time.perf_counter() - self._began)
            if report.seconds is not None:
                self._end(report.phase, report.seconds, report.note)
            else:
                task = self._begin(report.phase)
                if report.done is not None:
                    self._progress.update(task, total=1.0, completed=report.done)

    def receive(self, line: str) -> None:
        """A line that a worker or a server has written: a report, a log record, or text."""
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        report = PhaseReport.of_record(record)
        if report is not None:
            self.report(report)
        elif not isinstance(record, dict) or "message" not in record:
            self._console.print(line, markup=False)
        elif self._is_verbose or not self._is_starting or record["level"] not in ("info", "debug"):
            self._console.print(text_line(record), markup=False)

    def _begin(self, name: str) -> TaskID:
        if PAUSE in self._tasks and name != PAUSE:
            self._progress.remove_task(self._tasks.pop(PAUSE))
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None)
        return self._tasks[name]

    def _end(self, name: str, seconds: float, note: str = "") -> None:
        """Replace the bar of a phase by a line. A phase without a bar has ended before."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)
        if not self._tasks and name != PAUSE:
            self._begin(PAUSE)
        if (
            name != PAUSE
            and (task is not None or name != self._first)
            and seconds >= SHORT_SECONDS
            and self._console.is_terminal
        ):
            line = Text.assemble((f"{name:<16} {seconds:5.1f} s", ""), (f"  {note}" if note else "", "dim"))
            self._console.print(line)
