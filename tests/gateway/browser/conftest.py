"""One browser for all tests, and dashboard pages of servers in this process."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.gateway.live import running

if TYPE_CHECKING:  # without selenium the tests are skipped
    from selenium.webdriver import Chrome

    from tests.gateway.browser.page import Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
REQUIRED = "REQUIRE_BROWSER"
"""Set by `make test-browser`: without a browser the tests fail instead of being skipped."""


@pytest.fixture(scope="session")
def driver() -> Iterator["Chrome"]:
    from selenium import webdriver

    browser: str | None = next(filter(None, map(shutil.which, BROWSERS)), None)
    chromedriver = shutil.which("chromedriver")
    if browser is None or chromedriver is None:
        missing = "no browser: apt-get install chromium chromium-driver"
        if os.environ.get(REQUIRED):
            pytest.fail(missing)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "disable-gpu",
        "disable-quic",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "no-first-run",
        "hide-scrollbars",
        "lang=en",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


@pytest.fixture
def open_page(driver: "Chrome") -> Iterator[Callable[..., "Page"]]:
    """Opens a page of a server that runs until the test ends: the playground, or that of a path."""
    from tests.gateway.browser.page import Page

    with ExitStack() as stack:
        yield lambda server, path="": Page(driver, stack.enter_context(running(server)), path)
        driver.get("about:blank")  # stops polling before the server stops
        driver.get_log("browser")  # type: ignore[no-untyped-call]
