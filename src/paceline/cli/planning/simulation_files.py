"""The files that `paceline simulate` writes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.output_files import check_folders, check_plots, print_written, write_json
from paceline.cli.render.simulation_page import page
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import SimulationReport, SimulationResult, quantile

CDF_POINTS = 100


@dataclass(frozen=True, slots=True)
class SimulationFiles:
    """A file that is None is not written."""

    json: Path | None
    plot: Path | None
    html: Path | None

    def check(self) -> None:
        """Raise `InvalidRequest` if the folder of a file does not exist, `MissingDependency` without matplotlib."""
        check_folders(self.json, self.plot, self.html)
        check_plots(self.plot, self.html)

    def write(self, report: SimulationReport, result: SimulationResult, objective: Objective) -> None:
        if self.json is not None:
            write_json(self.json, _to_json(report, result, objective))
        if self.plot is not None or self.html is not None:
            self._write_plots(report, result, objective)
        print_written(self.json, self.plot, self.html)

    def _write_plots(self, report: SimulationReport, result: SimulationResult, objective: Objective) -> None:
        from paceline.bench.simulation_plots import plot_simulation

        png = plot_simulation(result, objective)
        if self.plot is not None:
            self.plot.write_bytes(png)
        if self.html is not None:
            self.html.write_text(page(report, result, objective, png), "utf-8")


def _to_json(report: SimulationReport, result: SimulationResult, objective: Objective) -> dict[str, Any]:
    jobs = result.jobs
    return {
        **asdict(report),
        "objective": {key: value if value < float("inf") else None for key, value in asdict(objective).items()},
        "cluster": _cluster(result.config),
        "utilisation_by_worker": {
            worker.name: worker.busy_seconds / worker.seconds if worker.seconds else 0.0 for worker in result.workers
        },
        "ttft_cdf": _cdf([job.ttft for job in jobs]),
        "tpot_cdf": _cdf([job.tpot for job in jobs if job.output_tokens > 1]),
    }


def _cluster(config: SimulationConfig) -> dict[str, Any]:
    return {
        "profile": config.profile.name,
        "assumed": config.profile.assumed(),
        "workers": config.workers,
        "draft_workers": config.draft_workers,
        "prefill_workers": config.prefill_workers,
        "link": config.link,
        "faults": [asdict(fault) for fault in config.faults],
        "speculation": None if config.speculation is None else asdict(config.speculation),
        "router": config.router,
        "mode": config.mode,
        "streams": config.streams,
        "seed": config.seed,
        "price_per_hour": config.price_per_hour,
    }


def _cdf(values: list[float]) -> list[float]:
    """Seconds at the shares 0, 1/100, … 1."""
    ordered = sorted(values)
    return [quantile(ordered, i / CDF_POINTS) for i in range(CDF_POINTS + 1)] if ordered else []
