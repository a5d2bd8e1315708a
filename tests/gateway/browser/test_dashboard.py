"""The dashboard in a browser."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
SAME = "same"
"""In every verdict about equal texts."""

TRAFFIC = (
    TrafficStatus("ngram", "code", BreakerState.CLOSED, (0.75, 0.5, 0.25), 2.5, {}),
    TrafficStatus("ngram", "prose", BreakerState.CLOSED, (0.5,), 1.0, {}),
)


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
    for name in ("first", "second"):
        page.click(f"#models option[value={name}]")
        page.click("#reset")
        page.ask("Who are you?")
        page.wait_for_text(".speculative .text", f"I am {name}")
        page.wait_for_text(".verdict", SAME)
    page.wait_for_text("#workers", "engine-0")
    assert page.console_errors() == []


def test_a_server_with_one_model_shows_its_name(open_page: Open) -> None:
    page = open_page(served(served_model_name="mine"))
    page.wait_for_text("#model", "mine")
    assert not page.one("#models").is_displayed()


# --- the playground


def test_every_token_has_the_colour_of_its_origin(open_page: Open) -> None:
    page = open_page(served("Hello", per_step=3))
    page.ask("Hi")
    page.wait_for_text(".verdict", SAME)
    spans = [(one.get_attribute("class"), one.text) for one in page.all(".speculative .text span")]
    assert spans == [("accepted", "H"), ("accepted", "e"), ("bonus", "l"), ("accepted", "l"), ("bonus", "o")]
    colours = [one.value_of_css_property("background-color") for one in page.all(".speculative .text span")]
    assert colours[0] == colours[1] != colours[2]
    detail = page.text(".speculative .detail")
    assert "2.50 tokens a round · draft acceptance rate 100% (3 of 3) · 3 guessed, 2 extra" in detail
    assert page.console_errors() == []


def test_speculative_and_plain_answers_use_the_same_seed(open_page: Open) -> None:
    server = served("Same as ever.")
    page = open_page(server)
    page.ask("Hi")
    page.wait_for_text(".verdict", SAME)
    assert page.texts(".answer h3") == ["Speculative", "Plain"]
    assert page.texts(".answer .text") == ["Same as ever."] * 2
    left, right = (one.rect for one in page.all(".answer"))
    assert left["y"] == right["y"]
    speculative, plain = server.target.requests[:2]
    assert (speculative.speculation.enabled, plain.speculation.enabled) == (True, False)
    assert speculative.sampling == plain.sampling


def test_a_different_text_is_reported(open_page: Open) -> None:
    page = open_page(served(lambda request: "Yes." if request.speculation.enabled else "No."))
    page.ask("Hi")
    page.wait_for_text(".verdict", "The text differs")
    assert page.one(".verdict.bad")


def test_without_guesses_no_speed_is_claimed(open_page: Open) -> None:
    page = open_page(served("Hello", per_step=1))  # one token a step: no drafts
    page.ask("Hi")
    assert page.wait_for_text(".verdict", SAME).startswith("No guesses were made, so there is nothing to compare.")
    assert page.all(".verdict.good") == []
    assert "no guesses were made" in page.text(".speculative .detail")


def test_speeds_are_compared_after_repeated_runs(open_page: Open) -> None:
    server = served("Hello there", per_step=3)
    page = open_page(server)
    page.ask("Hi")
    page.until(lambda: len(server.target.requests) == 6)
    enabled = [request.speculation.enabled for request in server.target.requests]
    assert enabled == [True, False] * 3
    assert len({request.sampling.seed for request in server.target.requests}) == 1
    assert len(page.all(".answer")) == 2


@pytest.mark.parametrize(
    ("speculative", "plain", "text", "tone"),
    [
        ([20, 21, 22], [10, 11, 19], f"1.91{TIMES} the speed of plain in 3 runs of each", "good"),
        ([20, 21, 12], [10, 11, 13], "No difference in speed beyond the spread", ""),
        ([7, 8, 9], [10, 11, 12], f"Slower than plain: 0.73{TIMES}", "warn"),
        ([20], [10], "Measuring the speed again, 1 of 3 runs", ""),
    ],
)
def test_a_verdict_needs_a_difference_beyond_the_spread(
    open_page: Open, speculative: list[int], plain: list[int], text: str, tone: str
) -> None:
    page = open_page(served())
    found = page.run(
        "return import('/dashboard/verdict.js').then(module => module.verdict(arguments[0]))",
        {"isSame": True, "drafted": 5, "speculative": speculative, "plain": plain},
    )
    assert text in found["text"]
    assert found["tone"] == tone


def test_a_new_chat_clears_the_conversation(open_page: Open) -> None:
    server = served("Good.")
    page = open_page(server)
    page.click("#compare")
    page.ask("One")
    page.wait_for_text("#announcement", "Answered")
    page.ask("Two")
    page.until(lambda: len(server.target.requests) == 2)
    prompt = server.target.tokenizer.decode(server.target.requests[-1].prompt_ids)
    assert [word in prompt for word in ("One", "Good.", "Two")] == [True] * 3
    page.until(lambda: page.texts(".text") == ["Good.", "Good."])
    page.click("#reset")
    assert page.all(".turn") == []
    page.ask("Three")
    page.until(lambda: len(server.target.requests) == 3)
    assert "One" not in server.target.tokenizer.decode(server.target.requests[-1].prompt_ids)


def test_an_answer_can_be_stopped(open_page: Open) -> None:
    server = served(hold=True)
    page = open_page(server)
    page.ask("Hi")
    page.until(lambda: len(server.target.requests) == 1)
    page.click("#stop")
    page.wait_for_text(".answer .detail", "Stopped.")
    page.until(lambda: server.target.cancelled == [server.target.requests[0].id])
    assert page.one("#send").is_enabled()


def test_an_error_shows_the_servers_message(open_page: Open) -> None:
    page = open_page(served())
    page.one("#max-tokens").clear()
    page.write("#max-tokens", "3")
    page.run("document.getElementById('temperature').value = '11'")
    page.run("document.getElementById('ask').noValidate = true")
    page.ask("Hi")
    page.wait_for_text(".failure", "temperature")


def test_answers_are_not_parsed_as_html(open_page: Open) -> None:
    page = open_page(served("<img src=x onerror=alert(1)><b>bold</b>"))
    page.ask("<i>Hi</i>")
    page.wait_for_text(".verdict", SAME)
    assert page.text(".speculative .text") == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.all(".turn img, .turn .text b, .turn i:not(.meter i)") == []


# --- charts


def test_charts_show_the_traffic(open_page: Open) -> None:
    server = served("Some words of an answer.")
    set_traffic(server)
    page = open_page(server)
    page.ask("Write a Python function")
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
    page.click("#compare")
    page.ask("Hi")
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
    server = served("Hello.", api_keys=str(keys.path))
    page = open_page(server)
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.write("#api-key", "pl-not-a-key\n")
    page.wait_for_text("#key-reason", "no valid API key")
    page.write("#api-key", f"{key}\n")
    page.wait_for_text("#state", "specul")
    page.ask("Hi")
    page.wait_for_text(".verdict", SAME)
    assert page.run("return [Object.values(sessionStorage), localStorage.length, document.cookie]") == [[key], 0, ""]
    page.driver.refresh()
    page.wait_for_text("#state", "specul")
    assert not page.one("#key-dialog").is_displayed()
    page.click("#forget-key")
    page.until(lambda: page.one("#key-dialog").is_displayed())


def test_a_key_without_the_metrics_scope_hides_the_charts(open_page: Open, keys: KeyFile) -> None:
    key = keys.add("ben", scopes=("generate",))
    page = open_page(served("Hello.", api_keys=str(keys.path)))
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.write("#api-key", f"{key}\n")
    page.wait_for_text("#state", "no access to metrics")
    assert [one.is_displayed() for one in page.all("section")] == [True, False, False, False]
    page.ask("Hi")
    page.wait_for_text(".verdict", SAME)


# --- keyboard, colour schemes, small screens


def test_keyboard_control(open_page: Open) -> None:
    server = served("Hello", admin_key=ADMIN)
    set_traffic(server)
    page = open_page(server)
    page.wait_for_text("#chart-alpha .legend", "code")
    page.press("tab")
    assert page.focused() == "Skip to the content"
    page.press("enter", "tab")
    assert page.focused() == "message"
    page.press("H", "i", "enter")
    page.wait_for_text(".verdict", SAME)
    assert page.focused() == "message"

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


CONTRAST = """
const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(channel);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const background = (one) => {
  for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor;
    if (colour !== "rgba(0, 0, 0, 0)") return colour;
  }
};
return [...document.querySelectorAll(arguments[0])].filter((one) => one.offsetParent).map((one) => {
  const [low, high] = [luminance(getComputedStyle(one).color), luminance(background(one))].sort((a, b) => a - b);
  return [one.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05)];
}).filter(([text, ratio]) => text && ratio < 4.5);
"""
"""Texts with less contrast than WCAG AA requires."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str, open_page: Open) -> None:
    server = served("Hello there")
    set_traffic(server)
    page = open_page(server)
    page.scheme(scheme)
    page.ask("Hi")
    page.wait_for_text(".verdict", SAME)
    page.wait_for_text("#chart-alpha .legend", "code")
    is_dark = page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(one => one < 60)")
    assert is_dark == (scheme == "dark")
    faint = page.run(
        CONTRAST, "h1, h2, h3, p, li, dt, dd, small, figcaption, th, td, .text span, .origins span, .pill, button"
    )
    assert faint == []


def test_small_screens(open_page: Open) -> None:
    server = served("A somewhat longer answer, which has to be wrapped. " * 5)
    set_traffic(server)
    page = open_page(server)
    page.resize(*PHONE)
    page.run("document.getElementById('charts').open = true")
    page.ask("Hi")
    page.wait_for_text(".verdict", SAME)
    page.wait_for_text("#chart-alpha .legend", "code")
    beyond = page.run(  # `innerWidth` grows with the content
        "return [...document.querySelectorAll('body *')].filter(one => one.getBoundingClientRect().right > arguments[0] + 1)"
        ".map(one => one.outerHTML.slice(0, 80))",
        PHONE[0],
    )
    assert beyond == []
    upper, lower = (one.rect for one in page.all(".answer"))
    assert upper["y"] + upper["height"] <= lower["y"]
    small = [one.rect for one in page.all("button, select, #message") if one.is_displayed() and one.rect["height"] < 34]
    assert small == []
