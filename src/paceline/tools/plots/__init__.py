"""Plots of reports, simulations and plans."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.plots.plots import (
        load_pyplot,
        plot_advice,
        plot_plan,
        plot_profiles,
        plot_report,
        plot_simulation,
    )

__all__ = ["load_pyplot", "plot_advice", "plot_plan", "plot_profiles", "plot_report", "plot_simulation"]

__getattr__ = lazy_face(
    __name__,
    {
        "load_pyplot": "plots",
        "plot_advice": "plots",
        "plot_plan": "plots",
        "plot_profiles": "plots",
        "plot_report": "plots",
        "plot_simulation": "plots",
    },
)
