"""Bench reports and profiles as terminal tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.bench.profiling.profile import LABELS, Profile
from paceline.bench.report import Measured, Report
from paceline.bench.summary import MIN_TRIALS, Alpha, Summary


def print_report(report: Report, console: Console) -> None:
    console.print(report.about["title"], style="bold", markup=False)
    console.print(_overall(report))
    console.print(_by_category(report))
    for contender in report.contenders:
        if contender.overall.drafted:
            console.print(_alphas(contender))
    for contender in report.contenders[1:]:
        _print_identity(contender, report.contenders[0].name, console)


def _overall(report: Report) -> Table:
    table = Table("", *(contender.name for contender in report.contenders), title="All prompts", title_justify="left")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    reference = report.contenders[0].overall.tokens_per_second
    summaries = [contender.overall for contender in report.contenders]
    table.add_row("tokens per second", *(_speed(summary, reference) for summary in summaries))
    if report.price is not None:
        costs = [report.dollars_per_million(contender) for contender in report.contenders]
        table.add_row("dollars per million tokens", *("-" if cost is None else f"{cost:.4g}" for cost in costs))
    table.add_row("first token, p50 / p99", *(_pair(s.ttft_p50, s.ttft_p99) for s in summaries))
    table.add_row("per token, p50 / p99", *(_pair(s.token_p50, s.token_p99) for s in summaries))
    table.add_row("tokens per round", *(_number(s.tokens_per_round) for s in summaries))
    table.add_row("drafts accepted, drafted", *(f"{s.accepted}, {s.drafted}" if s.drafted else "-" for s in summaries))
    table.add_row("draft acceptance rate", *(_number(s.draft_acceptance_rate) for s in summaries))
    table.add_row("requests, tokens", *(f"{s.requests}, {s.tokens}" for s in summaries))
    return table


def _by_category(report: Report) -> Table:
    table = Table("category", title="By category, tokens per second of one request", title_justify="left")
    for contender in report.contenders:
        table.add_column(contender.name, justify="right")
    for heading in ("tokens per round", "alpha"):
        table.add_column(heading, justify="right")
    speculative = _speculative(report)
    for category in report.categories:
        summaries = [contender.by_category[category] for contender in report.contenders]
        table.add_row(
            category,
            *(_speed(summary, summaries[0].tokens_per_second) for summary in summaries),
            _number(speculative.by_category[category].tokens_per_round),
            _number(speculative.by_category[category].alpha),
        )
    return table


def _alphas(contender: Measured) -> Table:
    """Alpha per position. Dim values have few trials."""
    alphas = contender.overall.alphas
    table = Table(title=f"Alpha by position, {contender.name}", title_justify="left")
    table.add_column("category", no_wrap=True)
    for position in range(1, len(alphas) + 1):
        table.add_column(str(position), justify="right")
    for category, summary in contender.by_category.items():
        if summary.drafted:
            table.add_row(category, *map(_alpha, summary.alphas))
    table.add_section()
    table.add_row("all", *map(_alpha, alphas))
    table.add_row("trials", *(str(alpha.trials) for alpha in alphas))
    return table


def _alpha(alpha: Alpha) -> Text:
    return Text(f"{alpha.value:.2f}", "dim" if alpha.trials < MIN_TRIALS else "")


def _print_identity(contender: Measured, reference: str, console: Console) -> None:
    if not contender.differences:
        console.print(
            f"{contender.name}: all {contender.compared} answers are identical to {reference}.",
            style="green",
            markup=False,
        )
        return
    console.print(
        f"{contender.name}: {len(contender.differences)} of {contender.compared} answers differ from {reference}.",
        style="red",
        markup=False,
    )
    for difference in contender.differences[:3]:
        console.print(
            f"  answer {difference.answer} ({difference.category}), character {difference.character}: "
            f"{difference.expected!r} expected, {difference.found!r} found",
            markup=False,
        )


def _speculative(report: Report) -> Measured:
    return next((contender for contender in report.contenders if contender.overall.drafted), report.contenders[0])


def _speed(summary: Summary, reference: float) -> str:
    speed = summary.tokens_per_second
    factor = f" ({speed / reference:.2f}x)" if reference and speed != reference else ""
    return f"{speed:.1f}{factor}"


def _pair(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{1000 * low:.1f} / {1000 * high:.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_profiles(profiles: Sequence[Profile], console: Console) -> None:
    table = Table(title="Time of each part of a round, mean", title_justify="left")
    table.add_column("", no_wrap=True)
    for profile in profiles:
        table.add_column(profile.name, justify="right")
    for i, share in enumerate(profiles[0].parts):
        parts = [profile.parts[i] for profile in profiles]
        table.add_row(LABELS[share.part], *(_share(part.seconds, part.fraction) for part in parts))
    table.add_section()
    table.add_row("round", *(f"{1000 * profile.seconds:.2f} ms" for profile in profiles))
    table.add_row("round, p50", *(f"{1000 * profile.median_seconds:.2f} ms" for profile in profiles))
    table.add_row("rounds", *(str(profile.num_rounds) for profile in profiles))
    table.add_section()
    table.add_row("bytes read", *(f"{profile.bytes_read / 1e6:.1f} MB" for profile in profiles))
    table.add_row("bandwidth floor", *(_share(profile.floor_seconds, profile.floor_fraction) for profile in profiles))
    console.print(table)
    console.print(
        f"Floor: the time to read a round's weights and cache once at {profiles[0].bandwidth / 1e9:.1f} GB/s.",
        style="dim",
        markup=False,
    )


def _share(seconds: float, fraction: float) -> str:
    return f"{1000 * seconds:.2f} ms {fraction:>6.1%}"
