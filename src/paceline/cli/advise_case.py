"""What `advise` decides on: a target and ways to draft for it, measured here or given on the command line."""

from dataclasses import dataclass, replace

from paceline.bench.calibrate import Trial, calibrate, calibration_config
from paceline.cli import console
from paceline.cli.models import loaded
from paceline.cluster.cost.cost import Footprint, Method, Target
from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest
from paceline.core.speculation import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What it takes that the draft is on a machine of its own."""

    network_seconds: float
    price_per_hour: float


@dataclass(frozen=True, slots=True)
class Case:
    target: Target
    methods: tuple[Method, ...]
    title: str


@dataclass(frozen=True, slots=True)
class GivenFigures:
    """Those of the command line, as they stand there."""

    method: str
    alpha: str | None
    draft_ms: float | None
    verify_ms: float | None
    plain_ms: float | None
    target_gb: float
    draft_gb: float
    device_gb: float | None

    def __bool__(self) -> bool:
        return self.alpha is not None or self.draft_ms is not None or self.verify_ms is not None

    def case(self, batch: int, draft: Elsewhere) -> Case:
        if self.alpha is None or self.draft_ms is None or self.verify_ms is None:
            raise InvalidRequest("given figures are --alpha, --draft-ms and --verify-ms, all three", field="alpha")
        # A pass over drafts of any depth takes the same: that is what one figure says.
        passes = {batch: (self.plain_ms or self.verify_ms) / 1e3, 2 * batch: self.verify_ms / 1e3}
        memory = None if self.device_gb is None else int(self.device_gb * 1e9)
        drafts = {depth: depth * self.draft_ms / 1e3 for depth in (0, MAX_DEPTH)}
        method = Method(self.method, _alphas(self.alpha), drafts, footprint=_gigabytes(self.draft_gb))
        return Case(
            Target(passes, batch, _gigabytes(self.target_gb), memory_bytes=memory),
            (_moved(method, draft),),
            f"{self.method}, batch {batch}, from given figures",
        )


def measured_case(engine: EngineConfig, trial: Trial, draft: Elsewhere) -> Case:
    """From a short run of the model on this machine. Only a draft model could run elsewhere."""
    with loaded(calibration_config(engine, trial.max_depth)) as llm, console.err.status("calibrating") as status:
        found = calibrate(llm, trial, WallClock(), lambda part: status.update(f"calibrating: {part}"))
    title = f"{engine.model}, batch {trial.batch}, temperature {trial.sampling.temperature:g}, measured here"
    if found.silent:
        title += f"; nothing to draft with: {', '.join(found.silent)}"
    methods = (_moved(one, draft) if one.name == "draft_model" else one for one in found.methods)
    return Case(found.target, tuple(methods), title)


def _moved(method: Method, there: Elsewhere) -> Method:
    return replace(method, network_seconds=there.network_seconds, price_per_hour=there.price_per_hour)


def _alphas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"--alpha takes numbers between 0 and 1, one or several with commas, got {text!r}", field="alpha"
        ) from None


def _gigabytes(size: float) -> Footprint:
    return Footprint(weight_bytes=int(size * 1e9))
