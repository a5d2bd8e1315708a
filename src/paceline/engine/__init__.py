"""The loop: schedule, propose, verify, commit."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.failures import ProposerGuard
    from paceline.engine.hook import AfterLayer, EngineParts, StepHook
    from paceline.engine.loop import EngineLoop
    from paceline.engine.scheduler import Scheduler
    from paceline.engine.speculator import Speculator
    from paceline.engine.tiers import make_tiers
    from paceline.engine.traffic import DefaultMethod, StepTotals, TrafficStatistics

__all__ = [
    "AfterLayer",
    "DefaultMethod",
    "Engine",
    "EngineLoop",
    "EngineParts",
    "ProposerGuard",
    "Scheduler",
    "Speculator",
    "StepHook",
    "StepTotals",
    "TrafficStatistics",
    "make_tiers",
]

__getattr__ = lazy_face(
    __name__,
    {
        "engine": "Engine",
        "failures": "ProposerGuard",
        "hook": "AfterLayer EngineParts StepHook",
        "loop": "EngineLoop",
        "scheduler": "Scheduler",
        "speculator": "Speculator",
        "tiers": "make_tiers",
        "traffic": "DefaultMethod StepTotals TrafficStatistics",
    },
)
