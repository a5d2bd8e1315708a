"""A worker's weights: loading them, and serving them to other workers."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from paceline.core.errors import EngineClosed, UnsupportedModel
from paceline.kernels.quantized import Quantization
from paceline.kernels.weights import Activations
from paceline.models.loading.load import LoadedModel
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.ranks import Ranks
from paceline.runtime.transfer.device_memory import device_memory
from paceline.runtime.weights.loader import WeightLoader
from paceline.runtime.weights.send_rate import Activity
from paceline.runtime.weights.server import WeightServer
from paceline.runtime.weights.spec import WeightSpec
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.target_messages import LoadProgress

logger = logging.getLogger(__name__)


class WeightManager:
    """Created before the model and closed before the engine. Call `load` or `load_ranks` once, then `start`."""

    def __init__(
        self, spec: WeightSpec | None, security: Security | None, channels: Sequence[str] | None = None
    ) -> None:
        """If `spec` is None, the model is loaded from disk and nothing is served. `security` holds the keys that workers of one
        role use among themselves."""
        self._loader = WeightLoader(() if spec is None else spec.peers, security, channels)
        self._channels = channels
        self._server = None if spec is None else WeightServer(spec.address, security, spec.bytes_per_second, channels)
        self._loaded: LoadedModel | None = None
        self._thread: threading.Thread | None = None
        self._is_ready = False

    @property
    def address(self) -> str:
        """Address of the weight server. Empty without a weight server."""
        return "" if self._server is None else self._server.address

    @property
    def is_serving(self) -> bool:
        """Whether other workers can load from this worker."""
        return self._server is not None and self._server.is_open

    @property
    def progress(self) -> LoadProgress | None:
        """Progress of loading. None when the worker is ready."""
        progress = self._loader.progress
        if progress is None and self._loaded is not None and not self._is_ready:
            layers = self._loaded.config.num_layers
            return LoadProgress(layers, layers, 0)
        return progress

    @property
    def error(self) -> Exception | None:
        """The error that ended loading; the worker cannot serve then."""
        return self._loader.error

    def load(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        activations: Activations = "int8",
    ) -> LoadedModel:
        """The model, as `build_engine` expects it. Layers may still be loading."""
        self._loaded = self._loader.load(name, device, dtype, quantization, activations)
        return self._loaded

    def load_ranks(self, spec: RankSpec) -> tuple[LoadedModel, Ranks]:
        """The model of several ranks, completely loaded, as `build_engine` expects it."""
        self._loaded, ranks = self._loader.load_ranks(spec)
        return self._loaded, ranks

    def wait(self) -> None:
        """Wait until all weights are loaded. Raises if loading failed."""
        assert self._loaded is not None
        self._loader.wait(self._loaded)

    def start(self, on_loaded: Callable[[], None], activity: Callable[[], Activity]) -> None:
        """Call `on_loaded`, on another thread, when all weights are loaded; then serve them, paced by `activity`."""
        if self._loaded is None:  # nothing was loaded here
            self._is_ready = True
            return
        self._thread = threading.Thread(
            target=self._finish, args=(on_loaded, activity), name="paceline-weights", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop loading and serving. A step that waits for a layer fails."""
        self._loader.close()
        if self._server is not None:
            self._server.close()
        if self._thread is not None:
            self._thread.join()

    def _finish(self, on_loaded: Callable[[], None], activity: Callable[[], Activity]) -> None:
        assert self._loaded is not None
        try:
            weights = self._loader.wait(self._loaded)
        except Exception:  # reported by `error`
            return
        logger.info("all %d layers are loaded", self._loaded.config.num_layers)
        try:
            on_loaded()
            if self._server is not None:
                self._server.open(weights, activity, device_memory(weights.device, self._channels))
        except EngineClosed:  # the worker stopped meanwhile
            pass
        except UnsupportedModel as error:
            logger.warning("other workers cannot load the weights from here: %s", error)
        except Exception:
            logger.exception("the weights are loaded, but other workers cannot load them from here")
        finally:
            self._is_ready = True
