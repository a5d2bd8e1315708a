"""An engine in this process as a target."""

from contextlib import suppress
from types import TracebackType
from typing import Self

import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed
from paceline.core.machine import usable_cores
from paceline.core.output import OutputListener
from paceline.core.request import Request, ValidatedRequest
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import EngineStatus
from paceline.engine.build import build_engine
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop, Tracer


class LocalTarget:
    """A `TargetClient` that runs the engine on a thread of its own."""

    def __init__(self, config: EngineConfig, engine: Engine, tracer: Tracer | None = None) -> None:
        assert engine.tokenizer is not None
        self.config = config
        self.tokenizer = engine.tokenizer
        self.engine = engine
        self.loop = EngineLoop(engine, tracer)

    @staticmethod
    def load(config: EngineConfig, tracer: Tracer | None = None) -> "LocalTarget":
        """Load the configured model and warm it up. Blocks until requests can start."""
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        target = LocalTarget(config, build_engine(config), tracer)
        target.loop.run(target.engine.warm_up)
        return target

    @property
    def is_running(self) -> bool:
        return self.loop.is_running

    @property
    def is_ready(self) -> bool:
        return self.loop.is_running

    @property
    def max_model_len(self) -> int:
        return self.engine.validator.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        return self.config.max_num_seqs

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(sorted(self.engine.speculator.proposers))

    def validate(self, request: Request) -> ValidatedRequest:
        return self.engine.validate(request)

    def submit(self, request: Request, listener: OutputListener) -> None:
        self.loop.submit(request, listener)

    def cancel(self, request_id: str) -> None:
        with suppress(EngineClosed):  # a closed engine has no requests
            self.loop.cancel(request_id)

    def validate_flags(self, flags: SpeculationFlags) -> None:
        self.engine.validate_flags(flags)

    def set_flags(self, flags: SpeculationFlags) -> None:
        self.engine.validate_flags(flags)
        self.loop.call(lambda: self.engine.set_flags(flags))

    def engine_status(self) -> EngineStatus:
        return self.engine.snapshot()

    def cluster_status(self) -> None:
        return None

    def close(self) -> None:
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
