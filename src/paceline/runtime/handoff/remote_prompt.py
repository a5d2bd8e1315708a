"""One request whose prompt another worker computes or has cached."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.cluster.routing.kv_index import PeerHint
from paceline.core.output import OutputListener
from paceline.core.request import Request
from paceline.engine.hooks.handoff_plan import BlockPart, NumberPart
from paceline.engine.hooks.imports import PromptImport
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.cuda_graph import staging_bytes
from paceline.runtime.transfer.client import TransferClient
from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.transfer.transfer import TransferCancelled, TransferFailed

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RemotePrompt:
    """A request that is not in the engine yet. `fail` ends it at any point."""

    request: Request
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
