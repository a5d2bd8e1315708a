"""The pages of a server in a browser, for tests."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

TIMEOUT = 60.0
"""Seconds; a busy machine is slow."""
DESKTOP = (1280, 900, 1)
PHONE = (390, 844, 2)
MARGIN = 12
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
TOO_WIDE = """
return [...document.querySelectorAll("body *")].filter((one) => !one.closest("pre, .scroll") && one.checkVisibility())
  .filter((one) => one.getBoundingClientRect().right > arguments[0] + 1).map((one) => one.outerHTML.slice(0, 80));
"""
"""Elements that reach beyond the screen, apart from those inside a part that scrolls."""


class Page:
    """A page whose methods wait for the elements they need."""

    def __init__(self, driver: Chrome, url: str, path: str = "", size: tuple[int, int, int] = DESKTOP) -> None:
        """Opens `path` of the server at `url`."""
        self.driver, self.url = driver, url
        self.resize(*size)
        self.scheme("light")
        driver.get(url + path)

    def one(self, selector: str) -> WebElement:
        found: WebElement = self.until(lambda: next(iter(self.all(selector)), None), lambda: f"no element {selector}")
        return found

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Texts of all elements, read at once: the page replaces its elements every second."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText.trim())", selector
        )
        return found

    def text(self, selector: str) -> str:
        return "\n".join(self.texts(selector))

    def wait_for_text(self, selector: str, wanted: str) -> str:
        """Waits until the text of `selector` contains `wanted`, and returns it."""
        self.until(lambda: wanted in self.text(selector), lambda: f"{selector} has the text {self.text(selector)!r}")
        return self.text(selector)

    def until(self, condition: Callable[[], Any], instead: Callable[[], str] = lambda: "") -> Any:
        def check(_: Chrome) -> Any:
            return condition()

        try:
            return WebDriverWait(self.driver, TIMEOUT, 0.1).until(check)
        except Exception as error:
            raise AssertionError(f"{instead()}; console: {self._console()}") from error

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def write(self, selector: str, text: str) -> None:
        self.one(selector).send_keys(text)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(getattr(Keys, key.upper(), key))

    def focused(self) -> str:
        """Id or text of the focused element."""
        found: str = self.run("return document.activeElement.id || document.activeElement.textContent.trim()")
        return found

    def ask(self, question: str) -> None:
        self.write("#message", question)
        self.press("enter")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def resize(self, width: int, height: int, scale: int) -> None:
        self.width = width
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """Sets the system's colour scheme: light or dark."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def picture(self, path: Path, first: str = "body", last: str = "body", most: int = 10_000) -> None:
        """Saves a screenshot from the top of `first` to the bottom of `last`, at most `most` pixels high."""
        script = "return arguments[0].map(one => document.querySelector(one).getBoundingClientRect().toJSON())"
        self.run("scrollTo(0, 0)")
        top, bottom = self.run(script, [first, last])
        begin, end = max(0, top["top"] - MARGIN), bottom["bottom"] + MARGIN
        width = self.run("return document.documentElement.clientWidth")
        clip = {"x": 0, "y": begin, "width": width, "height": min(most, end - begin), "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))

    def screen(self, path: Path) -> None:
        """Saves a screenshot of what the screen shows."""
        path.write_bytes(self.driver.get_screenshot_as_png())

    def faint_texts(self, selector: str) -> list[Any]:
        found: list[Any] = self.run(CONTRAST, selector)
        return found

    def too_wide(self) -> list[str]:
        """`innerWidth` grows with the content, so that the width of the screen is compared."""
        found: list[str] = self.run(TOO_WIDE, self.width)
        return found

    def console_errors(self) -> list[str]:
        """Console messages without network errors, which the page handles."""
        return [one["message"] for one in self._console() if one["source"] != "network"]

    def network_errors(self) -> list[str]:
        """Console messages about requests that failed."""
        return [one["message"] for one in self._console() if one["source"] == "network"]

    def _console(self) -> list[dict[str, str]]:
        entries: list[dict[str, str]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return entries
