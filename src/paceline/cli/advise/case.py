"""The case that `paceline advise` decides: a target and its methods, from given figures or measured here."""

from dataclasses import dataclass, replace

from paceline.bench.calibrate import Trial, calibrate, calibration_config
from paceline.cli.render import console
from paceline.cli.render.console import loaded
from paceline.cluster.cost.advice import POOL
from paceline.cluster.cost.cost import Footprint, MethodCosts, TargetCosts
from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest
from paceline.core.speculation import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class DraftPlacement:
    """The cost of drafts from another machine. It is false if no drafts come from another machine."""

    network_seconds: float
    price_per_hour: float
    draft_seconds: float | None = None
    """Time of one drafted token. If it is None, that of the local draft model counts."""
    ready: float = 0.0
    """Share of rounds of a sequence whose draft is ready."""

    def __bool__(self) -> bool:
        return self.network_seconds > 0.0 or self.price_per_hour > 0.0 or self.is_compared

    @property
    def is_compared(self) -> bool:
        """Whether the pool has figures of its own, so that it is compared with a local draft model."""
        return self.draft_seconds is not None or self.ready > 0.0


@dataclass(frozen=True, slots=True)
class AdviceInput:
    """A target and the methods to choose from."""

    target: TargetCosts
    methods: tuple[MethodCosts, ...]
    title: str


@dataclass(frozen=True, slots=True)
class GivenFigures:
    """The figures of the command line, in its units."""

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

    def case(self, batch: int, draft: DraftPlacement) -> AdviceInput:
        if self.alpha is None or self.draft_ms is None or self.verify_ms is None:
            raise InvalidRequest("given figures need all three of --alpha, --draft-ms and --verify-ms", field="alpha")
        # One figure stands for a pass over drafts of any depth.
        passes = {batch: (self.plain_ms or self.verify_ms) / 1e3, 2 * batch: self.verify_ms / 1e3}
        memory = None if self.device_gb is None else int(self.device_gb * 1e9)
        drafts = {depth: depth * self.draft_ms / 1e3 for depth in (0, MAX_DEPTH)}
        method = MethodCosts(self.method, _alphas(self.alpha), drafts, footprint=_gigabytes(self.draft_gb))
        return AdviceInput(
            TargetCosts(passes, batch, _gigabytes(self.target_gb), memory_bytes=memory),
            (method, in_pool(method, draft, batch)) if draft.is_compared else (_placed(method, draft),),
            f"{self.method}, batch {batch}, from given figures",
        )


def measured_case(engine: EngineConfig, trial: Trial, draft: DraftPlacement) -> AdviceInput:
    """A case from a short run of the model on this machine. With a placement, a pool that drafts with the same model is another
    method."""
    with loaded(calibration_config(engine, trial.max_depth)) as llm, console.err.status("calibrating") as status:

        def show(part: str) -> None:
            status.update(f"calibrating: {part}")
            if not console.err.is_terminal:  # a spinner shows nothing in a log
                console.err.print(f"calibrating: {part}", markup=False, highlight=False)

        found = calibrate(llm, trial, WallClock(), show)
    title = f"{engine.model}, batch {trial.batch}, temperature {trial.sampling.temperature:g}, measured here"
    if found.silent:
        title += f"; drafted nothing: {', '.join(found.silent)}"
    pools = (
        in_pool(estimate, draft, trial.batch) for estimate in found.methods if estimate.name == "draft_model" and draft
    )
    return AdviceInput(found.target, (*found.methods, *pools), title)


def in_pool(method: MethodCosts, placement: DraftPlacement, batch: int) -> MethodCosts:
    """The method `pool`, which gets the same drafts from workers with memory of their own. A step that finds the drafts of all
    its sequences ready waits for neither the drafts nor the network."""
    waiting = 1.0 - placement.ready**batch
    each = placement.draft_seconds
    drafts = {
        depth: waiting * (seconds if each is None else depth * each) for depth, seconds in method.draft_seconds.items()
    }
    remote = replace(_placed(method, placement), name=POOL, footprint=Footprint(), draft_seconds=drafts)
    return replace(remote, network_seconds=waiting * remote.network_seconds)


def _placed(method: MethodCosts, placement: DraftPlacement) -> MethodCosts:
    return replace(method, network_seconds=placement.network_seconds, price_per_hour=placement.price_per_hour)


def _alphas(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"--alpha takes numbers between 0 and 1, separated by commas, got {text!r}", field="alpha"
        ) from None


def _gigabytes(size: float) -> Footprint:
    return Footprint(weight_bytes=int(size * 1e9))
