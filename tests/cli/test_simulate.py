import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.commands import cli

SHORT = ("--rate", "5", "--seconds", "20", "--prompt-tokens", "300", "--output-tokens", "50")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ("simulate", *arguments), env={"COLUMNS": "200"})


def test_synthetic_traffic_prints_a_table() -> None:
    result = run(*SHORT, "--alpha", "0.8", "--ttft-ms", "200", "--tpot-ms", "10", "--price", "3.6")
    assert result.exit_code == 0, result.output
    assert "on 1 x h200-8b" in " ".join(result.stdout.split())
    assert "TTFT" in " ".join(result.stdout.split())
    assert "TTFT at most 200 ms, TPOT at most 10 ms" in " ".join(result.stdout.split())
    assert "Not measured in this profile" in " ".join(result.stdout.split())


def test_without_alpha_the_report_says_that_no_worker_drafts() -> None:
    assert "give --alpha" in run(*SHORT).stdout
    assert "give --alpha" not in run(*SHORT, "--alpha", "0.8").stdout


def test_a_plot_without_matplotlib_ends_before_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*SHORT, "--html", str(tmp_path / "a.html"))
    assert result.exit_code == 2
    assert "paceline[bench]" in result.stderr
    assert result.stdout == ""


def test_a_trace_file_and_all_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, figures, plot = tmp_path / "t.csv", tmp_path / "a.json", tmp_path / "a.png"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,480,10\n2023-11-16 18:17:04,320,8\n", "utf-8"
    )
    result = run(str(trace), "--workers", "2", "--scale", "3", "--json", str(figures), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    document = json.loads(figures.read_text("utf-8"))
    assert document["requests"] == 6
    assert document["objective"]["ttft"] is None
    assert len(document["ttft_cdf"]) == 101
    assert document["ttft_cdf"][50] == pytest.approx(document["ttft"]["p50"])
    assert set(document["utilisation_by_worker"]) == {"target-0", "target-1"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.endswith(f"wrote {figures}\nwrote {plot}\n")


def test_pools_faults_and_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html = tmp_path / "a.html"
    pools = ("--workers", "2", "--prefill-workers", "1", "--draft-workers", "1", "--alpha", "0.8")
    faults = ("--fault", "worker:target-1@5", "--fault", "alpha:0.5@8-12", "--fault", "link:10@3-4")
    load = ("--rate", "20", "--seconds", "20", "--prompt-tokens", "1500", "--output-tokens", "100")
    result = run(*load, *pools, *faults, "--html", str(html))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "1 prefill worker, 1 draft worker" in text
    assert "hand-offs" in text
    assert "continued on another worker" in text
    document = html.read_text("utf-8")
    assert "<td>prefill-0</td>" in document
    assert "WorkersLost: target-1" in document
    assert 'src="data:image/png;base64,' in document
    assert result.stdout.endswith(f"wrote {html}\n")


def test_the_production_policy_needs_the_stepwise_mode() -> None:
    result = run(*SHORT, "--alpha", "0.8", "--rule", "policy")
    assert result.exit_code == 2
    assert "use the stepwise mode" in " ".join(result.stderr.split())
    assert run(*SHORT, "--alpha", "0.8", "--rule", "policy", "--mode", "stepwise").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--alpha", "high"), "--alpha takes numbers"),
        (("--alpha", "2"), "alpha must be in"),
        (("--alpha", "0.8", "--alpha-spread", "9"), "spread of alpha must be in"),
        (("--draft-workers", "1"), "need an alpha"),
        (("--profile", "none"), "cannot read profile none"),
        (("--json", "/nowhere/a.json"), "there is no folder"),
        (("/nowhere/t.csv",), "cannot read"),
        (("--rate", "0"), "rate above 0"),
        (("--prefix-tokens", "5000"), "prompts longer than their prefix"),
        (("--seconds", "0"), "a time above 0"),
        (("--scale", "0"), "above 0"),
        (("--ttft-ms", "0"), "times above 0"),
        (("--fault", "worker:target-5@1"), "a fault names target-5"),
        (("--fault", "worker:target-0@9-2"), "cannot read the fault"),
        (("--fault", "foo"), "cannot read the fault 'foo' (it has no kind or no time)"),
        (("--fault", "storm:1@2"), "unknown kind of fault"),
        (("--prefill-workers", "1", "--link", "string"), "has no link 'string'"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
