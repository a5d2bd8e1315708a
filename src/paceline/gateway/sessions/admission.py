"""The gateway's queue: which waiting request starts next, and which is refused. Decisions only; the gateway carries them out.

Keys share the target by tokens, after Virtual Token Counters (Sheng et al., OSDI 2024). A key has a counter of the tokens
it was served, divided by its weight, and the waiting key with the smallest counter is next. A key that comes back starts at the
smallest counter of the waiting keys, so idle time earns nothing. A lower priority number goes first, whatever the counters.

`RetryAfter` says when a rejected client may try again: the Retry-After header.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.gateway.auth import ApiKey

OUTPUT_COST = 2.0
"""Cost of an output token in prompt tokens: it takes a step of its own."""
EXPECTED_OUTPUT = 256
"""Output tokens for which KV is set aside at the start; longer outputs may preempt."""


@dataclass(eq=False, slots=True)
class AdmissionEntry:
    """One request in the queue or at the target."""

    id: str
    key: ApiKey
    priority: int
    num_choices: int
    prompt_tokens: int
    kv_tokens: int
    """Tokens of KV cache that the request will need, as far as it is known."""
    is_displaceable: bool = True
    """Whether a refusal is still possible: nothing of its HTTP request has started."""
    left: int = field(init=False)
    """Unfinished choices."""

    def __post_init__(self) -> None:
        self.left = self.num_choices


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What the target can run, and what may wait."""

    max_running: int
    """Choices in the batch."""
    ahead: int
    """Choices that may wait at the target itself, so that a free place is taken in the next step."""
    kv_tokens: int
    max_waiting: int
    """Choices that may wait in all."""
    max_waiting_tokens: int
    """Prompt tokens that may wait in the queue."""


def kv_needed(prompt_tokens: int, max_tokens: int, num_choices: int) -> int:
    """KV tokens of a request whose choices share their prompt."""
    return prompt_tokens + num_choices * min(max_tokens, EXPECTED_OUTPUT)


