"""Screenshots of the dashboard for docs/: the embedded model under load, in a browser."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.process import server_process

pytest.importorskip("selenium")
from selenium.webdriver import Chrome

from tests.gateway.browser.page import Page

DOCS = Path(__file__).parents[3] / "docs"
ADMIN = "open-sesame"
CODE = "Write a Python function that returns the first n Fibonacci numbers, then show how to call it."
JSON = (
    'Repeat this JSON with every price doubled: [{"name": "apple", "price": 3, "stock": 10}, {"name": "pear", "price": 4, '
    '"stock": 7}, {"name": "plum", "price": 2, "stock": 31}]'
)
PROSE = "Explain in three paragraphs why the sea has tides."
MATHS = "A train goes 60 miles in 2 hours. How many miles does it go in 5 hours? Calculate it step by step."
LIMITS = {"max_num_seqs": 16, "max_model_len": 1024, "kv_tokens": 8192}
POOLS = [
    {
        "name": "target",
        "role": "target",
        "model": "smollm2",
        "replicas": 2,
        "devices": ["cpu"],
        "limits": LIMITS,
        "speculation": {"max_depth": 3, "depth": "fixed"},
    },
    {"name": "draft", "role": "draft", "model": "smollm2", "devices": ["cpu"], "limits": LIMITS},
]


@contextmanager
def load(url: str, prompts: Mapping[str, str | None]) -> Iterator[list[str]]:
    """Sends requests in a loop, one at a time per prompt, with its method. Yields the errors."""
    stop, errors = threading.Event(), list[str]()

    def ask(prompt: str, method: str | None) -> None:
        while not stop.is_set():
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 96,
                "temperature": 0.4,
                "speculation": {"method": method},
            }
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            if response.status_code != 200:
                errors.append(response.text)

    threads = [threading.Thread(target=ask, args=one) for one in prompts.items()]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def cluster_process(folder: Path, **config: Any) -> Iterator[str]:
    """The URL of a gateway whose workers start and stop with it."""
    path = folder / "cluster.yaml"  # JSON is YAML
    path.write_text(json.dumps({"state_dir": str(folder / "state"), "gateway": {"port": 0}, **config}))
    command = [str(Path(sys.executable).with_name("paceline")), "serve", "--config", str(path)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as popen,
    ):
        assert popen.stdout is not None
        try:
            match = next(filter(None, (re.search(r"at (http://\S+)", line) for line in popen.stdout)), None)
            assert match is not None, (folder / "log").read_text()
            yield match[1]
        finally:
            popen.send_signal(signal.SIGINT)
            popen.communicate(timeout=60)


def wait_samples(page: Page, url: str, count: int) -> None:
    """Waits for `count` more samples."""

    def last() -> float:
        time: float = httpx.get(f"{url}/v1/paceline/overview", timeout=30).json()["samples"][-1]["time"]
        return time

    until = last() + count
    page.until(lambda: last() >= until)


@contextmanager
def on_one_core() -> Iterator[None]:
    """Processes that start here use one core, and leave the others to the browser."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.pictures
def test_one_process_under_load(driver: Chrome) -> None:
    with ExitStack() as stack:
        with on_one_core():
            server = stack.enter_context(server_process(admin_key=ADMIN))
        page = Page(driver, f"{server.url}/", "dashboard")
        page.write("#admin-key", f"{ADMIN}\n")
        page.until(lambda: page.one("#flag-enabled").is_enabled())
        with load(server.url, dict.fromkeys((CODE, JSON, PROSE, MATHS))) as errors:
            wait_samples(page, server.url, 30)
            page.click("#flag-enabled")
            page.wait_for_text("#state", "speculation off")
            wait_samples(page, server.url, 10)
            page.click("#flag-enabled")
            page.wait_for_text("#state", "speculation on")
            wait_samples(page, server.url, 30)
            page.picture(DOCS / "dashboard.png")
        assert errors == []
        assert page.console_errors() == []


@pytest.mark.pictures
def test_pools_under_load(driver: Chrome, tmp_path: Path) -> None:
    with cluster_process(tmp_path, name="pictures", pools=POOLS) as url:
        page = Page(driver, f"{url}/", "dashboard")
        page.scheme("dark")
        with load(url, {CODE: None, JSON: "suffix", PROSE: None}) as errors:
            wait_samples(page, url, 40)
            assert page.texts("#worker-table tbody th") == ["target-0", "target-1", "draft-0"]
            assert "%" in page.text("#chart-ahead .legend")
            page.picture(DOCS / "dashboard-pools.png", "#traffic", "#workers")
        assert errors == []
        assert page.console_errors() == []
