"""The files that `paceline advise` writes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.advise.case import AdviceInput
from paceline.cli.output_files import check_folders, check_plots, print_written, write_json
from paceline.cluster.cost.advice import Advice


@dataclass(frozen=True, slots=True)
class AdviceFiles:
    """A file that is None is not written."""

    plot: Path | None
    html: Path | None
    json: Path | None

    def check(self) -> None:
        """Raise `InvalidRequest` if the folder of a file does not exist, `MissingDependency` without matplotlib."""
        check_folders(self.plot, self.html, self.json)
        check_plots(self.plot, self.html)

    def write(self, advice: Advice, case: AdviceInput) -> None:
        if self.plot is not None or self.html is not None:
            self._write_plots(advice, case.title)
        if self.json is not None:
            write_json(self.json, _to_json(advice, case))
        print_written(self.plot, self.html, self.json)

    def _write_plots(self, advice: Advice, title: str) -> None:
        from paceline.bench.plots import plot_advice
        from paceline.cli.render.advice import page

        png = plot_advice(advice, title)
        if self.plot is not None:
            self.plot.write_bytes(png)
        if self.html is not None:
            self.html.write_text(page(advice, title, png), "utf-8")


def _to_json(advice: Advice, case: AdviceInput) -> dict[str, Any]:
    return {
        "verdict": advice.verdict,
        "speculate": advice.speculate,
        "choice": asdict(advice.choice),
        "reasons": advice.reasons,
        "cautions": [asdict(caution) for caution in advice.cautions],
        "table": [asdict(prospect) for prospect in advice.table],
        "target": asdict(case.target),
        "methods": [asdict(method) for method in case.methods],
    }
