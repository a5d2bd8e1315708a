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
    __name__, {"plots": "load_pyplot plot_advice plot_plan plot_profiles plot_report plot_simulation"}
)
