"""The parts of benchmarks/planner_fidelity.py that need no server."""

import importlib
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.planning.profiles.profile_file import load_profile

FOLDER = Path(__file__).parents[2] / "benchmarks"
METRICS = """
paceline_draft_depth_bucket{category="chat",le="1.0",model="m"} 10.0
paceline_draft_depth_bucket{category="chat",le="2.0",model="m"} 30.0
paceline_draft_depth_bucket{category="chat",le="+Inf",model="m"} 30.0
paceline_draft_depth_bucket{category="code",le="1.0",model="m"} 5.0
paceline_draft_depth_bucket{category="code",le="2.0",model="m"} 5.0
paceline_accepted_tokens_by_position_total{category="chat",model="m",position="1"} 21.0
paceline_accepted_tokens_by_position_total{category="code",model="m",position="1"} 4.0
paceline_accepted_tokens_by_position_total{category="chat",model="m",position="2"} 7.0
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def module(name: str) -> Any:
    return sys.modules.get(name) or importlib.import_module(name)


def test_draft_counts_are_those_of_the_metrics(path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = module("planner_fidelity_servers")
    monkeypatch.setattr(servers, "_get", lambda _: METRICS)
    counts = servers.DraftCounts.read("http://server")
    assert counts.depths == Counter({1: 15, 2: 20})
    assert counts.accepted == Counter({1: 25, 2: 7})
    assert counts.since(counts).depths.total() == 0
    assert counts.mean_depth == pytest.approx(55 / 35)


def test_alphas_are_recovered_from_rounds_of_different_depths(path: None) -> None:
    dice, depths, accepted = random.Random(1), Counter[int](), Counter[int]()
    for _ in range(40_000):
        depth = dice.choice((1, 2, 4))
        depths[depth] += 1
        for position, alpha in enumerate((0.8, 0.6, 0.5, 0.4)[:depth], start=1):
            if dice.random() >= alpha:
                break
            accepted[position] += 1
    alphas = module("planner_fidelity_servers").DraftCounts(depths, accepted).alphas()
    assert alphas == pytest.approx((0.8, 0.6, 0.5, 0.4), abs=0.02)


def test_the_fit_recovers_the_speed_of_the_worker_and_the_time_of_the_gateway(path: None) -> None:
    runs = module("planner_fidelity_runs")
    profile, setting = load_profile("h200-8b"), runs.Setting()
    requests = [(0.02 * i, 200, 20) for i in range(40)]
    slower = runs.scaled(profile, 1.3)
    assert slower.draft_seconds.at(8) == pytest.approx(1.3 * profile.draft_seconds.at(8))
    assert slower.start_seconds == profile.start_seconds

    def simulate_run(own: Any, run: Any, gateway: float) -> Any:
        return runs.simulated(setting, own, run, gateway)

    empty = runs.Run(50.0, None, requests, [], [], 0, 1.0, 0.0)
    real = simulate_run(slower, empty, 0.004)
    times = [real["TTFT mean, ms"] / 1e3], [real["TPOT mean, ms"] / 1e3]
    factor, gateway = runs.fitted(profile, [runs.Run(50.0, None, requests, *times, 800, 1.0, 0.0)], simulate_run)
    assert factor == pytest.approx(1.3, rel=0.01)
    assert gateway == pytest.approx(0.004, abs=0.001)
