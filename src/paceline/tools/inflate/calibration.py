"""A short run that measures alpha, draft times and pass times by method and depth."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.core.clock import Clock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest
from paceline.core.request import SamplingParams
from paceline.policy.cost.cost import Footprint, MethodCosts, TargetCosts
from paceline.policy.cost.curve import isotonic
from paceline.tools.bench import MIN_TRIALS
from paceline.tools.footprint import footprint
from paceline.tools.profile import RecordedRound, Recorder
from paceline.tools.prompts import BenchPrompt

if TYPE_CHECKING:
    from paceline.engine.start import LLM

MIN_SAMPLES = 3
TIMING_PROMPTS = 2
"""Prompts to time one depth with. Alpha is measured at the largest depth, on all prompts."""
NEVER = 10**9


@dataclass(frozen=True, slots=True)
class Trial:
    """The workload of a calibration. Prompt i has `seed + i`, and `batch` prompts run at a time."""

    prompts: Sequence[BenchPrompt]
    sampling: SamplingParams
    max_depth: int
    batch: int = 1
    methods: tuple[str, ...] = ()
    """Methods to measure. Empty for all methods of the engine."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measured target and methods."""

    target: TargetCosts
    methods: tuple[MethodCosts, ...]
    silent: tuple[str, ...]
    """Methods with no drafts, or too few to measure."""


def calibration_config(config: EngineConfig, max_depth: int) -> EngineConfig:
    """The same engine config with a fixed depth, and without a circuit breaker and an audit: an audit takes idle time, and a
    measurement overwrites the cache that it reads."""
    speculation = replace(
        config.speculation, enabled=True, depth="fixed", min_depth=None, max_depth=max_depth, breaker_rounds=NEVER
    )
    return replace(config, speculation=speculation, audit_fraction=0.0)


def depths_to_measure(max_depth: int) -> list[int]:
    """1, 4, 16 and the largest depth: times are about linear between."""
    return sorted({depth for depth in (1, 4, 16) if depth < max_depth} | {max_depth})


def calibrate(llm: "LLM", trial: Trial, clock: Clock, on_part: Callable[[str], None]) -> Calibration:
    """Measure an engine built with `calibration_config`. `on_part` receives the name of the next measurement
    and how many methods are left."""
    run = _CalibrationRun(llm, trial, clock, on_part)
    run.measure_all()
    found = {
        name: summarise(name, by_depth, trial.batch, footprint(llm.engine, name.partition(",")[0]))
        for name, by_depth in run.rounds.items()
    }
    return Calibration(
        target=_target(llm, run.steps, trial.batch),
        methods=tuple(method for method in found.values() if method is not None),
        silent=tuple(name for name, method in found.items() if method is None),
    )


