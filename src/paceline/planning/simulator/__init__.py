"""A discrete-event simulation of target workers behind the production router."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.planning.simulator.result import (
        Objective,
        Quantiles,
        SimulationReport,
        SimulationResult,
        quantile,
        summarize,
    )
    from paceline.planning.simulator.rounds import Rounds
    from paceline.planning.simulator.simulation import simulate

__all__ = [
    "Objective",
    "Quantiles",
    "Rounds",
    "SimulationReport",
    "SimulationResult",
    "quantile",
    "simulate",
    "summarize",
]

__getattr__ = lazy_face(
    __name__,
    {
        "result": "Objective Quantiles SimulationReport SimulationResult quantile summarize",
        "rounds": "Rounds",
        "simulation": "simulate",
    },
)
