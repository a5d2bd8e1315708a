"""An audit's report as one HTML file without scripts or external resources."""

import html
import io
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from paceline.core.errors import MissingDependency
from paceline.tools.audit.report import MEANING, Report
from paceline.tools.audit.tests import LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHOWN = 200
"""Most findings listed."""
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884 }
.clean, .drift { display: inline-block; padding: .1rem .6rem; border-radius: 1rem; color: #fff; background: #1a7f37 }
.drift { background: #cf222e }
figure { background: #fff; color: #000; margin: 1rem 0; padding: .5rem; border-radius: .5rem; overflow-x: auto }
figure svg { max-width: 100%; height: auto }
"""


def page(report: Report, decode: Callable[[int], str]) -> str:
    """The HTML page. `decode` returns the text of a token id."""
    verdict = "clean" if report.is_clean else "drift"
    about = "".join(_row([name, str(value)]) for name, value in report.about.items())
    checks = "".join(
        _row(
            [check.name, f"{check.num_checked:,} {check.unit}", f"{check.num_wrong:,}", check.detail],
            mark="drift" if check.num_wrong else "clean",
        )
        for check in report.checks
    )
    power = "".join(f"<li>{html.escape(line)}</li>" for line in report.power)
    pictures = "".join(f"<figure>{svg}</figure>" for svg in plots(report))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Audit: {verdict}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<h1>Audit <span class="{verdict}">{verdict}</span></h1>'
        f"<h2>Settings</h2><table>{about}</table>"
        f"<h2>Checks</h2><table><tr><th>check</th><th>checked</th><th>wrong</th><th></th><th></th></tr>{checks}</table>"
        f"{pictures}{_findings(report, decode)}"
        f"<h2>Power of the checks</h2><ul>{power}</ul></body></html>\n"
    )


def _findings(report: Report, decode: Callable[[int], str]) -> str:
    if not report.findings:
        return ""

    def token(token_id: int | None) -> str:
        return "" if token_id is None or token_id < 0 else f"{token_id} {decode(token_id)!r}"

    rows = "".join(
        _row(
            [
                str(finding.prompt),
                str(finding.index),
                finding.origin,
                MEANING[finding.kind],
                token(finding.token),
                token(finding.other),
                f"{finding.figure:.3g}",
            ]
        )
        for finding in report.findings[:SHOWN]
    )
    more = len(report.findings) - SHOWN
    rest = f"<p>And {more:,} more.</p>" if more > 0 else ""
    head = "".join(
        f"<th>{name}</th>" for name in ("prompt", "token", "origin", "finding", "found", "plain", "gap or KL")
    )
    return f"<h2>Findings</h2><table><tr>{head}</tr>{rows}</table>{rest}"


def _row(cells: Iterable[str], mark: str | None = None) -> str:
    shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    pill = "" if mark is None else f'<td><span class="{mark}">{mark}</span></td>'
    return f"<tr>{shown}{pill}</tr>"


GOOD, BAD, GREY = "#1f6feb", "#cf222e", "#9aa5b1"
ORIGINS = ("accepted", "recovered", "bonus", "plain")
SMALLEST = 1e-12
"""Position of 0 on a logarithmic axis."""


def plots(report: Report) -> list[str]:
    """SVG elements as text."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("matplotlib", "an audit's report", "bench") from None
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _by_origin(left, report)
    (_margins if report.is_coupled else _ranks)(right, report)
    figures = [figure]
    if any(text.p_divergence for text in report.texts):
        figures.append(Figure(figsize=(11, 3.2), layout="constrained"))
        _divergences(figures[1].subplots(), report)
    return [_svg(figure) for figure in figures]


def _by_origin(axes: "Axes", report: Report) -> None:
    """Bars of checked and drifted tokens by origin."""
    wrong = {(finding.prompt, finding.index) for finding in report.findings}
    counts = dict.fromkeys(ORIGINS, 0)
    drifted = dict.fromkeys(ORIGINS, 0)
    for text in report.texts:
        for index, origin in enumerate(text.origins):
            counts[origin] += 1
            drifted[origin] += (text.prompt, index) in wrong
    places = range(len(ORIGINS))
    bars = axes.barh(places, [counts[origin] for origin in ORIGINS], color=GREY, label="checked")
    axes.barh(places, [drifted[origin] for origin in ORIGINS], color=BAD, label="drifted")
    axes.bar_label(bars, [f"{drifted[origin]} of {counts[origin]}" for origin in ORIGINS], padding=3, fontsize=8)
    axes.set_yticks(places, ORIGINS)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _decorate(axes, "Tokens that drifted, by origin", "tokens", "")


def _margins(axes: "Axes", report: Report) -> None:
    """Histogram of the margins of tokens over the second best. Tokens with small margins could change by rounding."""
    margins = [max(margin, SMALLEST) for text in report.texts for margin in text.margins]
    low = min(margins, default=SMALLEST)
    edges = _decades(min(low, 1e-5), max(margins, default=1.0))
    axes.hist(margins, bins=edges, color=GOOD)
    gaps = [finding.figure for finding in report.findings if finding.figure < float("inf")]
    if gaps:
        axes.hist([max(gap, edges[0]) for gap in gaps], bins=edges, color=BAD, label="gap of a token that drifted")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xscale("log")
    _decorate(axes, "Margin of the chosen token over the second best", "logits", "tokens")


def _ranks(axes: "Axes", report: Report) -> None:
    for name, colour, ranks in (
        ("with speculation", GOOD, [rank for text in report.texts for rank in text.ranks]),
        ("without", GREY, [rank for text in report.texts for rank in text.plain_ranks]),
    ):
        ordered = sorted(ranks)
        axes.step(
            ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", color=colour, label=name
        )
    two = report.two_sample
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.6, linestyle=":")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    _decorate(axes, f"Ranks of tokens: p = {two.p_value:.3g}, alarm below {LEVEL:g}", "rank under plain p", "share")


def _divergences(axes: "Axes", report: Report) -> None:
    names = {"logits": "p", "p": "p", "q": "q"}
    wrong = {
        (names[finding.kind], finding.prompt, finding.index) for finding in report.findings if finding.kind in names
    }
    for kind, colour, marker in (("p", GOOD, "."), ("q", "#d9822b", "x")):
        points = [
            (text.prompt, i, kl)
            for text in report.texts
            for i, kl in (text.p_divergence if kind == "p" else text.q_divergence)
        ]
        for is_wrong, shade in ((False, colour), (True, BAD)):
            shown = [(i, kl) for prompt, i, kl in points if ((kind, prompt, i) in wrong) == is_wrong]
            if shown:
                label = f"{kind}, drifted" if is_wrong else kind
                heights = [min(max(kl, SMALLEST), 1e3) for _, kl in shown]
                axes.scatter([i for i, _ in shown], heights, s=12, c=shade, marker=marker, label=label)
    axes.axhline(max(text.most_divergence for text in report.texts), color="black", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST / 3, 1e4)
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=4)
    _decorate(axes, f"KL from a plain pass; drift above the line; {SMALLEST:g} stands for 0", "output token", "KL")


def _decades(low: float, high: float) -> list[float]:
    start, end = math.floor(math.log10(low)), math.ceil(math.log10(max(high, low * 10)))
    return [10.0 ** (start + step / 4) for step in range(4 * (end - start) + 1)]


def _decorate(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def _svg(figure: "Figure") -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: smaller, and searchable
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
