"""Keeps responses in memory, for `previous_response_id`, references to items, and GET and DELETE /v1/responses/{id}.

A key sees its own responses alone. Entries, bytes and age are bounded; the oldest responses leave first: those of the key if it
has too many, those of all keys if all have.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.gateway.api.responses_bodies import InputItem


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of the stored responses."""

    entries_per_key: int = 1000
    bytes_per_key: int = 32 * 2**20
    bytes_in_all: int = 128 * 2**20
    seconds: float = 24 * 3600.0
    """Age at which a response is forgotten."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response, and the conversation up to it."""

    response: Mapping[str, Any]
    """The body that the client received."""
    items: tuple[InputItem, ...]
    """All items of the conversation, those of the answer included."""
    answered: Mapping[str, InputItem]
    """The items of the answer, by id."""

    @property
    def num_bytes(self) -> int:
        """Size of the texts that it holds."""
        texts = sum(len(item.model_dump_json()) for item in self.items)
        return texts + len(json.dumps(self.response, ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredResponse
    size: int
    since: float


class ResponseStore:
    """The stored responses of one gateway process. All calls come from its event loop."""

    def __init__(self, clock: Callable[[], float], limits: StoreLimits | None = None) -> None:
        self._clock, self._limits = clock, limits or StoreLimits()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        """By key and response id, the oldest first."""
        self._sizes: dict[str, tuple[int, int]] = {}
        """Number of entries and bytes of each key."""

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._sizes.values())

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, stored: StoredResponse) -> None:
        """Keeps the response. The oldest ones leave if there are too many. One that is larger than all that a key may keep is
        not kept."""
        size = stored.num_bytes
        if size > self._limits.bytes_per_key:
            return
        self._entries[key, stored.response["id"]] = _Entry(stored, size, self._clock())
        self._count(key, 1, size)
        while self._is_over(key):
            self._remove(next(place for place in self._entries if place[0] == key))
        while self.num_bytes > self._limits.bytes_in_all:
            self._remove(next(iter(self._entries)))
        self._forget_old()

    def get(self, key: str, response_id: str) -> StoredResponse | None:
        self._forget_old()
        entry = self._entries.get((key, response_id))
        return None if entry is None else entry.stored

    def delete(self, key: str, response_id: str) -> bool:
        """Returns whether there was such a response."""
        if (key, response_id) not in self._entries:
            return False
        self._remove((key, response_id))
        return True

    def item(self, key: str, item_id: str) -> InputItem | None:
        """The item of one of the key's answers."""
        self._forget_old()
        own = (entry.stored.answered for (owner, _), entry in reversed(self._entries.items()) if owner == key)
        return next((items[item_id] for items in own if item_id in items), None)

    def _is_over(self, key: str) -> bool:
        count, size = self._sizes[key]
        return count > self._limits.entries_per_key or size > self._limits.bytes_per_key

    def _forget_old(self) -> None:
        oldest = self._clock() - self._limits.seconds
        while self._entries and next(iter(self._entries.values())).since < oldest:
            self._remove(next(iter(self._entries)))

    def _remove(self, place: tuple[str, str]) -> None:
        self._count(place[0], -1, -self._entries.pop(place).size)

    def _count(self, key: str, entries: int, size: int) -> None:
        count, total = self._sizes.get(key, (0, 0))
        if count + entries:
            self._sizes[key] = count + entries, total + size
        else:
            del self._sizes[key]