class _CalibrationRun:
    """Runs the prompts plain, and with every method at every depth to measure."""

    def __init__(self, llm: "LLM", trial: Trial, clock: Clock, on_part: Callable[[str], None]) -> None:
        self._llm, self._trial, self._on_part = llm, trial, on_part
        self._recorder = Recorder(clock)
        self._prompts = list(islice(cycle(trial.prompts), max(len(trial.prompts), trial.batch)))
        self._methods = _methods(llm.engine.speculator.proposers, trial.methods)
        self._num_left = len(self._methods)
        self.rounds: dict[str, dict[int, list[RecordedRound]]] = {}
        """Steps that only decode, by method and requested depth."""

    @property
    def steps(self) -> list[RecordedRound]:
        """All steps, plain ones too, in which the whole batch decodes."""
        return [round_ for round_ in self._recorder.rounds if round_.is_decode and round_.batch == self._trial.batch]

    def measure_all(self) -> None:
        batch, prompts = self._trial.batch, self._prompts
        _run(self._llm, self._trial, prompts[:batch], "warm-up", {"enabled": False})
        half = max(batch, len(prompts) // 2)
        with self._llm.engine.hooks.listening(self._recorder):
            # Plain decoding runs first and last, so that a drift of the machine's speed cancels.
            self._measure("plain", prompts[:half], {"enabled": False})
            for method in self._methods:
                self._measure_exits(method)
                self._num_left -= 1
            self._measure("plain", prompts[half:] or prompts[:half], {"enabled": False})

    def _measure_exits(self, method: str) -> None:
        """Measure the method. A method that skips layers is measured once for each layer after which it can exit."""
        from paceline.speculation.proposers.model import exits

        with exits(self._llm.engine.speculator.proposers[method]) as choices:
            for layer, choose in choices.items():
                choose()
                self._measure_depths(f"{method}, exit_layer {layer}", method)
            if not choices:
                self._measure_depths(method, method)

    def _measure_depths(self, name: str, method: str) -> None:
        by_depth = self.rounds[name] = {}
        varies = False
        for depth in reversed(depths_to_measure(self._trial.max_depth)):
            few = self._prompts[: max(TIMING_PROMPTS, self._trial.batch)]
            prompts = self._prompts if varies or not by_depth else few
            wanted = {"method": method, "max_depth": depth}
            by_depth[depth] = self._measure(f"{name} at depth {depth}", prompts, wanted)
            varies = varies or _varies(by_depth[depth])
            if not any(outcome.levels for round_ in by_depth[depth] for outcome in round_.outcomes):
                break  # no drafts

    def _measure(
        self, label: str, prompts: Sequence[BenchPrompt], speculation: Mapping[str, Any]
    ) -> list[RecordedRound]:
        left, recorder = self._num_left, self._recorder
        self._on_part(f"{label}, {left} of {len(self._methods)} methods left" if left else label)
        recorder.label, before = label, len(recorder.rounds)
        _run(self._llm, self._trial, prompts, label, speculation)
        recorder.label = None
        return [round_ for round_ in recorder.rounds[before:] if round_.is_decode]


def summarise(
    name: str, by_depth: Mapping[int, Sequence[RecordedRound]], batch: int, footprint: Footprint
) -> MethodCosts | None:
    """A method from its rounds by requested depth. None if there are too few drafts."""
    # Only the largest depth ran with all prompts.
    outcomes = [outcome for round_ in by_depth[max(by_depth)] for outcome in round_.outcomes]
    alphas = alphas_by_level((outcome.levels, outcome.accepted) for outcome in outcomes)
    drafts = {
        depth: median(seconds)
        for depth, rounds in by_depth.items()
        if (seconds := [round_.times.draft for round_ in rounds if round_.batch == batch and round_.requested == depth])
    }
    if not alphas or not drafts:
        return None
    tokens, nodes = {}, {}
    if any(_varies(rounds) for rounds in by_depth.values()):
        tokens = {
            depth: 1.0 + _mean(o.accepted for round_ in by_depth[depth] for o in round_.outcomes) for depth in drafts
        }
        offered = {
            depth: [o.nodes for round_ in by_depth[depth] for o in round_.outcomes if o.nodes] for depth in drafts
        }
        nodes = {depth: _mean(some) for depth, some in offered.items() if some}
    return MethodCosts(
        name=name,
        alphas=alphas,
        draft_seconds=drafts,
        delivery=_mean(outcome.levels > 0 for outcome in outcomes),
        tokens=tokens,
        nodes=nodes,
        footprint=footprint,
    )


def alphas_by_level(rounds: Iterable[tuple[int, int]]) -> tuple[float, ...]:
    """Alpha by level from (levels, accepted): levels 1..accepted succeed, the next fails. Rare levels are left out."""
    hits: defaultdict[int, int] = defaultdict(int)
    trials: defaultdict[int, int] = defaultdict(int)
    for levels, accepted in rounds:
        for i in range(min(levels, accepted + 1)):
            trials[i] += 1
            hits[i] += i < accepted
    alphas: list[float] = []
    while trials[len(alphas)] >= MIN_TRIALS:
        alphas.append(hits[len(alphas)] / trials[len(alphas)])
    return tuple(alphas)


def pass_times(rounds: Iterable[RecordedRound]) -> dict[int, float]:
    """Seconds of a step without drafting (pass, sampling, CPU) by rows. They do not decrease."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for round_ in rounds:
        seconds[round_.rows].append(round_.times.total - round_.times.draft)
    known = {rows: some for rows, some in seconds.items() if len(some) >= MIN_SAMPLES}
    if not known:
        raise InvalidRequest("too few rounds to measure: give longer answers (--tokens)", field="tokens")
    return {
        int(rows): value for rows, value in isotonic((rows, median(some), len(some)) for rows, some in known.items())
    }


def _methods(available: Collection[str], wanted: Sequence[str]) -> list[str]:
    unknown = [method for method in wanted if method not in available]
    if unknown:
        raise InvalidRequest(
            f"unknown method {unknown[0]!r}; choose from: {', '.join(sorted(available))}", field="methods"
        )
    return list(wanted or available)


def _run(llm: "LLM", trial: Trial, prompts: Sequence[BenchPrompt], label: str, speculation: Mapping[str, Any]) -> None:
    for first in range(0, len(prompts), trial.batch):
        wave = range(first, min(first + trial.batch, len(prompts)))
        llm.generate(
            [[{"role": "user", "content": prompts[i].turns[0]}] for i in wave],
            [replace(trial.sampling, seed=(trial.sampling.seed or 0) + i) for i in wave],
            speculation=speculation,
            # A salt per run: runs do not share the prefix cache.
            cache_salt=f"calibrate/{label}/{first}",
        )


def _target(llm: "LLM", rounds: Iterable[RecordedRound], batch: int) -> TargetCosts:
    from paceline.engine.sizing import size_engine
    from paceline.models.loading import LoadedModel

    model = llm.engine.runner.model
    loaded = LoadedModel(llm.config.model, model.config, model, llm.tokenizer)
    memory = size_engine(llm.config, loaded, None, model.device).memory
    return TargetCosts(
        pass_seconds=pass_times(rounds),
        batch=batch,
        footprint=Footprint(memory.weight_bytes, memory.kv_bytes_per_token, memory.activation_bytes),
        kv_tokens=batch * llm.max_model_len,
        memory_bytes=memory.budget_bytes,
    )


def _varies(rounds: Iterable[RecordedRound]) -> bool:
    """Whether some draft is not a chain of the requested length."""
    return any(outcome.levels not in (0, outcome.requested) for round_ in rounds for outcome in round_.outcomes)


def _mean(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some)
