"""Pictures of an audit, as SVG."""

import io
import math
from typing import TYPE_CHECKING

from paceline.audit.report import Report
from paceline.audit.two_sample import LEVEL
from paceline.core.errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOOD, BAD, GREY = "#1f6feb", "#cf222e", "#9aa5b1"
ORIGINS = ("accepted", "recovered", "bonus", "plain")
SMALLEST = 1e-12
"""Where 0 is drawn on a logarithmic axis."""


def plots(report: Report) -> list[str]:
    """Each the text of one `<svg>` element."""
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
    return [_svg(one) for one in figures]


def _by_origin(axes: "Axes", report: Report) -> None:
    """Tokens checked, by where they came from, and those of them that drifted."""
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
    _dress(axes, "Tokens that drifted, by origin", "tokens", "")


def _margins(axes: "Axes", report: Report) -> None:
    """How clearly picks won: what lies far left of the others could have gone either way by rounding."""
    margins = [max(margin, SMALLEST) for text in report.texts for margin in text.margins]
    low = min(margins, default=SMALLEST)
    edges = _decades(min(low, 1e-5), max(margins, default=1.0))
    axes.hist(margins, bins=edges, color=GOOD)
    gaps = [finding.figure for finding in report.findings if finding.figure < float("inf")]
    if gaps:
        axes.hist([max(gap, edges[0]) for gap in gaps], bins=edges, color=BAD, label="gap of a token that drifted")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xscale("log")
    _dress(axes, "How far the pick lay above the second best", "logits", "tokens")


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
    _dress(axes, f"Ranks of tokens: p = {two.p_value:.3g}, alarm below {LEVEL:g}", "rank under plain p", "share")


def _divergences(axes: "Axes", report: Report) -> None:
    names = {"logits": "p", "p": "p", "q": "q"}
    wrong = {(names[one.kind], one.prompt, one.index) for one in report.findings if one.kind in names}
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
    _dress(axes, f"KL from what a plain pass gives, drift above the line; {SMALLEST:g}: none", "output token", "KL")


def _decades(low: float, high: float) -> list[float]:
    start, end = math.floor(math.log10(low)), math.ceil(math.log10(max(high, low * 10)))
    return [10.0 ** (start + step / 4) for step in range(4 * (end - start) + 1)]


def _dress(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def _svg(figure: "Figure") -> str:
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text: smaller, and read by whoever reads the page
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
