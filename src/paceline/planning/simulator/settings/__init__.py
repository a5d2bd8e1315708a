"""What a simulation is given: its configuration and its faults."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.planning.simulator.settings.config import (
        FORMS,
        LINK,
        AlphaDrift,
        DepthRule,
        Fault,
        Mode,
        SimulationConfig,
        SlowLinks,
        Speculation,
        WorkersLost,
        parse_fault,
    )

__all__ = [
    "FORMS",
    "LINK",
    "AlphaDrift",
    "DepthRule",
    "Fault",
    "Mode",
    "SimulationConfig",
    "SlowLinks",
    "Speculation",
    "WorkersLost",
    "parse_fault",
]

__getattr__ = lazy_face(
    __name__,
    {
        "config": "AlphaDrift DepthRule FORMS Fault LINK Mode SimulationConfig SlowLinks Speculation WorkersLost parse_fault"
    },
)
