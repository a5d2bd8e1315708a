"""For pools_gpu.py: the results as a table and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median


@dataclass
class Row:
    """One configuration, over all prompts."""

    name: str
    depth: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    verify_ms: list[float] = field(default_factory=list)
    waited: float | None = None
    """Share of steps that waited more than a millisecond for drafts."""
    wait_ms: float | None = None
    """A step."""
    ready: float | None = None
    """Share of rounds whose draft had arrived when it was collected."""
    undrafted: int = 0
    pass_ms: float | None = None
    """Reported by the draft worker."""
    texts: list[list[int]] = field(default_factory=list)
    same: int = 0
    """Number of texts equal to plain decoding."""
    gap: float = 0.0
    """Largest distance from the arg-max of any token in texts that differ."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def verify(self) -> float:
        return median(self.verify_ms) if self.verify_ms else 0.0

    def cells(self, plain: float) -> list[str]:
        def shown(value: float | None, form: str) -> str:
            return "" if value is None else format(value, form)

        return [
            self.name,
            str(self.depth or ""),
            f"{self.rate:.1f}",
            f"{self.rate / plain:.2f}x" if plain else "",
            f"{self.tokens / max(1, self.steps):.2f}",
            f"{self.verify:.2f}",
            shown(self.pass_ms, ".2f"),
            shown(self.ready, ".0%"),
            shown(self.waited, ".0%"),
            shown(self.wait_ms, ".2f"),
            str(self.undrafted or ""),
            f"{self.same}/{len(self.texts)}",
            shown(self.gap or None, ".3f"),
        ]


@dataclass(frozen=True)
class Contention:
    """Median milliseconds of a verification and of a drafted token, alone and shared."""

    name: str
    verify_alone: float
    verify_shared: float
    draft_alone: float
    draft_shared: float


@dataclass
class Report:
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    contention: list[Contention] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        plain = self.rows[0].rate if self.rows else 0.0
        titles = ["drafts", "depth", "tok/s", "of plain", "tokens a step", "verify ms", "draft pass ms", "ready"]
        titles += [
            "waited over 1 ms",
            "wait ms/step",
            "without a draft",
            "same text",
            "largest distance from the arg-max",
        ]
        lines = [_line(titles), f"|---|{'---:|' * (len(titles) - 1)}", *(_line(row.cells(plain)) for row in self.rows)]
        if self.contention:
            titles = ["sharing", "verify alone ms", "beside drafting", "drafted token alone ms", "beside verification"]
            lines += ["", _line(titles), "|---|---:|---:|---:|---:|"]
            for one in self.contention:
                figures = (one.verify_alone, one.verify_shared, one.draft_alone, one.draft_shared)
                lines.append(_line([one.name, *(f"{figure:.2f}" for figure in figures)]))
        return "\n".join([*lines, "", *self.notes, ""])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(row), "rate": row.rate, "verify_ms": row.verify} for row in self.rows]
        for row in rows:
            del row["texts"]
        contention = [asdict(one) for one in self.contention]
        values = {"machine": self.machine, "rows": rows, "contention": contention, "notes": self.notes}
        (folder / "pools_gpu.json").write_text(json.dumps(values, indent=1))
        (folder / "pools_gpu.md").write_text(self.table())


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
