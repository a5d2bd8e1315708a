"""The playground with texts that a test sets. test_playground_live.py has the embedded model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.gateway.auth.access import Access
from paceline.gateway.auth.api_keys import KeyFile, KeyLimits
from paceline.gateway.http.app import create_app
from paceline.gateway.sessions.models import ServedModels
from tests.gateway.fakes import Served, served

pytest.importorskip("selenium")
from tests.gateway.browser.page import PHONE, Page

Open = Callable[[Served], Page]
MARKDOWN = """\
# Title

A **bold** word, `code` and [a link](https://example.org).

- first
  - inner
- second

| country | capital |
|---|---:|
| Peru | Lima |

```python
def f(x):
    return x  # <b>not bold</b>
```

> quoted
"""
HOSTILE = """\
<img src=x onerror="document.title = 'broken'"> <b>bold</b>

<script>document.title = 'broken'</script>

[click](javascript:alert(1)) ![picture](https://example.org/p.png)

```html"><script>
<i>code</i>
```
"""
LONG = "w" * 200 + "\n\n```\n" + "x = 1; " * 30 + "\n```\n\n|" + "a|" * 25 + "\n|" + "-|" * 25 + "\n|" + "cell|" * 25


def answered(page: Page, count: int = 1) -> None:
    page.until(lambda: len(page.texts(".figures")) == count and page.one("#send").is_displayed())


def prompt(server: Served) -> str:
    return server.target.tokenizer.decode(server.target.requests[-1].prompt_ids)


def test_one_message_is_one_generation(open_page: Open) -> None:
    server = served("Hello.")
    page = open_page(server)
    page.ask("Hi")
    answered(page)
    assert page.texts(".answer > .markdown") == ["Hello."]
    assert len(server.target.requests) == 1
    assert server.target.requests[0].sampling.max_tokens == 1024
    assert "draft acceptance rate 100% (4 of 4)" in page.text(".figures")
    assert page.focused() == "message"
    assert page.console_errors() == []


def test_markdown_becomes_elements(open_page: Open) -> None:
    page = open_page(served(MARKDOWN))
    page.ask("Hi")
    answered(page)
    assert page.texts(".markdown h3") == ["Title"]
    assert page.texts(".markdown strong") == ["bold"]
    assert page.texts(".markdown li li") == ["inner"]
    assert page.texts(".markdown td") == ["Peru", "Lima"]
    assert page.texts(".code code") == ["def f(x):\n    return x  # <b>not bold</b>"]
    assert page.texts(".code-bar span") == ["python"]
    assert page.texts(".markdown blockquote") == ["quoted"]
    assert page.one(".markdown a").get_attribute("rel") == "noopener noreferrer"
    fonts = [page.one(one).value_of_css_property("font-family") for one in (".markdown p", ".code code")]
    assert ["mono" in font for font in fonts] == [False, True]


def test_answers_are_never_parsed_as_html(open_page: Open) -> None:
    page = open_page(served(HOSTILE))
    page.ask("<i>Hi</i>")
    answered(page)
    assert page.all("#conversation :is(img, script, i, b)") == []
    assert [link.get_attribute("href") for link in page.all(".markdown a")] == ["https://example.org/p.png"]
    assert "<script>" in page.text(".markdown")
    assert page.texts(".question") == ["<i>Hi</i>"]
    assert "broken" not in page.driver.title
    assert page.console_errors() == []


def test_every_token_has_the_colour_of_its_origin_on_demand(open_page: Open) -> None:
    page = open_page(served("A **b** c", per_step=3))
    page.ask("Hi")
    answered(page)
    assert page.all(".markdown span") == []
    page.click("#colours")
    # Three tokens of one character a step; the asterisks are Markdown and not shown
    spans = [(span.get_attribute("class"), span.get_attribute("textContent")) for span in page.all(".markdown span")]
    assert spans == [("accepted", "A"), ("accepted", " "), ("accepted", "b"), ("accepted", " "), ("bonus", "c")]
    assert page.texts(".answer > .markdown") == ["A b c"]
    assert page.one("#origins").is_displayed()
    page.driver.refresh()
    page.until(lambda: len(page.all(".markdown span")) == 5)
    page.click("#colours")
    assert page.all(".markdown span") == []


def test_reasoning_is_collapsed(open_page: Open) -> None:
    page = open_page(served("<think>Let me see.</think>It is 4.", reasoning_parser="think"))
    page.ask("2 + 2?")
    answered(page)
    assert page.texts(".answer > .markdown") == ["It is 4."]
    assert not page.one(".reasoning").get_attribute("open")
    page.click(".reasoning summary")
    assert page.texts(".reasoning .markdown") == ["Let me see."]
    page.click("#colours")
    assert page.text(".answer > .markdown") == "It is 4."
    assert page.all(".answer > .markdown .accepted")


def test_settings_are_those_of_the_request(open_page: Open) -> None:
    server = served("Yes.")
    page = open_page(server)
    page.click("#toggle-settings")
    assert page.focused() != "message"
    page.write("#system", "Be brief.")
    for field, value in (("temperature", "0.5"), ("top-p", "0.9"), ("seed", "7")):
        page.write(f"#{field}", value)
    page.one("#max-tokens").clear()
    page.write("#max-tokens", "20")
    page.click("#speculation")
    page.press("escape")
    assert not page.one("#settings").is_displayed()
    page.ask("Hi")
    answered(page)
    request = server.target.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 7, 20)
    assert not request.speculation.enabled
    assert "Be brief." in prompt(server)
    assert "speculation off" in page.text(".figures")


def test_a_cut_answer_is_marked_and_continued(open_page: Open) -> None:
    text = "abcdefghij" * 3
    server = served(lambda request: text[10:] if "abcdefghij" in decoded(request) else text)
    decoded = lambda request: server.target.tokenizer.decode(request.prompt_ids)  # noqa: E731
    page = open_page(server)
    page.click("#toggle-settings")
    page.one("#max-tokens").clear()
    page.write("#max-tokens", "10")
    page.ask("Hi")
    page.wait_for_text(".notice", "Cut at 10 tokens.")
    assert page.texts(".answer > .markdown") == ["abcdefghij"]
    page.click(".notice button")
    page.wait_for_text(".notice", "Cut at 20 tokens.")
    assert page.texts(".answer > .markdown") == ["abcdefghij" * 2]
    assert prompt(server).endswith("assistant\nabcdefghij")


def test_chats_survive_a_reload(open_page: Open) -> None:
    server = served(lambda request: f"Answer {len(server.target.requests)}.")
    page = open_page(server)
    page.ask("First question")
    answered(page)
    page.click("#new-chat")
    assert page.texts(".turn") == []
    page.ask("Second question")
    answered(page)
    page.driver.refresh()
    page.until(lambda: page.texts(".question") == ["Second question"])
    assert page.texts(".chat") == ["Second question", "First question"]
    page.click(".chat:not([aria-current])")
    assert page.texts(".answer > .markdown") == ["Answer 1."]
    page.ask("And then?")
    answered(page, 2)
    assert [part in prompt(server) for part in ("First question", "Answer 1.", "Second")] == [True, True, False]
    page.click("[aria-label='Delete chat: First question']")
    page.driver.switch_to.alert.accept()
    page.until(lambda: page.texts(".chat") == ["Second question"])
    assert page.texts(".question") == ["Second question"]


def test_an_answer_can_be_stopped_and_generated_again(open_page: Open) -> None:
    server = served("Good.", hold=True)
    page = open_page(server)
    page.ask("Hi")
    page.until(lambda: len(server.target.requests) == 1)
    page.press("escape")
    page.wait_for_text(".notice", "Stopped after 0 tokens.")
    page.until(lambda: server.target.cancelled == [server.target.requests[0].id])
    page.click(".again")
    page.until(lambda: len(server.target.requests) == 2)
    server.target.release()
    page.wait_for_text(".answer > .markdown", "Good.")
    assert not page.one(".notice").is_displayed()
    assert len(page.all(".turn")) == 1


def test_answers_and_code_are_copied(open_page: Open) -> None:
    page = open_page(served(MARKDOWN))
    page.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    page.ask("Hi")
    answered(page)
    page.click(".code button")
    page.wait_for_text(".code button", "Copied")
    assert page.run("return navigator.clipboard.readText()") == "def f(x):\n    return x  # <b>not bold</b>"
    page.click(".actions [data-copy]")
    page.wait_for_text(".actions [data-copy]", "Copied")
    assert page.run("return navigator.clipboard.readText()") == MARKDOWN


# --- comparison


def test_a_comparison_is_a_button(open_page: Open) -> None:
    server = served("Hello there", per_step=3)
    page = open_page(server)
    page.ask("Hi")
    answered(page)
    page.click(".compare")
    page.wait_for_text(".verdict", "same")
    page.until(lambda: len(server.target.requests) == 6 and page.one("#send").is_displayed())
    enabled = [request.speculation.enabled for request in server.target.requests]
    assert enabled == [True, False, True, False, True, False]
    assert len({request.sampling.seed for request in server.target.requests}) == 1


def test_without_drafts_no_speed_is_claimed(open_page: Open) -> None:
    server = served("Hello", per_step=1)  # one token a step: no drafts
    page = open_page(server)
    page.ask("Hi")
    answered(page)
    assert "no drafts" in page.text(".figures")
    page.click(".compare")
    page.wait_for_text(".verdict", "No drafts were made, so there is nothing to compare.")
    page.until(lambda: page.one("#send").is_displayed())
    assert page.all(".verdict.good") == []
    assert len(server.target.requests) == 2


def test_a_different_text_is_reported(open_page: Open) -> None:
    page = open_page(served(lambda request: "Yes." if request.speculation.enabled else "No."))
    page.ask("Hi")
    answered(page)
    page.click(".compare")
    page.wait_for_text(".verdict.bad", "The text differs")


def test_a_server_that_changed_is_not_compared(open_page: Open) -> None:
    server = served("Yes.")
    page = open_page(server)
    page.ask("Hi")
    answered(page)
    server.target.fingerprint = "fp_other"
    page.click(".compare")
    page.wait_for_text(".verdict.warn", "The server has changed")


@pytest.mark.parametrize(
    ("speculative", "plain", "text", "tone"),
    [
        ([20, 21, 22], [10, 11, 19], "1.91\N{MULTIPLICATION SIGN} the speed of plain in 3 runs of each", "good"),
        ([20, 21, 12], [10, 11, 13], "No difference in speed beyond the spread", ""),
        ([7, 8, 9], [10, 11, 12], "Slower than plain: 0.73\N{MULTIPLICATION SIGN}", "warn"),
        ([20], [10], "Measuring the speed again, 1 of 3 runs", ""),
    ],
)
def test_a_verdict_needs_a_difference_beyond_the_spread(
    open_page: Open, speculative: list[int], plain: list[int], text: str, tone: str
) -> None:
    found = open_page(served()).run(
        "return import('/dashboard/verdict.js').then(module => module.verdict(arguments[0]))",
        {"isSame": True, "drafted": 5, "speculative": speculative, "plain": plain},
    )
    assert text in found["text"]
    assert found["tone"] == tone


# --- errors, keys and models


def test_a_lost_server_keeps_the_chat(open_page: Open) -> None:
    page = open_page(served("Here."))
    page.wait_for_text("#model", "fake")
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": True})
    page.ask("Anyone?")
    page.wait_for_text(".notice.bad", "The connection to the server was lost.")
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": False})
    page.click(".notice button")
    answered(page)
    assert page.texts(".answer > .markdown") == ["Here."]
    page.network_errors()


def test_a_chat_beyond_the_context_offers_a_new_one(open_page: Open) -> None:
    page = open_page(served())
    page.run("document.getElementById('message').value = 'x'.repeat(5000)")
    page.press("enter")
    page.wait_for_text(".notice.bad", "too long for the model")
    assert page.text(".notice button") == "New chat"
    page.click(".notice button")
    assert page.texts(".turn") == []


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(str(tmp_path / "keys.json"))


def test_the_key_is_asked_for_and_stored_in_the_tab(open_page: Open, keys: KeyFile) -> None:
    key = keys.add("ann", scopes=("generate",))
    page = open_page(served("Hello.", api_keys=str(keys.path)))
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.click("#key-cancel")
    page.click("#message")
    page.ask("Hi")
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.press("escape")
    page.wait_for_text(".notice.bad", "This server needs an API key.")
    page.click(".notice button")
    page.write("#api-key", "pl-not-a-key\n")
    page.wait_for_text("#key-reason", "no valid API key")
    page.write("#api-key", f"{key}\n")
    answered(page)
    assert page.run("return Object.values(sessionStorage)") == [key]
    assert key not in page.run("return JSON.stringify(localStorage)")
    page.click("#forget-key")
    assert page.run("return sessionStorage.length") == 0


def test_a_limit_of_the_key_is_explained(open_page: Open, keys: KeyFile) -> None:
    key = keys.add("ben", scopes=("generate",), limits=KeyLimits(requests_per_minute=1))
    page = open_page(served("Hello.", api_keys=str(keys.path)))
    page.until(lambda: page.one("#key-dialog").is_displayed())
    page.write("#api-key", f"{key}\n")
    page.wait_for_text("#model", "fake")
    page.ask("One")
    answered(page)
    page.ask("Two")
    assert "retry in" in page.wait_for_text(".turn:last-child .notice.bad", "Try again")


def test_a_server_with_several_models_has_a_selection(open_page: Open) -> None:
    first, second = (served(f"I am {name}", served_model_name=name) for name in ("first", "second"))
    app = create_app(
        ServedModels([first.gateway, second.gateway]), Access.from_config(first.gateway.config, lambda: 0.0)
    )
    page = open_page(Served(first.target, first.gateway, app))
    page.wait_for_text("#models", "second")
    assert not page.one("#model").is_displayed()
    for count, name in enumerate(("first", "second"), 1):
        page.click(f"#models option[value={name}]")
        page.ask("Who are you?")
        answered(page, count)
        assert page.texts(".answer > .markdown")[-1] == f"I am {name}"


# --- paint, keyboard, contrast, small screens


def test_the_page_paints_and_takes_a_message_before_the_server_answers(open_page: Open) -> None:
    page = open_page(served("Kept."))
    page.ask("Hi")
    answered(page)
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/v1/*"]})
    page.driver.refresh()
    page.until(lambda: page.texts(".answer > .markdown") == ["Kept."])
    page.write("#message", "typed")
    assert page.run("return performance.getEntriesByName('first-contentful-paint').length") == 1
    page.wait_for_text("#state", "no connection")
    page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
    page.wait_for_text("#model", "fake")
    page.network_errors()


def test_keyboard_control(open_page: Open) -> None:
    server = served("Hello")
    page = open_page(server)
    page.until(lambda: page.focused() == "message")
    page.press("H", "i")
    page.driver.switch_to.active_element.send_keys("\ue008\ue007\ue000")  # Shift and Enter
    page.press("y", "o", "enter")
    answered(page)
    assert page.texts(".question") == ["Hi\nyo"]
    page.run("document.activeElement.blur(); document.querySelector('.skip').focus()")
    order = []
    for _ in range(13):
        order.append(page.focused())
        outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or order[-1] == "message", order
        page.press("tab")
    assert order == [
        "Skip to the message", "Dashboard", "Planner", "API", "toggle-settings", "new-chat", "Hi yo",
        "\N{MULTIPLICATION SIGN}", "Copy", "Answer again", "Compare with plain decoding", "message", "colours",
    ]  # fmt: skip


def test_every_control_has_an_accessible_name(open_page: Open) -> None:
    page = open_page(served(MARKDOWN))
    page.ask("Hi")
    answered(page)
    page.click("#toggle-settings")
    controls = page.all("button, input, select, textarea, a, nav, aside, pre")
    unnamed = [one.get_attribute("outerHTML") for one in controls if one.is_displayed() and not one.accessible_name]
    assert unnamed == []
    ids = page.run("return [...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str, open_page: Open) -> None:
    page = open_page(served(MARKDOWN))
    page.scheme(scheme)
    page.ask("Hi")
    answered(page)
    texts = "h1, h2, h3, p, li, th, td, code, label, button, summary, blockquote, .markdown span, #origins span, a"
    assert page.faint_texts(texts) == []
    page.click("#colours")
    page.click("#toggle-settings")
    assert page.faint_texts(texts) == []


def test_long_words_code_and_tables_fit_a_phone(open_page: Open) -> None:
    page = open_page(served(LONG))
    page.resize(*PHONE)
    page.ask("y" * 300)
    answered(page)
    assert page.too_wide() == []
    scrolls = "return [...document.querySelectorAll('pre, .scroll')].map(one => one.scrollWidth > one.clientWidth)"
    assert page.run(scrolls) == [True, True]
    assert page.run("return document.documentElement.scrollWidth") == PHONE[0]
    small = [one.rect for one in page.all("button, #message") if one.is_displayed() and one.rect["height"] < 32]
    assert small == []
    page.click("#toggle-chats")
    assert page.focused() == "new-chat"
    assert page.run("return document.getElementById('main').inert")
    page.press("escape")
    assert not page.one("#chats").is_displayed()
    assert page.too_wide() == []
