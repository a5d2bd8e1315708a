"""Counts that workers have made and are no longer there to report.

A worker that restarts counts from 0 again, and one that is away reports nothing. Added up over the workers that report, a count
would fall, and whoever takes rates of it would see all of it happen again.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from paceline.runtime.wire.report_messages import Report

Key = tuple[str, ...]
"""What is counted, then of which class of traffic, part or reason."""


def counts_of(report: Report) -> Iterator[tuple[Key, int | float]]:
    """Everything in a report that only grows."""
    yield ("preemptions",), report.preemptions
    yield ("invalid_drafts",), report.invalid_drafts
    yield ("audited",), report.audit.audited
    yield ("drifted",), report.audit.drifted
    yield ("dropped",), report.audit.dropped
    for name, count in (report.tiers or {}).items():
        if not name.endswith("_blocks") or name in ("bad_blocks", "dropped_blocks"):
            yield ("tiers", name), count
    for part, seconds in report.seconds.items():
        yield ("seconds", part), seconds
    for one in report.traffic:
        for name in ("tested", "kept", "drifts"):
            yield (name, one.method, one.category), getattr(one, name)
        for reason, count in one.fallbacks.items():
            yield ("fallbacks", one.method, one.category, reason), count


class PastReports:
    """From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, Report] = {}
        self._ended: Counter[Key] = Counter()

    def besides(self, reports: Sequence[Report]) -> Mapping[Key, float]:
        """What was counted by processes other than those that made `reports`, the last of each worker that reports now."""
        with self._lock:
            for report in reports:
                before = self._last.get(report.name)
                if before is not None and before.epoch != report.epoch:
                    self._ended.update(dict(counts_of(before)))
                self._last[report.name] = report
            here = {report.name for report in reports}
            counts = Counter(self._ended)
            for name, report in self._last.items():
                if name not in here:
                    counts.update(dict(counts_of(report)))
            return counts