class AdmissionQueue:
    """Entries that wait, and entries that run. All calls must come from one thread; any thread may read the two counts."""

    def __init__(self, reserved: Callable[[], Mapping[str, float]] = dict) -> None:
        """`reserved` returns, by key id, the share of the target that other keys may not use."""
        self._reserved = reserved
        self._waiting: dict[str, list[AdmissionEntry]] = {}  # by key id, in order of arrival
        self._running: set[AdmissionEntry] = set()
        self._counters: dict[str, float] = {}
        self.num_waiting = 0
        """Choices that wait."""
        self.waiting_tokens = 0
        """Prompt tokens that wait."""

    @property
    def num_admitted(self) -> int:
        """Unfinished choices, waiting and running."""
        return self.num_waiting + sum(entry.left for entry in self._running)

    def displaced(self, entry: AdmissionEntry, capacity: AdmissionLimits) -> list[AdmissionEntry] | None:
        """Entries to refuse in favour of `entry`. None if `entry` itself must be refused.

        A full queue refuses the newest entries of the key that has the most waiting, if that is more than `entry`'s key has.
        """
        own = [other for other in (*self._running, *self._all_waiting()) if other.key.id == entry.key.id]
        places = self._places(entry.key.id, capacity)
        if places and sum(other.left for other in own) + entry.num_choices <= places:
            return []
        choices = self.num_admitted + entry.num_choices - capacity.max_running - capacity.max_waiting
        tokens = self.waiting_tokens + entry.prompt_tokens - capacity.max_waiting_tokens
        if not self._waiting:  # a prompt that is longer than the queue may wait alone
            tokens = 0
        load = {
            key: sum(queued.left / queued.key.share.weight for queued in queue) for key, queue in self._waiting.items()
        }
        refused: list[AdmissionEntry] = []
        while choices > 0 or tokens > 0:
            victim = self._victim(entry, load, refused)
            if victim is None:
                return None
            refused.append(victim)
            load[victim.key.id] -= victim.left / victim.key.share.weight
            choices -= victim.left
            tokens -= victim.prompt_tokens
        return refused

    def add(self, entry: AdmissionEntry) -> None:
        key = entry.key.id
        if key not in self._waiting:
            others = [self._counters[other] for other in self._waiting]
            self._counters[key] = max(self._counters.get(key, 0.0), min(others, default=0.0))
        self._waiting.setdefault(key, []).append(entry)
        self.num_waiting += entry.num_choices
        self.waiting_tokens += entry.prompt_tokens

    def take(self, capacity: AdmissionLimits) -> Iterator[AdmissionEntry]:
        """Entries to start now, in order. They count as running from here on."""
        while (entry := self._next(capacity)) is not None:
            self._leave_queue(entry)
            self._running.add(entry)
            self.spend(entry, entry.prompt_tokens)
            yield entry

    def spend(self, entry: AdmissionEntry, tokens: float) -> None:
        """Counts tokens that the entry's key was served."""
        self._counters[entry.key.id] = self._counters.get(entry.key.id, 0.0) + tokens / entry.key.share.weight

    def finish_choice(self, entry: AdmissionEntry) -> None:
        entry.left -= 1
        if not entry.left:
            self.remove(entry)

    def remove(self, entry: AdmissionEntry) -> None:
        """Ends an entry in any state. A second call does nothing."""
        if entry in self._running:
            self._running.remove(entry)
        elif entry in self._waiting.get(entry.key.id, ()):
            self._leave_queue(entry)

    def _leave_queue(self, entry: AdmissionEntry) -> None:
        queue = self._waiting[entry.key.id]
        queue.remove(entry)
        self.num_waiting -= entry.num_choices
        self.waiting_tokens -= entry.prompt_tokens
        if not queue:
            del self._waiting[entry.key.id]

    def _all_waiting(self) -> Iterator[AdmissionEntry]:
        return (entry for queue in self._waiting.values() for entry in queue)

    def _next(self, capacity: AdmissionLimits) -> AdmissionEntry | None:
        heads = [min(queue, key=lambda entry: entry.priority) for queue in self._waiting.values()]
        running = Counter(entry.key.id for entry in self._running)
        heads.sort(key=lambda entry: (entry.priority, self._counters[entry.key.id], running[entry.key.id]))
        for entry in heads:
            if not self._fits(entry, capacity, kept=0.0):
                return None  # no smaller entry overtakes it, or it would wait for ever
            if self._fits(entry, capacity, kept=self._kept_from(entry.key.id, capacity)):
                return entry
        return None

    def _fits(self, entry: AdmissionEntry, capacity: AdmissionLimits, kept: float) -> bool:
        """Whether the target has places and KV for the entry. `kept` is the share that stays free for other keys."""
        if not self._running:
            return True
        choices = sum(admitted.left for admitted in self._running) + entry.num_choices
        if choices > capacity.max_running * (1 - kept) + capacity.ahead * (kept == 0):
            return False
        kv = sum(admitted.kv_tokens for admitted in self._running) + entry.kv_tokens
        return kv <= capacity.kv_tokens * (1 - kept)

    def _kept_from(self, key: str, capacity: AdmissionLimits) -> float:
        """Share of the target that other keys have reserved and do not use."""
        used: defaultdict[str, int] = defaultdict(int)
        for entry in self._running:
            used[entry.key.id] += entry.left
        shares = self._reserved().items()
        return sum(max(0.0, share - used[other] / capacity.max_running) for other, share in shares if other != key)

    def _places(self, key: str, capacity: AdmissionLimits) -> int:
        return int(self._reserved().get(key, 0.0) * capacity.max_running)

    def _victim(
        self, entry: AdmissionEntry, load: Mapping[str, float], refused: list[AdmissionEntry]
    ) -> AdmissionEntry | None:
        """The entry to refuse next, so that the keys' waiting choices become more equal."""
        own = load.get(entry.key.id, 0.0) + entry.num_choices / entry.key.share.weight
        for key in sorted(load, key=lambda key_id: load[key_id], reverse=True):
            if key == entry.key.id or load[key] <= own:
                return None
            for candidate in reversed(self._waiting[key]):
                if candidate.is_displaceable and candidate not in refused and candidate.priority >= entry.priority:
                    return candidate
        return None


MAX_RETRY_AFTER = 60
"""Seconds; largest value of the header."""
NUM_FINISH_TIMES = 64
"""Finish times that give the rate."""


class RetryAfter:
    """The time until the queue is empty, at the recent rate of finished choices. The caller passes the time, in seconds."""

    def __init__(self) -> None:
        self._finish_times: deque[float] = deque(maxlen=NUM_FINISH_TIMES)

    def add_finish(self, now: float) -> None:
        """A choice has finished."""
        self._finish_times.append(now)

    def clear(self) -> None:
        """The server is idle: that says nothing about the rate of the next burst."""
        self._finish_times.clear()

    def seconds(self, num_waiting: int) -> int:
        """Value of the header while `num_waiting` choices wait."""
        times = self._finish_times
        if len(times) < 2:
            return 1
        per_choice = (times[-1] - times[0]) / (len(times) - 1)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(per_choice * num_waiting)))
