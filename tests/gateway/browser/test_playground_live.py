"""The playground of a server with the embedded model and speculation on, at a desktop's and a phone's size.

The tests of one size share a page. Those with the mark `pictures` save the pictures of docs/.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.gateway.process import server_process

pytest.importorskip("selenium")
from tests.gateway.browser.page import DESKTOP, PHONE, Page

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.pictures
DOCS = Path(__file__).parents[3] / "docs"
CODE = "Write a Python function that returns the first n Fibonacci numbers."
TABLE = "Make a table of five countries and their capitals."
TIDES = "Explain why the sea has tides."
SPECULATION: dict[str, Any] = {"speculation.depth": "fixed", "speculation.max_depth": 3}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process(max_model_len=2048, kv_tokens=8192, **SPECULATION) as server:
        yield f"{server.url}/"


@pytest.fixture(scope="module", params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def page(driver: "Chrome", url: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    page = Page(driver, url, size=request.param)
    page.run("localStorage.clear()")
    driver.refresh()
    page.wait_for_text("#model", "smollm2")
    yield page
    driver.get("about:blank")


def press_button(page: Page, selector: str) -> None:
    """Clicks; on a phone the chats are in a drawer."""
    if not page.one(selector).is_displayed():
        page.click("#toggle-chats")
    page.click(selector)


def new_chat(page: Page, **settings: str) -> None:
    """Starts a chat with default settings but these."""
    press_button(page, "#new-chat")
    page.click("#toggle-settings")
    if page.one("#reset-settings").is_enabled():
        page.click("#reset-settings")
    for field, value in {"temperature": "0", **settings}.items():
        page.one(f"#{field}").clear()
        page.write(f"#{field}", value)
    page.click("#settings .close")


def ask(page: Page, question: str) -> str:
    """Sends the question and waits for the answer, which is returned."""
    count = len(page.all(".turn"))
    page.one("#message").click()
    page.ask(question)
    page.until(lambda: len(page.texts(".figures")) > count and page.one("#send").is_displayed())
    return page.texts(".answer > .markdown")[-1]


def test_an_answer_is_generated_once_with_one_acceptance_rate(page: Page, url: str) -> None:
    def count(name: str) -> float:
        text = httpx.get(f"{url}metrics", timeout=60).text
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))

    names = ["paceline_requests_total", "paceline_drafted_tokens_total", "paceline_accepted_tokens_total"]
    new_chat(page)
    before = [count(name) for name in names]
    ask(page, CODE)
    requests, drafted, accepted = (count(name) - start for name, start in zip(names, before, strict=True))
    assert requests == 1
    rate = f"draft acceptance rate {100 * accepted / drafted:.0f}% ({accepted:.0f} of {drafted:.0f})"
    assert rate in page.text(".figures")
    assert set(page.texts(".code-bar span")) == {"python"}
    assert "def " in page.text(".code code")
    fonts = [page.one(one).value_of_css_property("font-family") for one in (".markdown p", ".code code")]
    assert ["mono" in font for font in fonts] == [False, True]


def test_the_dashboard_and_status_have_the_same_acceptance_rate(page: Page, url: str) -> None:
    report = httpx.get(f"{url}v1/paceline/overview", timeout=60).json()
    drafted, accepted = (sum(traffic[name] for traffic in report["traffic"]) for name in ("drafted", "accepted"))
    (worker,) = report["workers"]
    assert (worker["drafted"], worker["accepted"]) == (drafted, accepted)
    page.driver.get(f"{url}dashboard")
    tile = page.wait_for_text("#figures", f"of {drafted:,} since the start")
    assert f"{100 * accepted / drafted:.0f}%" in tile
    page.driver.get(url)
    page.wait_for_text("#model", "smollm2")


def test_tokens_are_coloured_on_demand(page: Page) -> None:
    plain = page.text(".answer > .markdown")
    page.click("#colours")
    assert {span.get_attribute("class") for span in page.all(".markdown p span, code span")} >= {
        "accepted",
        "recovered",
    }
    assert page.text(".answer > .markdown") == plain
    is_phone = page.width == PHONE[0]
    if is_phone:
        page.scheme("dark")
    page.run("document.activeElement.blur()")
    page.screen(DOCS / ("playground-phone.png" if is_phone else "playground-origins.png"))
    assert page.faint_texts(".markdown span, #origins span, button, p") == []
    page.scheme("light")
    page.click("#colours")
    assert page.all(".markdown p span") == []


def test_a_seed_repeats_a_text_without_speculation(page: Page) -> None:
    new_chat(page, temperature="0.8", seed="3", **{"max-tokens": "40"})
    text = ask(page, TIDES)
    page.click("#toggle-settings")
    page.click("#speculation")
    page.click("#settings .close")
    page.click(".again")
    page.wait_for_text(".figures", "speculation off")
    assert page.text(".answer > .markdown") == text


def test_a_system_prompt_changes_the_answer(page: Page) -> None:
    new_chat(page, **{"max-tokens": "24"})
    without = ask(page, "Who are you?")
    new_chat(page, system="You are a pirate called Bill. Answer as Bill.", **{"max-tokens": "24"})
    assert ask(page, "Who are you?") != without


def test_a_cut_answer_is_marked_and_continued(page: Page) -> None:
    new_chat(page, **{"max-tokens": "24"})
    start = ask(page, TIDES)
    page.wait_for_text(".notice", "Cut at 24 tokens.")
    page.click(".notice button")
    page.wait_for_text(".notice", "Cut at 48 tokens.")
    text = page.text(".answer > .markdown")
    assert text.startswith(start)
    assert len(text) > len(start)


def test_escape_stops_an_answer(page: Page) -> None:
    new_chat(page, **{"max-tokens": "1500"})
    page.one("#message").click()
    page.ask("Write a very long story about a ship. Do not stop.")
    page.until(lambda: len(page.text(".answer > .markdown")) > 20)
    page.press("escape")
    page.wait_for_text(".notice", "Stopped after")
    assert page.one("#send").is_displayed()


def test_a_comparison_finds_the_same_text(page: Page) -> None:
    new_chat(page, **{"max-tokens": "200"})
    ask(page, TABLE)
    page.click(".compare")
    page.until(lambda: page.one("#send").is_displayed() and "same" in page.text(".verdict"))
    assert "Measuring" not in page.text(".verdict")
    assert len(page.all(".speed-row")) == 2
    if page.width == DESKTOP[0]:
        page.run("document.activeElement.blur()")
        page.screen(DOCS / "playground.png")


def test_chats_survive_a_reload(page: Page) -> None:
    texts = page.texts(".question, .answer > .markdown")
    titles = page.run("return [...document.querySelectorAll('.chat')].map(one => one.textContent)")
    assert len(titles) > 3
    page.driver.refresh()
    page.until(lambda: page.texts(".question, .answer > .markdown") == texts)
    assert page.run("return [...document.querySelectorAll('.chat')].map(one => one.textContent)") == titles


def test_a_message_beyond_the_context_is_refused_with_a_way_out(page: Page) -> None:
    new_chat(page)
    page.run("document.getElementById('message').value = 'tides '.repeat(5000)")
    page.one("#message").click()
    page.press("enter")
    page.wait_for_text(".notice.bad", "too long for the model")
    page.click(".notice button")
    assert page.all(".turn") == []


def test_the_page_fits_in_light_and_dark(page: Page) -> None:
    new_chat(page)
    ask(page, "List three colours.")
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        assert page.faint_texts("h1, h2, p, li, code, label, button, a, #origins span") == []
    page.scheme("light")
    assert page.too_wide() == []
    assert page.console_errors() == []
