"""The dashboard in a browser. tests/gateway/browser/test_playground.py tests the playground."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.request import SpeculationFlags
from paceline.core.status import (
    BreakerState,
    ClusterStatus,
    EngineStatus,
    Symptom,
    TrafficStatus,
    WorkerLife,
    WorkerStatus,
)
from paceline.gateway.auth.access import Access
from paceline.gateway.auth.api_keys import KeyFile
from paceline.gateway.http.app import create_app
from paceline.gateway.sessions.models import ServedModels
from tests.gateway.fakes import Served, served

pytest.importorskip("selenium")
from tests.gateway.browser.page import PHONE, Page

Open = Callable[[Served], Page]
ADMIN = "open-sesame"
NONE, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"

TRAFFIC = (
    TrafficStatus("ngram", "code", BreakerState.CLOSED, (0.75, 0.5, 0.25), 2.5, {}),
    TrafficStatus("ngram", "prose", BreakerState.CLOSED, (0.5,), 1.0, {}),
)


@pytest.fixture
def open_page(open_page: Callable[[Served, str], Page]) -> Open:
    return lambda server: open_page(server, "dashboard")


def ask(page: Page, message: str) -> None:
    """Sends a request to the server of the page."""
    body = {"messages": [{"role": "user", "content": message}]}
    assert httpx.post(f"{page.url}v1/chat/completions", json=body, timeout=60).status_code == 200


def set_traffic(server: Served, **changes: Any) -> None:
    """Sets an engine status with traffic of two categories."""
    flags = SpeculationFlags(True, "ngram", 8)
    status = replace(EngineStatus(3, 2, 10, 40, 0, 0, flags, TRAFFIC), **changes)
    server.target.engine_status = lambda: status  # type: ignore[method-assign]


# --- several models


def test_a_server_with_several_models_has_a_selection(open_page: Open) -> None:
    first, second = (served(f"I am {name}", served_model_name=name) for name in ("first", "second"))
    models = ServedModels([first.gateway, second.gateway])
    app = create_app(models, Access.from_config(first.gateway.config, lambda: 0.0))
    page = open_page(Served(first.target, first.gateway, app))
    page.wait_for_text("#models", "second")
    assert not page.one("#model").is_displayed()
    page.click("#models option[value=second]")
    page.wait_for_text("#workers", "engine-0")
    assert page.console_errors() == []


def test_a_server_with_one_model_shows_its_name(open_page: Open) -> None:
    page = open_page(served(served_model_name="mine"))
    page.wait_for_text("#model", "mine")
    assert not page.one("#models").is_displayed()


# --- charts


def test_charts_show_the_traffic(open_page: Open) -> None:
    server = served("Some words of an answer.")
    set_traffic(server)
    page = open_page(server)
    ask(page, "Write a Python function")
    page.wait_for_text("#chart-speed .legend", "all")
    assert page.wait_for_text("#chart-alpha .legend", "code").split("\n") == ["code 75%", "prose 50%"]
    assert page.wait_for_text("#chart-depth .legend", "code").split("\n") == ["code 2.5", "prose 1.0"]
    for name in ("ttft", "tpot"):
        assert "p99" in page.wait_for_text(f"#chart-{name} .legend", "p50")
    page.wait_for_text("#chart-load .legend", "running 3")
    page.wait_for_text("#figures", "25%")  # 10 of 40 blocks
    assert all(page.run("return [...document.querySelectorAll('.plot canvas')].map(one => one.width > 100)"))
    label = page.one("#chart-alpha .plot").get_attribute("aria-label")
    assert label == "Alpha, by position: code 75%, 50%, 25%; prose 50%"
    assert page.console_errors() == []


def test_methods_are_shown_if_a_category_has_several(open_page: Open) -> None:
    server = served()
    set_traffic(server, traffic=(*TRAFFIC, replace(TRAFFIC[0], method="suffix", alphas=(0.9,), mean_depth=3.0)))
    page = open_page(server)
    assert page.wait_for_text("#chart-depth .legend", "code").split("\n") == [
        "code · ngram 2.5",
        "code · suffix 3.0",
        "prose 1.0",
    ]
    assert page.text("#chart-alpha .legend").split("\n") == ["code · ngram 75%", "code · suffix 90%", "prose 50%"]


def test_a_drift_is_shown(open_page: Open) -> None:
    server = served()
    set_traffic(server)
    page = open_page(server)
    page.wait_for_text("#chart-alpha .legend", "code")
    assert page.text("#drifts") == ""
    set_traffic(server, traffic=(replace(TRAFFIC[0], drifts=1, drift=(0.8, 0.45)), TRAFFIC[1]))
    text = page.wait_for_text("#drifts", "acceptance for code (ngram) changed from 80% to 45%")
    assert text.endswith("depth is learned again.")
    assert page.console_errors() == []


def test_what_is_not_configured_is_named(open_page: Open) -> None:
    page = open_page(served())
    assert page.wait_for_text("#missing", "Draft workers").startswith("Not configured")
    assert [text.split(":")[0] for text in page.texts("#missing li")] == [
        "Draft workers",
        "Cost",
        "Switches and planner",
    ]
    page = open_page(served(admin_key=ADMIN))
    page.wait_for_text("#missing", "Draft workers")
    assert len(page.texts("#missing li")) == 2
    assert page.network_errors() == []


def test_charts_without_traffic(open_page: Open) -> None:
    page = open_page(served())
    page.wait_for_text("#chart-alpha .empty", "No drafts verified yet")
    page.wait_for_text("#chart-ahead .empty", "No draft workers")
    assert page.texts("#worker-table tbody th") == ["engine-0"]


def test_workers_and_drafting_ahead(open_page: Open) -> None:
    server = served()
    set_traffic(server)
    symptom = Symptom("slow_draft", 2.0, 1.0, "use a smaller draft")
    life = WorkerLife(3, time.time() - 150, "SIGKILL")
    answers = 0

    def status() -> ClusterStatus:
        nonlocal answers
        answers += 10
        target = WorkerStatus(
            "target-0",
            "big",
            "target",
            "ready",
            "tcp://a",
            3,
            1,
            0.5,
            2.5,
            drafted=8,
            accepted=6,
            symptoms=(symptom,),
            life=life,
        )
        draft = WorkerStatus(
            "draft-0",
            "draft",
            "draft",
            "suspected",
            "tcp://b",
            answers=answers,
            hits=answers * 4 // 5,
            round_trip=0.0021,
        )
        return ClusterStatus((target, replace(draft, life=life), replace(draft, name="draft-1", paused_share=0.016)), 0)

    server.target.cluster_status = status  # type: ignore[method-assign]
    page = open_page(server)
    page.until(lambda: page.texts("#worker-table tbody th") == ["target-0", "draft-0", "draft-1"])
    rows = page.texts("#worker-table tbody tr")
    first = ["target-0", "big, target", "ready", "3", "1", "50%", "2.5", "75%", NONE, NONE, NONE, "2 min", "3"]
    assert rows[0].split("\t") == first
    assert rows[1].split("\t")[2:8] == ["suspected", "0", "0", NONE, NONE, NONE]
    assert rows[1].split("\t")[8:10][0] == "2.10 ms"
    assert rows[1].split("\t")[9].startswith("80% of ")
    assert rows[2].split("\t")[9] == "off: 2%"
    assert page.text("#symptoms").split("\n") == [
        f"draft-0 was restarted 3{TIMES}; its last exit: SIGKILL",  # target-0 is ready again
        "target-0: slow draft, 2 (limit 1); use a smaller draft",
    ]
    page.wait_for_text("#chart-ahead .legend", "drafted ahead 80%")
    assert page.text("#chart-ahead figcaption") == "Drafting ahead · stopped by draft-1: too few drafts used"


def test_the_timeline_shows_what_happened(open_page: Open) -> None:
    server = served(admin_key=ADMIN)
    states = ["ready"]
    server.target.cluster_status = lambda: ClusterStatus(  # type: ignore[method-assign]
        (
            WorkerStatus(
                "engine-0", "engine", "target", states[-1], "", life=WorkerLife(len(states) - 1, 1.0, "SIGKILL")
            ),
        ),
        0,
    )
    page = open_page(server)
    page.wait_for_text("#events", "No changes")
    states.append("suspected")
    page.wait_for_text("#events", "engine-0 is suspected")
    assert "engine-0 restarted; its last exit: SIGKILL" in page.text("#events")
    server.gateway.flags.update({"enabled": False}, "ann")
    page.wait_for_text("#events", "speculation: off")


def test_charts_are_folded_on_a_phone(open_page: Open) -> None:
    page = open_page(served())
    assert page.run("return document.getElementById('charts').open")
    page.resize(*PHONE)
    page.driver.refresh()
    page.one("#charts:not([open])")


def test_the_state_counts_drafts(open_page: Open) -> None:
    server = served("Hello", per_step=3)
    set_traffic(server)
    page = open_page(server)
    page.wait_for_text("#state", "speculation on, 0 drafts in the last minute")
    ask(page, "Hi")
    page.wait_for_text("#state", "speculation on, 2 drafts in the last minute")


# --- switches


def test_switches_change_the_flags(open_page: Open) -> None:
    server = served(admin_key=ADMIN)
    page = open_page(server)
    page.wait_for_text("#switches-note", "admin key")
    assert not page.one("#flag-enabled").is_enabled()
    page.write("#admin-key", "wrong-key\n")
    page.wait_for_text("#switches-note.bad", "key")
    page.write("#admin-key", f"{ADMIN}\n")
    page.until(lambda: page.one("#flag-enabled").is_enabled())
    enabled = page.one("#flag-enabled")
    assert (enabled.aria_role, enabled.accessible_name) == ("switch", "Speculation")
    enabled.click()
    page.until(lambda: server.gateway.flags.get().enabled is True)
    page.wait_for_text("#flag-enabled-note", "on")
    page.write("#flag-depth", "3")
    page.until(lambda: server.gateway.flags.get().max_depth == 3)
    page.write("#flag-method", "ngram")
    page.until(lambda: server.gateway.flags.get().method == "ngram")
    page.wait_for_text("#changes", "maximum depth: 3")
    assert "by admin (127.0.0.1)" in page.text("#changes")
    page.until(lambda: page.one("#flag-reset").is_enabled())
    page.click("#flag-reset")
    page.until(lambda: server.gateway.flags.get() == SpeculationFlags())


def test_changes_of_other_clients_are_shown(open_page: Open) -> None:
    server = served(admin_key=ADMIN)
    page = open_page(server)
    page.write("#admin-key", f"{ADMIN}\n")
    page.wait_for_text("#changes", "No changes")
    server.gateway.flags.update({"enabled": False}, "ann")
    page.wait_for_text("#changes", "speculation: off")
    page.wait_for_text("#state", "speculation off")


def test_without_admin_keys_the_switches_are_disabled(open_page: Open) -> None:
    page = open_page(served())
    page.wait_for_text("#switches-note", "PACELINE_ADMIN_KEY=choose-a-key paceline serve")
    assert not page.one("#unlock").is_displayed()
    assert page.network_errors() == []


# --- keys


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(str(tmp_path / "keys.json"))


def test_the_key_is_requested_and_stored_in_the_tab(open_page: Open, keys: KeyFile) -> None:
    key = keys.add("ann", scopes=("generate", "metrics"))
    page = open_page(served("Hello.", api_keys=str(keys.path)))
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.write("#api-key", "pl-not-a-key\n")
    page.wait_for_text("#key-reason", "no valid API key")
    page.write("#api-key", f"{key}\n")
    page.wait_for_text("#state", "specul")
    assert page.run("return [Object.values(sessionStorage), localStorage.length, document.cookie]") == [[key], 0, ""]
    page.driver.refresh()
    page.wait_for_text("#state", "specul")
    assert not page.one("#key-dialog").is_displayed()
    page.click("#forget-key")
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.click("#key-cancel")
    page.wait_for_text("#state", "needs an API key")


def test_a_key_without_the_metrics_scope_hides_the_charts(open_page: Open, keys: KeyFile) -> None:
    key = keys.add("ben", scopes=("generate",))
    page = open_page(served("Hello.", api_keys=str(keys.path)))
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.write("#api-key", f"{key}\n")
    page.wait_for_text("#state", "no access to metrics")
    assert [one.is_displayed() for one in page.all("section")] == [False, False, False]


# --- keyboard, colour schemes, small screens


def test_keyboard_control(open_page: Open) -> None:
    server = served("Hello", admin_key=ADMIN)
    set_traffic(server)
    page = open_page(server)
    page.wait_for_text("#chart-alpha .legend", "code")
    page.press("tab")
    assert page.focused() == "Skip to the content"

    page.run("document.querySelector('#chart-alpha .plot').focus()")
    page.press("end")
    assert page.text("#chart-alpha .legend").split("\n") == ["code 25%", f"prose {NONE}"]
    page.press("arrow_left")
    assert page.text("#chart-alpha .legend").split("\n") == ["code 50%", f"prose {NONE}"]
    page.press("tab")
    page.wait_for_text("#chart-alpha .legend", "code 75%")

    page.write("#admin-key", f"{ADMIN}\n")
    page.until(lambda: page.one("#flag-enabled").is_enabled())
    page.run("document.getElementById('flag-enabled').focus()")
    before = page.one("#flag-enabled").is_selected()
    page.press("space")
    page.until(lambda: server.gateway.flags.get().enabled is (not before))


def test_every_control_has_an_accessible_name(open_page: Open) -> None:
    server = served(admin_key=ADMIN)
    set_traffic(server)
    page = open_page(server)
    page.wait_for_text("#chart-alpha .legend", "code")
    unnamed = [
        one.get_attribute("outerHTML")
        for one in page.all("button, input, select, textarea, a, figure .plot, section, nav, table")
        if one.is_displayed() and one.aria_role != "table" and not one.accessible_name
    ]
    assert unnamed == []
    assert page.run("return document.documentElement.lang") == "en"
    ids = page.run("return [...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str, open_page: Open) -> None:
    server = served("Hello there")
    set_traffic(server)
    page = open_page(server)
    page.scheme(scheme)
    page.wait_for_text("#chart-alpha .legend", "code")
    is_dark = page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(one => one < 60)")
    assert is_dark == (scheme == "dark")
    assert page.faint_texts("h1, h2, h3, p, li, dt, dd, small, figcaption, th, td, code, .pill, button") == []


def test_small_screens(open_page: Open) -> None:
    server = served("A somewhat longer answer, which has to be wrapped. " * 5)
    set_traffic(server)
    page = open_page(server)
    page.resize(*PHONE)
    page.run("document.getElementById('charts').open = true")
    page.wait_for_text("#chart-alpha .legend", "code")
    assert page.too_wide() == []
    small = [one.rect for one in page.all("button, select") if one.is_displayed() and one.rect["height"] < 34]
    assert small == []
