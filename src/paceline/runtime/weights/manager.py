"""A worker's weights: how they reach it, and how it gives them to the next."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from paceline.core.errors import EngineClosed
from paceline.kernels.quantized import Quantization
from paceline.models.loading.load import LoadedModel
from paceline.runtime.weights.loader import LoadProgress, WeightLoader
from paceline.runtime.weights.server import WeightDoor
from paceline.runtime.weights.spec import WeightSpec
from paceline.runtime.wire.keys import Security

logger = logging.getLogger(__name__)


class WeightSide:
    """Made before the model, closed before the engine. `load` once, then `follow`."""

    def __init__(self, spec: WeightSpec | None, security: Security | None, kinds: Sequence[str] | None = None) -> None:
        """`spec` None: from disk, and given to nobody. `security`: of workers of one role among themselves."""
        self._loader = WeightLoader(() if spec is None else spec.peers, security, kinds)
        self._door = None if spec is None else WeightDoor(spec.address, security, spec.bytes_per_second, kinds)
        self._loaded: LoadedModel | None = None
        self._thread: threading.Thread | None = None
        self._is_settled = False

    @property
    def address(self) -> str:
        """Of the door; empty without one."""
        return "" if self._door is None else self._door.address

    @property
    def progress(self) -> LoadProgress | None:
        """None when the worker is all there."""
        progress = self._loader.progress
        if progress is None and self._loaded is not None and not self._is_settled:
            layers = self._loaded.config.num_layers
            return LoadProgress(layers, layers, 0)
        return progress

    @property
    def error(self) -> Exception | None:
        """Why the rest of the model will never come: the worker is of no use."""
        return self._loader.error

    def load(
        self, name: str, device: torch.device, dtype: torch.dtype, quantization: Quantization | None
    ) -> LoadedModel:
        """As `build_engine` wants it."""
        self._loaded = self._loader.load(name, device, dtype, quantization)
        return self._loaded

    def wait(self) -> None:
        """Until all weights are there. Raises when they never will be."""
        assert self._loaded is not None
        self._loader.stock(self._loaded)

    def follow(self, complete: Callable[[], None], is_busy: Callable[[], bool]) -> None:
        """Call `complete`, on another thread, when all weights are there; from then on they are given away, slower while
        `is_busy`."""
        if self._loaded is None:  # by ranks, which have loaded all of theirs
            self._is_settled = True
            return
        if self._door is not None:
            self._door.is_busy = is_busy
        self._thread = threading.Thread(target=self._finish, args=(complete,), name="paceline-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop loading and giving. A pass that waits for a layer fails."""
        self._loader.close()
        if self._door is not None:
            self._door.close()
        if self._thread is not None:
            self._thread.join()

    def _finish(self, complete: Callable[[], None]) -> None:
        assert self._loaded is not None
        try:
            stock = self._loader.stock(self._loaded)
        except Exception:  # `error` says so to whoever watches over the worker
            return
        logger.info("all %d layers are there", self._loaded.config.num_layers)
        try:
            complete()
            if self._door is not None:
                self._door.open(stock)
        except EngineClosed:  # stopped meanwhile
            pass
        except Exception:
            logger.exception("the weights are there and are not given to others")
        finally:
            self._is_settled = True
