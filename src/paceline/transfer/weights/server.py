"""The server of a worker's weights for workers that start.

`SendRate` limits how fast a worker sends its weights, by the effect on the requests that it serves.
"""

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
from paceline.models.device import side_stream, staging_bytes
from paceline.models.manifest.manifest import ExportedWeights, tensor_bytes
from paceline.transfer import DeviceMemory, Part, Transfer, TransferServer
from paceline.transfer.weights.peers import SharedParts
from paceline.transfer.weights.sources import (
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
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import Goodbye
from paceline.wire.keys import Security
from paceline.wire.transfer_messages import TransferHandle
from paceline.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

FIRST_RATE = 8e9
"""Bytes per second at first, while the worker serves requests and the effect is not known."""
MIN_RATE = 50e6
"""Bytes per second below which the rate never falls: a load must end."""
MAX_SLOWDOWN = 1.1
"""Time of a step while sending, relative to one without, above which the rate falls."""
FASTER, SLOWER = 1.5, 0.6
QUIET_STEPS, SENDING_STEPS = 8, 24
"""Steps of the two kinds of periods that alternate while the worker serves requests."""
PERIOD_SECONDS = 1.0
"""Longest period. A period that lasts so long has too few steps to compare."""
POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker does in addition to sending."""

    is_busy: bool = False
    """Whether it serves requests."""
    steps: int = 0
    """Steps since its start, or rounds of a draft worker."""


@dataclass(slots=True)
class _Period:
    started: float
    steps: int
    is_quiet: bool
    num_bytes: int = 0


class SendRate:
    """Rate at which a worker sends its weights to all clients together. A worker without requests sends as fast as it can,
    within the limit. Otherwise periods without and with sending alternate, and their times per step are compared."""

    def __init__(self, bytes_per_second: float) -> None:
        """`bytes_per_second` is the limit. 0 means no limit."""
        self._limit = bytes_per_second or float("inf")
        self.rate = min(FIRST_RATE, self._limit)
        """Bytes per second while the worker serves requests."""
        self._next = 0.0
        self._period: _Period | None = None
        self._quiet: float | None = None
        """Seconds per step without sending, of the last quiet period."""

    def wait(self, now: float, activity: Activity) -> float:
        """Seconds until the next chunk may be sent, or until the next call."""
        self._observe(now, activity)
        if self._period is not None and self._period.is_quiet:
            return POLL_SECONDS
        return max(0.0, self._next - now)

    def add(self, num_bytes: int, began: float, activity: Activity) -> None:
        """A chunk was sent, from `began` on."""
        if self._period is not None:
            self._period.num_bytes += num_bytes
        self._next = max(self._next, began) + num_bytes / (self.rate if activity.is_busy else self._limit)

    def _observe(self, now: float, activity: Activity) -> None:
        if not activity.is_busy:
            self._period = self._quiet = None
            return
        period = self._period
        if period is None:
            self._period = _Period(now, activity.steps, is_quiet=True)
            return
        steps, seconds = activity.steps - period.steps, now - period.started
        needed = QUIET_STEPS if period.is_quiet else SENDING_STEPS
        if steps < needed and seconds < PERIOD_SECONDS:
            return
        each = seconds / steps if steps >= needed else None
        if period.is_quiet:
            self._quiet = each
        elif each is not None and self._quiet is not None and period.num_bytes:
            self._adjust(each / self._quiet, period.num_bytes / seconds)
        self._period = _Period(now, activity.steps, not period.is_quiet)
        self._next = max(self._next, now)

    def _adjust(self, slowdown: float, sent: float) -> None:
        """`sent` is the number of bytes per second that were sent. A rate far above it would only show that something else is
        the limit."""
        if slowdown > MAX_SLOWDOWN:
            self.rate = max(MIN_RATE, SLOWER * min(self.rate, sent))
        elif sent > self.rate / 2:
            self.rate *= FASTER
        self.rate = min(self.rate, self._limit)


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
        """Weights that clients on this machine read in place. It is None if they cannot."""
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

    def withhold(self) -> None:
        """Refuse requests until `open`: the weights are being replaced."""
        self._weights = self._shared = None

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
