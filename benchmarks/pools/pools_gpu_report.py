"""For pools_gpu.py: the results as tables and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from pools_gpu_draft import PassTimes

TITLES = (
    "drafts", "streams", "depth", "tok/s", "of plain", "tokens a round", "ready", "wait ms/step", "verify ms",
    "draft pass ms", "GPU memory of the draft, MiB", "same text", "largest distance from the arg-max",
)  # fmt: skip


@dataclass
class Row:
    """One contender at one number of streams, over all prompts and repeats."""

    name: str
    streams: int
    depth: int | None = None
    """Drafted tokens a round; None: no drafts, or as `goodput` decides."""
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    """Steps times sequences."""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    rates: list[float] = field(default_factory=list)
    """Tokens per second of each repeat."""
    verify_ms: list[float] = field(default_factory=list)
    wait_seconds: float | None = None
    """Time that steps waited for the pool."""
    pool_steps: int = 0
    ready: int = 0
    """Rounds whose draft had arrived when it was collected, of `requested`."""
    requested: int = 0
    undrafted: int = 0
    """Rounds without a draft, because it was late."""
    pass_ms: float | None = None
    """Median pass of the draft worker."""
    gpu_bytes: int | None = None
    texts: list[list[int]] = field(default_factory=list)
    """Tokens by prompt, of the first repeat."""
    same: int = 0
    """Texts equal to plain decoding, as far as both go."""
    gap: float = 0.0
    """Largest distance from the arg-max of any token in texts that differ."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def cells(self, plain: float) -> list[str]:
        ready = self.ready / self.requested if self.requested else None
        wait = None if self.wait_seconds is None else 1e3 * self.wait_seconds / max(1, self.pool_steps)
        depth = "" if self.name.startswith("plain") else f"{self.drafted / max(1, self.rounds):.1f}"
        return [
            self.name,
            str(self.streams),
            depth if self.depth is None else str(self.depth),
            f"{self.rate:.1f}",
            f"{self.rate / plain:.2f}x" if plain else "",
            f"{self.tokens / max(1, self.rounds):.2f}",
            _shown(ready, ".0%"),
            _shown(wait, ".2f"),
            f"{median(self.verify_ms):.2f}" if self.verify_ms else "",
            _shown(self.pass_ms, ".2f"),
            "" if self.gpu_bytes is None else f"{self.gpu_bytes / 2**20:.0f}",
            f"{self.same}/{len(self.texts)}",
            _shown(self.gap or None, ".3f"),
        ]


@dataclass
class Report:
    about: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    pass_times: PassTimes = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def row(self, name: str, streams: int) -> Row | None:
        return next((row for row in self.rows if (row.name, row.streams) == (name, streams)), None)

    def plain(self, streams: int) -> Row | None:
        return self.row("plain", streams)

    def line(self, row: Row) -> str:
        plain = self.plain(row.streams)
        return _line(row.cells(plain.rate if plain else 0.0))

    def table(self) -> str:
        lines = [_line(list(TITLES)), f"|---|{'---:|' * (len(TITLES) - 1)}"]
        lines += [self.line(row) for row in sorted(self.rows, key=lambda row: row.streams)]
        return "\n".join([*lines, "", *self.pass_table(), *self.notes, ""])

    def pass_table(self) -> list[str]:
        """Milliseconds of a drafted token on the host's cores."""
        if not self.pass_times:
            return []
        kinds = sorted({threads for threads, _ in self.pass_times})
        batches = sorted({batch for _, batch in self.pass_times})
        titles = [f"{one.count} threads, spin {1e3 * one.spin:g} ms" for one in kinds]
        lines = [_line(["sequences", *titles]), f"|---|{'---:|' * len(kinds)}"]
        for batch in batches:
            lines.append(_line([str(batch), *(f"{1e3 * self.pass_times[one, batch]:.2f}" for one in kinds)]))
        return [*lines, ""]

    def save(self, folder: Path) -> None:
        """`pools_gpu.json` and `pools_gpu.md`; written after every row, so that a stopped run keeps them."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for row in self.rows:
            values = {**asdict(row), "rate": row.rate, "verify_ms": median(row.verify_ms) if row.verify_ms else None}
            del values["texts"]
            rows.append(values)
        passes = [{**t._asdict(), "sequences": b, "seconds": s} for (t, b), s in self.pass_times.items()]
        document = {"about": self.about, "rows": rows, "pass_times": passes, "notes": self.notes}
        (folder / "pools_gpu.json").write_text(json.dumps(document, indent=1))
        (folder / "pools_gpu.md").write_text(self.table())


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
