"""A cached block below the device, and the decision whether loading it is faster than computing it again.

`TieredBlock` is the metadata of a block. Its file has a header page and the contents. `LoadRates` decides from measurements
alone; it is pure.
"""

import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.core.kv_events import BlocksStored, Tier
from paceline.core.sequence import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class TieredBlock:
    """A full block of committed tokens. The key includes the tenant's salt, so only that tenant can find the block, in every
    tier."""

    key: bytes
    parent: bytes | None
    """Key of the block before it; None for the first block of a sequence."""
    tokens: bytes
    """`BLOCK_SIZE` token ids as int32."""
    salt: str = ""

    @classmethod
    def of(cls, event: BlocksStored) -> "TieredBlock":
        """The block of an event about one block."""
        (key,) = event.keys
        assert isinstance(key, bytes)
        assert event.parent is None or isinstance(event.parent, bytes)
        return cls(key, event.parent, array("i", event.tokens).tobytes(), event.salt)

    def stored(self, tier: Tier) -> BlocksStored:
        return BlocksStored((self.key,), self.parent, tuple(array("i", self.tokens)), self.salt, tier, BLOCK_SIZE)


def parents_first(blocks: Iterable[TieredBlock]) -> Iterator[TieredBlock]:
    """The blocks, each after its parent. A block whose chain is incomplete is left out, because no prefix can hit it."""
    following: dict[bytes | None, list[TieredBlock]] = {}
    for block in blocks:
        following.setdefault(block.parent, []).append(block)
    pending = following.get(None, [])[::-1]
    while pending:
        block = pending.pop()
        yield block
        pending.extend(reversed(following.get(block.key, ())))


HEADER_BYTES = 4096
"""One page, so that the contents are aligned."""
MAGIC = b"paceline/kv/1\n\0\0"
# fingerprint, key, parent, has a parent, tokens, bytes of the salt, bytes and checksum of the contents
_FIELDS = struct.Struct(f"<16s32s32s32s?{4 * BLOCK_SIZE}sHQI")
_SUM = struct.Struct("<I")
MAX_SALT_BYTES = HEADER_BYTES - _FIELDS.size - _SUM.size


class BadBlock(Exception):
    """The file is truncated, altered, or belongs to another model."""


def pack_header(block: TieredBlock, fingerprint: bytes, contents: memoryview) -> bytes | None:
    """The header page; None if the salt is too long for it."""
    salt = block.salt.encode("utf-8", "surrogatepass")
    if len(salt) > MAX_SALT_BYTES:
        return None
    fields = _FIELDS.pack(
        MAGIC,
        fingerprint,
        block.key,
        block.parent or bytes(32),
        block.parent is not None,
        block.tokens,
        len(salt),
        len(contents),
        zlib.crc32(contents),
    )
    page = (fields + salt).ljust(HEADER_BYTES - _SUM.size, b"\0")
    return page + _SUM.pack(zlib.crc32(page))


def unpack_header(page: bytes | memoryview, fingerprint: bytes) -> tuple[TieredBlock, int, int]:
    """The block, and the size and checksum of its contents."""
    if len(page) != HEADER_BYTES:
        raise BadBlock("the header is truncated")
    body = bytes(page[: -_SUM.size])
    magic, model, key, parent, has_parent, tokens, salt_len, size, crc = _FIELDS.unpack_from(body)
    if magic != MAGIC:
        raise BadBlock("it is not a block, or has another version")
    if _SUM.pack(zlib.crc32(body)) != page[-_SUM.size :]:
        raise BadBlock("the header was altered")
    if model != fingerprint:
        raise BadBlock("it belongs to another model or cache format")
    try:
        salt = body[_FIELDS.size : _FIELDS.size + salt_len].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise BadBlock("its salt is not text") from None
    return TieredBlock(key, parent if has_parent else None, tokens, salt), size, crc


def check_contents(contents: memoryview, crc: int) -> None:
    if zlib.crc32(contents) != crc:
        raise BadBlock("its contents were altered")


Source = Literal["disk", "peer"]
MEMORY = 0.9
"""Weight of earlier measurements when a new one is added."""
LEAST_ROWS = 64
"""Fewest rows of a pass that is measured: smaller passes are not typical of prefill."""
MARGIN = 0.9
"""Largest share of the compute time that loading may take, because loading can fail."""
RETRY = 32
"""One in this many declined loads is tried anyway, to measure a source that may be fast again."""


class Rate:
    """Seconds per token, with exponentially fading measurements."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._seconds = MEMORY * self._seconds + seconds
        self._tokens = MEMORY * self._tokens + tokens

    @property
    def value(self) -> float | None:
        """None before the first measurement."""
        return self._seconds / self._tokens if self._tokens else None


class LoadRates:
    """Seconds per token: of prefill, and of loading from each source."""

    def __init__(self) -> None:
        self._prefill = Rate()
        self._sources: dict[Source, Rate] = {"disk": Rate(), "peer": Rate()}
        self._declined: dict[Source, int] = {"disk": 0, "peer": 0}

    def observe_compute(self, rows: int, seconds: float) -> None:
        """Add the time of a pass."""
        if rows >= LEAST_ROWS:
            self._prefill.add(rows, seconds)

    def observe_load(self, source: Source, tokens: int, seconds: float) -> None:
        self._sources[source].add(tokens, seconds)

    def seconds_to_compute(self, tokens: int) -> float | None:
        """None before the first measurement."""
        value = self._prefill.value
        return None if value is None else value * tokens

    def pays(self, source: Source) -> bool:
        """Whether to load from this source. It is true before the first measurement."""
        computing, bringing = self._prefill.value, self._sources[source].value
        if computing is None or bringing is None or bringing <= MARGIN * computing:
            return True
        self._declined[source] += 1
        return self._declined[source] % RETRY == 0
