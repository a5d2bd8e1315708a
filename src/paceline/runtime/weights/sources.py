"""Sources that bring the parts of a model, side by side, each as fast as it can; one that fails is dropped."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from paceline.core.errors import PacelineError, UnsupportedModel
from paceline.kernels.cpu import native
from paceline.kernels.quantized import Quantization
from paceline.models.loading.arriving import Arrivals
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.weight_manifest import Manifest, part_sum, piece_tensors
from paceline.models.loading.weight_parts import Parts, Piece, StoredParts
from paceline.models.loading.weight_stock import tokenizer_to_tensor
from paceline.runtime.transfer.errors import TransferCancelled
from paceline.runtime.weights.queue import PartQueue

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Used by one thread."""

    name: str
    is_peer: bool

    def bring(self, part: int, cancelled: threading.Event) -> Mapping[str, Piece]:
        """Whatever it raises but `TransferCancelled` means that nothing more is to be had here."""
        ...

    def close(self) -> None: ...


class DiskSource:
    """A checkpoint of this machine."""

    name, is_peer = "disk", False

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        manifest: Manifest | None = None,
    ) -> None:
        """`manifest`: of the parts that came from elsewhere, with which those from here must make one model."""
        self._checkpoint, self._manifest = checkpoint, manifest
        self._parts = Parts.of(checkpoint.config)
        self._stored = StoredParts(checkpoint, device, dtype, quantization)

    def bring(self, part: int, cancelled: threading.Event) -> Mapping[str, Piece]:
        if part == self._parts.tokenizer:
            return {"tokenizer": tokenizer_to_tensor(self._checkpoint.read_tokenizer())}
        with native.quiet_torch():  # as in `build_model`
            pieces = self._stored.read(part)
        if self._manifest is not None:
            tensors = [tensor for piece in pieces.values() for tensor in piece_tensors(piece)]
            if part_sum(tensors) != self._manifest.parts[part].sum:
                raise UnsupportedModel(
                    f"the {self._parts.name(part)} on disk is not the one that the peers have: the checkpoint was changed "
                    "since they were started; start them anew, or restore it"
                )
        return pieces

    def close(self) -> None:
        pass


class Supply:
    """Threads of sources between a queue and the arrivals. When the last source is lost, `fallback` makes another; what it
    raises is what those who wait for a layer hear."""

    def __init__(self, arrivals: Arrivals, queue: PartQueue, fallback: Callable[[], Source] | None = None) -> None:
        self._arrivals, self._queue, self._fallback = arrivals, queue, fallback
        self._lock = threading.Lock()
        self._working: set[Source] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def num_peers(self) -> int:
        with self._lock:
            return len({source.name for source in self._working if source.is_peer})

    def add(self, *sources: Source) -> None:
        """All of them at once: none is taken for the last one before the others have begun."""
        with self._lock:
            if self._is_closed:
                return
            self._working.update(sources)
            for source in sources:
                name = f"paceline-weights-{source.name}"
                self._threads.append(threading.Thread(target=self._run, args=(source,), name=name, daemon=True))
                self._threads[-1].start()

    def close(self, error: PacelineError) -> None:
        """Stop. Whoever still waits for a part gets `error`."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        self._queue.close()
        if not self._arrivals.is_complete:
            self._arrivals.fail(error)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, source: Source) -> None:
        failure: Exception | None = None
        try:
            while failure is None and (errand := self._queue.take(source.name)) is not None:
                try:
                    pieces = source.bring(errand.part, errand.cancelled)
                except TransferCancelled:
                    self._queue.failed(errand)
                except Exception as error:
                    self._queue.failed(errand)
                    failure = error
                else:
                    if self._queue.brought(errand):
                        self._arrivals.put(errand.part, pieces)
        finally:
            source.close()
            self._lost(source, failure)

    def _lost(self, source: Source, failure: Exception | None) -> None:
        with self._lock:
            self._working.discard(source)
            is_last = not self._working and not self._is_closed
        if failure is None:
            return
        part = "the rest comes from elsewhere" if not is_last or self._fallback else "and it was the last one"
        logger.warning("no more weights from %s: %s; %s", source.name, failure, part)
        if not is_last or self._arrivals.is_complete:
            return
        if self._fallback is None:
            self._arrivals.fail(failure)
            return
        fallback, self._fallback = self._fallback, None
        try:
            self.add(fallback())
        except Exception as error:
            self._arrivals.fail(error)
