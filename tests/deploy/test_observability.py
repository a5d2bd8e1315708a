"""The Grafana dashboard and the alerts use existing metrics and labels; checked with promtool if it is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "paceline.json").read_text("utf-8"))
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES += [one["target"]["expr"] for one in DASHBOARD["annotations"]["list"]]
EXPRESSIONS = [rule["expr"] for rule in RULES]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def documented() -> dict[str, set[str]]:
    """Series names and their labels from docs/metrics.md, which a test of the server compares with the metrics."""
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(paceline_\w+)` \| (\w+) \| ([\w, ]*)\|", page, re.MULTILINE)
    series = {}
    for name, kind, labels in rows:
        own = {*re.findall(r"\w+", labels), "model", "job", "instance"}
        for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            series[name + suffix] = own | {"le"} if suffix == "_bucket" else own
    return series


SERIES = documented()


def used(expression: str) -> set[str]:
    return set(re.findall(r"\bpaceline_\w+", expression))


@pytest.mark.parametrize("expression", [*QUERIES, *EXPRESSIONS])
def test_queries_use_existing_metrics_and_labels(expression: str) -> None:
    names = used(expression)
    assert names or "paceline:" in expression
    assert names <= set(SERIES)
    for name, matchers in re.findall(r"\b(paceline_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", matchers)) <= SERIES[name], name
    allowed = set.union(*(SERIES[name] for name in names)) if names else set()
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        assert set(re.findall(r"\w+", grouped)) <= allowed


def test_rates_are_taken_of_counters_only() -> None:
    for expression in (*QUERIES, *EXPRESSIONS):
        for inner in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert inner.endswith(("_total", "_bucket", "_sum", "_count")), inner


def test_panels_do_not_overlap_and_have_a_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["targets"] and panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)
    assert {one["name"] for one in DASHBOARD["templating"]["list"]} == {"datasource", "model", "category"}


def test_variables_use_existing_labels() -> None:
    queries = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert len(queries) == 2
    for query in queries:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in SERIES[name]


def test_dashboard_shows_the_key_metrics() -> None:
    shown = set().union(*(used(query) for query in QUERIES))
    assert {
        "paceline_generated_tokens_total",
        "paceline_kept_drafts_total",
        "paceline_alpha",
        "paceline_depth",
        "paceline_speculation_gain",
        "paceline_fallbacks_total",
        "paceline_breaker_state",
        "paceline_drifts_total",
        "paceline_time_to_first_token_seconds_bucket",
        "paceline_time_per_output_token_seconds_bucket",
        "paceline_worker_prespeculation_hits_total",
        "paceline_worker_drafts_ahead",
        "paceline_symptom",
        "paceline_audit_drifted_tokens_total",
    } <= shown


def test_alerts_are_complete() -> None:
    assert {
        "PacelineLowAcceptance",
        "PacelineDraftSlowerThanVerify",
        "PacelineNetworkLongerThanDrafting",
        "PacelinePreemptionsRising",
        "PacelineBreakerOpen",
        "PacelineDrift",
    } <= set(ALERTS)
    assert (ALERTS["PacelineLowAcceptance"]["expr"], ALERTS["PacelineLowAcceptance"]["for"]) == (
        "paceline:alpha:rate5m < 0.6",
        "10m",
    )
    for alert in ALERTS.values():
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["labels"]["severity"] in ("info", "warning", "critical")


def promtool(*arguments: str, folder: Path) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_pass_promtool() -> None:
    promtool("check", "rules", "alerts.yaml", folder=PROMETHEUS)
    promtool("test", "rules", "alerts_test.yaml", folder=PROMETHEUS)


@needs_promtool
def test_dashboard_queries_pass_promtool(tmp_path: Path) -> None:
    """Checked as recording rules, which need no server."""
    rules = [
        {"record": f"panel:{i}", "expr": query.replace("$__rate_interval", "1m")} for i, query in enumerate(QUERIES)
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", "rules.yaml", folder=tmp_path)
