"""The timeline of the dashboard: changes of workers, symptoms and flags, found by comparing samples."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.speculation import SpeculationFlags
from paceline.core.status.worker import WorkerStatus

MAX_EVENTS = 50
FLAG_NAMES = {"enabled": "speculation", "method": "method", "max_depth": "maximum depth"}


@dataclass(frozen=True, slots=True)
class Event:
    time: float
    """Seconds since 1970, of the sample that shows it."""
    text: str
    is_bad: bool = False


class Timeline:
    """Recent events, oldest first. The first update adds none: their time is unknown."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerStatus] | None = None
        self._flags: SpeculationFlags | None = None
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def update(self, workers: Iterable[WorkerStatus], flags: SpeculationFlags, now: float) -> None:
        """Compare with the previous call."""
        current = {worker.name: worker for worker in workers}
        if self._workers is not None and self._flags is not None:
            for text, is_bad in (*_worker_changes(self._workers, current), *_flag_changes(self._flags, flags)):
                self._events.append(Event(now, text, is_bad))
        self._workers, self._flags = current, flags


def _worker_changes(before: dict[str, WorkerStatus], now: dict[str, WorkerStatus]) -> list[tuple[str, bool]]:
    changes = [(f"{name} left", True) for name in before.keys() - now.keys()]
    for name, worker in now.items():
        old = before.get(name)
        if old is None:
            changes.append((f"{name} joined", False))
            continue
        if worker.life.last_exit and worker.life.started is None and old.life.started is not None:
            changes.append((f"{name} exited: {worker.life.last_exit}", True))
        if worker.life.restarts > old.life.restarts:
            changes.append((f"{name} restarted; its last exit: {worker.life.last_exit or 'unknown'}", True))
        if worker.state != old.state and not worker.state.startswith("loading"):
            changes.append((f"{name} is {worker.state}", worker.state in ("suspected", "unhealthy")))
        names, old_names = ({symptom.name for symptom in status.symptoms} for status in (worker, old))
        changes += [(f"{name}: {_words(symptom)}", True) for symptom in sorted(names - old_names)]
        changes += [(f"{name}: no more {_words(symptom)}", False) for symptom in sorted(old_names - names)]
    return changes


def _flag_changes(before: SpeculationFlags, now: SpeculationFlags) -> list[tuple[str, bool]]:
    changes = []
    for name, shown in FLAG_NAMES.items():
        value = getattr(now, name)
        if value != getattr(before, name):
            text = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
            changes.append((f"{shown}: {text}", False))
    return changes


def _words(name: str) -> str:
    return name.replace("_", " ")
