"""Cache events in vLLM's wire format: vLLM servers can feed the index, and vLLM's tools can read Paceline workers.

A batch is a msgpack array: time, events, rank. An event is a map with its type in the field `type`; vLLM before 0.24 sends an
array of the type and the same fields in order. This module writes maps. It reads maps and arrays, and also batches that are
maps.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Tier
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.messages import Token

Hash = int | bytes
MEDIUMS: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
TIERS: dict[str | None, Tier] = {None: "device", "DISK": "disk", **{medium: tier for tier, medium in MEDIUMS.items()}}
FIRST_GROUP = (None, 0)
"""Block groups that are read. Models with several kinds of attention have a group for each; the first is enough."""


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[Token]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """For each block, what its hash covers in addition to tokens. The first block of a sequence has the salt."""
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class EventBatch(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchArray(EventBatch, array_like=True):
    pass


_ENCODER = msgspec.msgpack.Encoder()
_BATCH_MAP = msgspec.msgpack.Decoder(EventBatch)
_BATCH_ARRAY = msgspec.msgpack.Decoder(_BatchArray)
_EVENT_MAP = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_EVENT_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def encode(events: Iterable[CacheEvent], now: float | None = None) -> bytes:
    """A batch. Consecutive blocks of a chain become one event."""
    wire = [msgspec.Raw(_ENCODER.encode(_to_wire(event))) for event in _join(events)]
    return _ENCODER.encode(_BatchArray(time.time() if now is None else now, wire, 0))


def decode(data: bytes) -> list[CacheEvent]:
    """The events of a batch that routing can use. Raises `MalformedMessage`."""
    try:
        batch: EventBatch = _BATCH_ARRAY.decode(data) if _is_array(data) else _BATCH_MAP.decode(data)
        decoded = [(_EVENT_ARRAY if _is_array(raw) else _EVENT_MAP).decode(raw) for raw in map(bytes, batch.events)]
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise MalformedMessage(str(error)[:200]) from None
    return [event for wire in decoded if (event := _from_wire(wire)) is not None]


def short_key(key: Any) -> Any:
    """The first eight bytes of a key as an integer. They identify a block of one worker, and halve the index."""
    return int.from_bytes(key[:8], "big") if isinstance(key, bytes) else key


def _join(events: Iterable[CacheEvent]) -> Iterator[CacheEvent]:
    """Join consecutive events: caches store and evict block by block."""
    run: list[Any] = []
    for event in events:
        if run and not _can_join(run[-1], event):
            yield _merge(run)
            run = []
        run.append(event)
    if run:
        yield _merge(run)


def _can_join(last: CacheEvent, event: CacheEvent) -> bool:
    match last, event:
        case BlocksStored(), BlocksStored():
            return event.parent == last.keys[-1] and event.tier == last.tier
        case BlocksRemoved(), BlocksRemoved():
            return event.tier == last.tier
        case _:
            return False


def _merge(run: list[Any]) -> CacheEvent:
    first: CacheEvent = run[0]
    match first:
        case BlocksStored():
            keys, tokens = [k for event in run for k in event.keys], [t for event in run for t in event.tokens]
            return replace(first, keys=keys, tokens=tokens)
        case BlocksRemoved():
            return replace(first, keys=[key for event in run for key in event.keys])
        case CacheCleared():
            return first


def _to_wire(event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case BlocksStored():
            extra: list[list[Any] | None] | None = None
            if event.salt and event.parent is None:
                extra = [[event.salt], *[None] * (len(event.keys) - 1)]
            return BlockStored(
                block_hashes=[short_key(key) for key in event.keys],
                parent_block_hash=short_key(event.parent),
                token_ids=list(event.tokens),
                block_size=event.block_size,
                medium=MEDIUMS[event.tier],
                extra_keys=extra,
            )
        case BlocksRemoved():
            return BlockRemoved([short_key(key) for key in event.keys], MEDIUMS[event.tier])
        case CacheCleared():
            return AllBlocksCleared()


def _from_wire(event: BlockStored | BlockRemoved | AllBlocksCleared) -> CacheEvent | None:
    """None for blocks that no prompt can hit."""
    match event:
        case BlockStored():
            tier = TIERS.get(event.medium)
            salt = _salt(event)
            if tier is None or salt is None or not event.block_hashes or event.group_idx not in FIRST_GROUP:
                return None
            return BlocksStored(
                event.block_hashes, event.parent_block_hash, event.token_ids, salt, tier, event.block_size
            )
        case BlockRemoved():
            tier = TIERS.get(event.medium)
            return (
                None if tier is None or event.group_idx not in FIRST_GROUP else BlocksRemoved(event.block_hashes, tier)
            )
        case AllBlocksCleared():
            return CacheCleared()


def _salt(event: BlockStored) -> str | None:
    """The salt of the blocks. None if they depend on more than tokens and a salt, such as an adapter or an image."""
    extra: Sequence[list[Any] | None] = event.extra_keys or ()
    if event.lora_id is not None or event.lora_name is not None or any(extra[1:]):
        return None
    first = extra[0] if extra else None
    if not first:
        return ""
    is_salt = event.parent_block_hash is None and len(first) == 1 and isinstance(first[0], str)
    return first[0] if is_salt else None


def _is_array(data: bytes) -> bool:
    return bool(data) and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))
