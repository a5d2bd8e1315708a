import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.advise import DraftPlacement, in_pool
from paceline.cli.commands import cli
from paceline.policy.cost.advice import advise
from paceline.policy.cost.cost import Footprint, MethodCosts, TargetCosts

SMALL = ("--kv-tokens", "2048", "--max-model-len", "512", "--max-num-seqs", "8")
FIGURES = ("--alpha", "0.8", "--draft-ms", "2", "--verify-ms", "15", "--network-ms", "0.5")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ("advise", *arguments), env={"COLUMNS": "200"})


def test_given_figures_need_no_model() -> None:
    result = run(*FIGURES, "--price", "2.69", "--model", "/nowhere")
    assert result.exit_code == 0, result.output
    assert "Speculate with draft_model at depth 5: 2.17x plain decoding." in result.stdout
    # 25.5 ms for 3.68928 tokens at 2.69 dollars an hour
    assert "A million tokens cost $5.16, plain $11.21." in result.stdout


def test_time_of_a_plain_step_changes_the_advice() -> None:
    result = run(*FIGURES, "--plain-ms", "6")
    assert result.exit_code == 0, result.output
    assert "Do not speculate: the best, draft_model at depth 5, would run at 0.87x" in result.stdout


def test_alpha_by_position() -> None:
    result = run("--alpha", "0.9,0.2", "--draft-ms", "1", "--verify-ms", "10", "--max-depth", "4")
    assert "Speculate with draft_model at depth 2" in result.stdout


LARGE = ("--alpha", "0.8", "--draft-ms", "0.55", "--verify-ms", "19.6", "--plain-ms", "18.8", "--max-depth", "7")
"""A 70B in FP8 on an H200 with a draft model of 135M parameters."""


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            ("--pool-draft-ms", "1.6"),
            "Draft in the engine: a pool reaches 0.76 of the speed of draft_model at depth 7.",
        ),
        (("--pool-draft-ms", "1.6", "--pool-ready", "0.67"), "Either place serves: a pool reaches 1.01"),
        (("--pool-draft-ms", "1.6", "--pool-ready", "1"), "Use a pool: a pool reaches 1.20"),
        (
            ("--pool-ready", "1", "--network-ms", "100"),
            "Use a pool: a pool reaches 1.20",
        ),  # drafts wait, not the target
        (
            ("--pool-draft-ms", "1.6", "--pool-ready", "0.67", "--batch", "4"),
            "Draft in the engine: a pool reaches 0.82",  # a step waits for the last of its four drafts
        ),
    ],
)
def test_where_to_place_the_draft_of_a_large_target(pool: tuple[str, ...], message: str) -> None:
    result = run(*LARGE, *pool)
    assert result.exit_code == 0, result.output
    assert message in " ".join(result.stdout.split())  # lines are wrapped to the width of the console


def test_a_pool_serves_a_target_whose_device_is_full() -> None:
    memory = ("--target-gb", "79.8", "--draft-gb", "0.4", "--device-gb", "80")
    shown = " ".join(run(*LARGE, *memory, "--pool-draft-ms", "1.6").stdout.split())
    assert "Speculate with pool at depth" in shown
    assert "Use a pool: draft_model at depth 7 does not fit; a pool reaches 0.76" in shown
    assert "leaves 0.4 GB to the KV cache" in shown


def test_plot_page_and_json_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, page, figures = tmp_path / "a.png", tmp_path / "a.html", tmp_path / "a.json"
    result = run(*FIGURES, "--method", "<b>", "--plot", str(plot), "--html", str(page), "--json", str(figures))
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.endswith(f"wrote {plot}\nwrote {page}\nwrote {figures}\n")
    text = page.read_text("utf-8")
    assert "data:image/png;base64,iVBOR" in text
    assert "&lt;b&gt; at depth 5" in text
    assert "<b>" not in text
    assert "http" not in text  # nothing is fetched
    document = json.loads(figures.read_text("utf-8"))
    assert document["speculate"] is True
    assert [row["depth"] for row in document["table"]] == list(range(11))
    assert document["choice"]["speedup"] == pytest.approx(2.170, abs=0.001)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--alpha", "0.8"), "need all three"),
        (("--alpha", "much", "--draft-ms", "1", "--verify-ms", "2"), "numbers between 0 and 1"),
        (("--alpha", "1.5", "--draft-ms", "1", "--verify-ms", "2"), "alpha must be in"),
        (("--plot", "/nowhere/at/all.png"), "there is no folder"),
        (("prompts.jsonl", *FIGURES), "leave out prompts.jsonl, or the figures"),
    ],
)
def test_invalid_figures_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_pool_drafts_the_same_and_waits_for_the_network() -> None:
    local = MethodCosts("draft_model", (0.8,), {0: 0.0, 8: 0.01}, footprint=Footprint(weight_bytes=10**9))
    pool = in_pool(local, DraftPlacement(0.002, 1.5), batch=1)
    assert (pool.name, pool.network_seconds, pool.price_per_hour) == ("pool", 0.002, 1.5)
    assert (pool.alphas, pool.draft_seconds, pool.footprint) == (local.alphas, local.draft_seconds, Footprint())
    assert not DraftPlacement(0.0, 0.0)
    target = TargetCosts({1: 0.03, 9: 0.03}, memory_bytes=10**9, footprint=Footprint(weight_bytes=10**9))
    advice = advise(target, (local, pool), 8)  # the draft does not fit beside the target
    assert advice.choice.method == "pool"


def test_calibration_of_the_embedded_model(tmp_path: Path) -> None:
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text('{"prompt": "Repeat exactly: a b c d e f g h a b c d e f g h a b c d e f g h"}\n')
    result = run(
        str(prompts),
        "--tokens",
        "32",
        "--max-depth",
        "2",
        "--json",
        str(figures),
        "--methods",
        "ngram",
        *SMALL,
    )
    assert result.exit_code == 0, result.output
    assert "measured here" in result.stdout
    document = json.loads(figures.read_text("utf-8"))
    passes = {int(rows): seconds for rows, seconds in document["target"]["pass_seconds"].items()}
    assert min(passes) == 1  # a plain step
    assert document["target"]["footprint"]["weight_bytes"] > 50e6
    (ngram,) = document["methods"]
    assert ngram["name"] == "ngram"
    assert len(ngram["alphas"]) == 2
    assert 0.0 < ngram["delivery"] <= 1.0
    assert set(ngram["draft_seconds"]) == {"1", "2"}
