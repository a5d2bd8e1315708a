"""The receiver of a prompt from another worker: the request, and caches that are read in place.

`RemotePrompt` is one request whose prompt another worker computes or has cached. `PeerCaches` maps KV caches in device memory
of workers on the same machine: no block passes through the host.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.core.output import OutputListener
from paceline.core.request import ValidatedRequest
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.hooks import BlockPart, NumberPart, PromptImport
from paceline.models.blocks import layer_bytes, load_kernels, planes
from paceline.models.device import staging_bytes
from paceline.models.runner import ModelRunner
from paceline.policy.routing.kv_index import PeerHint
from paceline.transfer import ChannelUnavailable, DeviceMemory, TransferCancelled, TransferClient, TransferFailed
from paceline.wire.transfer_messages import MemoryRegion, TransferHandle

logger = logging.getLogger(__name__)

MAX_CACHES = 16
"""Caches of other workers that stay mapped."""


def share_cache(runner: ModelRunner, memory: DeviceMemory | None) -> list[MemoryRegion]:
    """Keys and values of every layer. Empty if other processes cannot map them. Caches that are divided among ranks are not
    shared, because rank 0 itself maps those of the remaining ranks and cannot pass them on."""
    if memory is None or runner.num_head_shares > 1 or len(runner.head_shares()[0]) > 1:
        return []
    try:
        return [memory.share(plane) for plane in planes(runner)]
    except ChannelUnavailable as unavailable:
        logger.info("blocks are sent through the host: %s", unavailable)
        return []


class PeerCaches:
    """Caches of other workers that this process has mapped, by process. Any thread may use it."""

    def __init__(self, runner: ModelRunner, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._num_planes = 2 * len(runner.cache)
        self._plane_bytes = layer_bytes(runner) // 2
        self._tested: dict[bytes, bool] = {}
        """Whether a process's memory can be mapped here."""
        self._planes: dict[bytes, list[Tensor]] = {}
        load_kernels(runner)

    def can_open(self, region: MemoryRegion | None) -> bool:
        """Whether this process can read caches of the worker that has this memory. The first call for a worker maps it."""
        if self._memory is None or region is None:
            return False
        if region.process not in self._tested:
            try:
                self._memory.open(region)
                self._tested[region.process] = True
            except ChannelUnavailable as unavailable:
                logger.info("a worker's blocks arrive through the host: %s", unavailable)
                self._tested[region.process] = False
        return self._tested[region.process]

    def open(self, regions: Sequence[MemoryRegion]) -> list[Tensor]:
        """Keys and values of every layer of another worker's cache: [num_blocks, BLOCK_SIZE, E] uint8. Raises TransferFailed if
        they are not a cache of this layout or cannot be mapped."""
        sizes = {region.size for region in regions}
        if (
            self._memory is None
            or len(regions) != self._num_planes
            or len(sizes) != 1
            or min(sizes) % self._plane_bytes
        ):
            raise TransferFailed("the worker's cache in memory has another layout than requested")
        process = regions[0].process
        found = self._planes.get(process)
        if found is None:
            try:
                opened = [self._memory.open(region) for region in regions]
            except ChannelUnavailable as unavailable:
                self._tested[process] = False
                raise TransferFailed(str(unavailable)) from None
            shape = min(sizes) // self._plane_bytes, BLOCK_SIZE, self._plane_bytes // BLOCK_SIZE
            found = [plane.view(shape) for plane in opened]
            while len(self._planes) >= MAX_CACHES:
                self._planes.pop(next(iter(self._planes)), None)
            self._planes[process] = found
        return found

    def close(self) -> None:
        self._planes.clear()


@dataclass(slots=True, eq=False)
class RemotePrompt:
    """A request that is not in the engine yet. `fail` ends it at any point."""

    request: ValidatedRequest
    listener: OutputListener
    ids: tuple[int, ...]
    """Prompt, and committed tokens of a request that moved here."""
    peer: PeerHint | None = None
    """Another target that has a prefix of it cached."""
    stop: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    """Reason of a failure. Empty if the caller cancelled the prompt."""
    worker: str = ""
    """Worker that computes it. Empty while that is undecided."""
    attempt: int = 0
    requested: float = 0.0
    """Time of the request to the worker."""
    deadline: float = 0.0
    tokens: int = 0
    """Tokens that the worker computes until it is done, including those queued before it."""
    incoming: PromptImport | None = None
    """Blocks reserved for it in this engine's cache."""
    has_started: bool = False
    """Whether the worker has accepted it."""

    @property
    def is_from_peer(self) -> bool:
        """Whether the blocks come from a peer's cache: they count as cached, unlike those of a prefill worker."""
        return self.peer is not None and self.worker == self.peer.worker

    def fail(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.stop.set()

    def fetch(
        self, client: TransferClient, handle: TransferHandle, seconds: float, open_cache: Callable[[], Sequence[Tensor]]
    ) -> int:
        """Fetch the blocks while the worker computes them. Returns the number of complete blocks of the prefix. These are all
        blocks, or those that arrived before the prompt was stopped or failed with `reason`. `open_cache` opens the worker's
        cache, to read it in place."""
        assert self.incoming is not None
        plan, missing = self.incoming.plan, set(range(len(self.incoming.plan.parts())))
        try:
            self._fetch(client, handle, seconds, missing, open_cache() if plan.in_place else ())
        except TransferCancelled:
            pass
        except TransferFailed as error:
            self.fail(str(error))
        except Exception as error:  # the request must continue after any error
            logger.exception("could not fetch a prompt: it is computed by this worker")
            self.fail(repr(error))
        if not missing:
            return plan.end
        if plan.in_place:  # the worker may have reused the blocks that were read
            return plan.first
        part = plan.parts()[min(missing)]  # parts are ordered by segment: all before it have arrived
        return part.start if isinstance(part, BlockPart) else part.stop // BLOCK_SIZE

    def _fetch(
        self,
        client: TransferClient,
        handle: TransferHandle,
        seconds: float,
        missing: set[int],
        sources: Sequence[Tensor],
    ) -> None:
        """Fetch all parts. Removes from `missing` those that are complete."""
        assert self.incoming is not None
        incoming, plan = self.incoming, self.incoming.plan
        parts, buffers = plan.parts(), dict[int, memoryview]()
        copied: set[int] = set()
        spare: dict[int, list[memoryview]] = {}
        """Buffers of parts that are in the cache, by size."""

        def get_buffer(index: int) -> memoryview:
            size = handle.sizes[index]
            if isinstance(parts[index], NumberPart):
                buffers[index] = memoryview(bytearray(size))
            else:
                buffers[index] = spare[size].pop() if spare.get(size) else staging_bytes(size, incoming.runner.device)
            return buffers[index]

        def on_part(index: int) -> None:
            part, data = parts[index], buffers.pop(index)
            if isinstance(part, NumberPart):
                incoming.copy(part, data, sources)
                copied.add(index)
            else:
                incoming.write(part, data)
                missing.discard(index)
                if isinstance(part, BlockPart):  # hidden states keep theirs
                    spare.setdefault(data.nbytes, []).append(data)

        if handle.sizes != [plan.size(part) for part in parts]:
            raise TransferFailed("the transfer has other sizes than requested")
        try:
            client.fetch(handle, range(len(parts)), get_buffer, on_part, self.stop, seconds)
        finally:
            incoming.finish()
        if copied:  # the worker holds the blocks while it offers the transfer: what was copied until now is intact
            client.fetch(handle, [min(copied)], get_buffer, lambda index: None, self.stop, seconds)
            missing -= copied
