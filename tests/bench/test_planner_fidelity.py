"""The parts of benchmarks/planner/planner_fidelity.py that need no server."""

import importlib
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.texts import kinds_of_texts

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner"
METRICS = """
paceline_draft_depth_bucket{category="chat",le="1.0",model="m"} 10.0
paceline_draft_depth_bucket{category="chat",le="2.0",model="m"} 30.0
paceline_draft_depth_bucket{category="chat",le="+Inf",model="m"} 30.0
paceline_draft_depth_bucket{category="code",le="1.0",model="m"} 5.0
paceline_draft_depth_bucket{category="code",le="2.0",model="m"} 5.0
"""


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def module(name: str) -> Any:
    return sys.modules.get(name) or importlib.import_module(name)


def test_depths_are_those_of_the_metrics(path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = module("planner_fidelity_servers")
    monkeypatch.setattr(servers, "_get", lambda _: METRICS)
    depths = servers.DraftDepths.read("http://server")
    assert depths.rounds == Counter({1: 15, 2: 20})
    assert depths.since(depths).rounds.total() == 0
    assert depths.mean == pytest.approx(55 / 35)
    assert depths.shares == pytest.approx((1.0, 20 / 35))


def test_alphas_and_spread_are_recovered_from_rounds_of_different_depths(path: None) -> None:
    runs, depths = module("planner_fidelity_runs"), module("planner_fidelity_servers").DraftDepths
    alphas = (0.8, 0.7, 0.6)
    dice, kinds = random.Random(1), kinds_of_texts(alphas, 0.8)
    drafted, texts = Counter[int](), []
    for own in kinds * 4:
        rounds = [0] * 4
        for _ in range(40):
            depth = dice.choice((1, 3))
            drafted[depth] += 1
            rounds[next((at for at, alpha in enumerate(own[:depth]) if dice.random() >= alpha), depth)] += 1
        texts.append(rounds)
    fit = [runs.Run(3.0, None, [], [], [], 0, 1.0, 0.0, texts)]
    found = runs.Setting(1, 3, "policy", depths(drafted).shares).speculation(fit)
    assert found.alphas == pytest.approx(alphas, abs=0.04)
    assert found.spread == pytest.approx(0.8, abs=0.15)
    assert runs.Setting().speculation(fit) is None, "no drafts"
    alike = runs.alike(found)
    assert alike.spread == 0.0
    assert alike.alphas[0] < found.alphas[0], "texts of a low alpha have more rounds"
    assert len(alike.alphas) == 3


def test_the_fit_recovers_the_speed_of_the_worker_and_the_time_of_the_gateway(path: None) -> None:
    runs = module("planner_fidelity_runs")
    profile = load_profile("h200-8b")
    requests = [(0.02 * i, 200, 20) for i in range(40)]
    slower = runs.scaled(profile, 1.3)
    assert slower.draft_seconds.at(8) == pytest.approx(1.3 * profile.draft_seconds.at(8))
    assert slower.start_seconds == profile.start_seconds

    def simulate_run(own: Any, run: Any, gateway: float) -> Any:
        return runs.mean(runs.simulated(SimulationConfig(own), run, gateway))

    empty = runs.Run(50.0, None, requests, [], [], 0, 1.0, 0.0, [])
    real = simulate_run(slower, empty, 0.004)
    times = [real["TTFT mean, ms"] / 1e3], [real["TPOT mean, ms"] / 1e3]
    factor, gateway = runs.fitted(profile, [runs.Run(50.0, None, requests, *times, 800, 1.0, 0.0, [])], simulate_run)
    assert factor == pytest.approx(1.3, rel=0.01)
    assert gateway == pytest.approx(0.004, abs=0.001)
