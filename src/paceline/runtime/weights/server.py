"""The server of a worker's weights for workers that start."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
from torch import Tensor

from paceline.core.clock import Clock, WallClock
from paceline.models.cuda_graph import side_stream, staging_bytes
from paceline.models.loading.weight_manifest import ExportedWeights, tensor_bytes
from paceline.runtime.transfer.device_memory import DeviceMemory
from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.transfer.transfer import Part, Transfer
from paceline.runtime.weights.device_parts import SharedParts
from paceline.runtime.weights.messages import (
    TO_WEIGHT_SERVER,
    FromWeightClient,
    PartReply,
    PartRequest,
    WeightsRefused,
    WeightsReply,
    WeightsRequest,
    chunk_ranges,
    encode_manifest,
)
from paceline.runtime.weights.send_rate import Activity, SendRate
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.messages import Goodbye
from paceline.runtime.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

MAX_CLIENTS = 32
"""Clients with a part in transfer."""
UNUSED_SECONDS = 60.0
"""Time after which a part that is ready and not read is withdrawn: its client is gone."""
IDLE_SECONDS = 0.25
NO_BYTES = memoryview(b"")


class _WatchedTransfer(Transfer):
    """A transfer that records when it was last read."""

    def __init__(self, sizes: Sequence[int], clock: Clock) -> None:
        super().__init__(sizes)
        self._clock = clock
        self.last_read = clock.now()

    def part(self, index: int) -> Part | None:
        self.last_read = self._clock.now()
        return super().part(index)


@dataclass(slots=True, eq=False)
class _PartTransfer:
    """A part in transfer to one client."""

    handle: TransferHandle
    transfer: _WatchedTransfer
    tensors: list[Tensor]
    remaining: Iterator[tuple[int, tuple[int, int, int]]]
    """Chunks that are not ready yet: index and (tensor, start, end)."""
    is_in_place: bool
    """Whether the client reads the tensors itself: a chunk is then a whole tensor, and the transfer has no bytes."""


class WeightServer:
    """Listens from its construction and refuses requests until `open`. Then it serves chunks, round-robin by client, within its
    rate limit."""

    def __init__(
        self,
        address: str,
        security: Security | None,
        bytes_per_second: float = 0.0,
        channels: Sequence[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._listener: Listener[FromWeightClient] = Listener(address, TO_WEIGHT_SERVER, security)
        self.address = self._listener.address
        self._transfer_server = TransferServer(urlsplit(self.address).hostname or "", security, channels)
        self._send_rate = SendRate(bytes_per_second)
        self._clock = clock or WallClock()
        self._activity: Callable[[], Activity] = Activity
        self._weights: ExportedWeights | None = None
        self._shared: SharedParts | None = None
        """Weights that clients on this machine read in place. None if they cannot."""
        self._stream: AbstractContextManager[object] = nullcontext()
        """Stream of the copies to the host."""
        self._parts: dict[Peer, _PartTransfer] = {}
        self._unfinished: deque[Peer] = deque()
        """Clients whose part has chunks that are not ready, in round-robin order."""
        self.num_bytes = 0
        """Bytes made ready for clients."""
        self.num_in_place_bytes = 0
        """Bytes, of `num_bytes`, that clients read from device memory."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-weight-server", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        return self._weights is not None

    def open(
        self,
        weights: ExportedWeights,
        activity: Callable[[], Activity] = Activity,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Serve these weights from now on, paced by `activity`. First computes their checksums on the calling thread. `memory`
        is that of the weights' device, if clients may read it."""
        _ = weights.manifest
        self._activity = activity
        self._stream = side_stream(weights.device)
        self._shared = None if memory is None else SharedParts(weights, memory)
        self._weights = weights

    def close(self) -> None:
        """Clients with a part in transfer get a goodbye. Safe to call twice."""
        self._stop.set()
        self._listener.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                wait = self._wait() if self._unfinished else IDLE_SECONDS
                received = self._listener.receive(min(wait, IDLE_SECONDS))
                if received is not None:
                    self._process(received.peer, received.message)
                elif self._unfinished and self._wait() <= 0.0:
                    self._fill_chunk()
                self._withdraw_unused()
        except Exception:
            logger.exception(
                "the weight server stopped: this worker keeps serving requests, but peers cannot load from it"
            )
        finally:
            for peer in self._parts:
                self._listener.send(peer, Goodbye("stopping"))
            self._transfer_server.close()
            self._listener.close()

    def _wait(self) -> float:
        return self._send_rate.wait(self._clock.now(), self._activity())

    def _process(self, peer: Peer, message: FromWeightClient | MalformedMessage) -> None:
        match message:
            case WeightsRequest():
                self._listener.send(peer, self._describe(message))
            case PartRequest():
                self._listener.send(peer, self._offer(peer, message))
            case Goodbye():
                self._withdraw(peer)

    def _describe(self, request: WeightsRequest) -> WeightsReply | WeightsRefused:
        if self._weights is None:
            return WeightsRefused("it is still loading")
        manifest = self._weights.manifest
        if manifest.form != request.form:
            return WeightsRefused(f"it holds weights as {manifest.form!r}, requested was {request.form!r}"[:512])
        if request.fingerprint and manifest.fingerprint != request.fingerprint:
            return WeightsRefused(f"it holds another checkpoint, with fingerprint {manifest.fingerprint}")
        return WeightsReply(encode_manifest(manifest), None if self._shared is None else self._shared.probe)

    def _offer(self, peer: Peer, request: PartRequest) -> PartReply | WeightsRefused:
        self._withdraw(peer)
        part = request.part
        if self._weights is None or part >= len(self._weights.manifest.parts):
            return WeightsRefused("there is no such part")
        if len(self._parts) >= MAX_CLIENTS:
            return WeightsRefused(f"it serves {MAX_CLIENTS} clients already")
        forms = self._weights.manifest.parts[part].tensors
        regions = self._shared.find(part) if request.in_place and self._shared is not None else []
        chunks = [(i, 0, form.nbytes) for i, form in enumerate(forms)] if regions else chunk_ranges(forms)
        sizes = [0 if regions else end - start for _, start, end in chunks]
        transfer = _WatchedTransfer(sizes, self._clock)
        handle = self._transfer_server.offer(transfer)
        tensors = self._weights.tensors(part)
        self._parts[peer] = _PartTransfer(handle, transfer, tensors, iter(enumerate(chunks)), bool(regions))
        self._unfinished.append(peer)
        return PartReply(part, handle, regions)

    def _fill_chunk(self) -> None:
        """Make one chunk ready, for the next client."""
        part = self._parts[self._unfinished[0]]
        chunk = next(part.remaining, None)
        if chunk is None:
            part.transfer.last_read = self._clock.now()
            self._unfinished.popleft()
            return
        index, (tensor, start, end) = chunk
        started = self._clock.now()
        self.num_bytes += end - start  # before `fill`: the client may have all chunks at once afterwards
        self.num_in_place_bytes += (end - start) * part.is_in_place
        with self._stream:
            data = NO_BYTES if part.is_in_place else _host_chunk(part.tensors[tensor], start, end)
        part.transfer.fill(index, data)
        self._send_rate.add(end - start, started, self._activity())
        self._unfinished.rotate(-1)

    def _withdraw(self, peer: Peer) -> None:
        part = self._parts.pop(peer, None)
        if part is not None:
            self._transfer_server.withdraw(part.handle)
            with suppress(ValueError):
                self._unfinished.remove(peer)

    def _withdraw_unused(self) -> None:
        limit = self._clock.now() - UNUSED_SECONDS
        unused = [
            p for p, served in self._parts.items() if served.transfer.last_read < limit and p not in self._unfinished
        ]
        for peer in unused:
            self._withdraw(peer)


@torch.inference_mode()
def _host_chunk(tensor: Tensor, start: int, end: int) -> memoryview:
    """The bytes of a tensor, as a view of host memory or a copy of device memory."""
    data = tensor.detach().reshape(-1).view(torch.uint8)[start:end]
    if data.is_cpu:
        return tensor_bytes(data)
    copy = staging_bytes(end - start, data.device)
    torch.frombuffer(copy, dtype=torch.uint8).copy_(data)
    return copy
