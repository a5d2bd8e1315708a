"""Downloads from a hub on a loopback address with the routes of huggingface.co."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import MissingDependency, PacelineError, UnsupportedModel
from paceline.model_files.download.download import choose_files, pull
from paceline.model_files.hub import find_model
from paceline.model_files.hub.hub import Repository

pytest.importorskip("huggingface_hub")
COMMIT = "c" * 40
WEIGHTS = bytes(range(256)) * 4096
"""1 MiB."""


class Hub(ThreadingHTTPServer):
    """`files` are those of `owner/model`. `refusals` are statuses and codes of other repositories."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {"config.json": b"{}", "model-Q4_K_M.gguf": WEIGHTS, "model-Q8_0.gguf": b"8"}
        self.sums: dict[str, str] = {}
        """Wrong checksums, by file."""
        self.refusals = {
            "owner/gated": (403, "GatedRepo"),
            "owner/absent": (404, "RepoNotFound"),
            "owner/odd": (403, ""),
        }
        self.ranges: list[str | None] = []
        """The range of each download of the weights."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def card(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            sibling = {"rfilename": name, "size": len(data), "blobId": blob}
            if name.endswith(".gguf"):
                sum_ = self.sums.get(name, hashlib.sha256(data).hexdigest())
                sibling["lfs"] = {"sha256": sum_, "size": len(data), "pointerSize": 1}
            siblings.append(sibling)
        return {"id": "owner/model", "sha": COMMIT, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            name = path.removeprefix("/api/models/")
            if name in self.server.refusals:
                status, code = self.server.refusals[name]
                self._answer(status, b"{}", {"X-Error-Code": code} if code else {})
            else:
                self._answer(200, json.dumps(self.server.card()).encode(), {"Content-Type": "application/json"})
            return
        name = path.removeprefix(f"/owner/model/resolve/{COMMIT}/")
        data, span = self.server.files[name], self.headers["Range"]
        if name.endswith("Q4_K_M.gguf"):
            self.server.ranges.append(span)
        if span is None:
            self._answer(200, data, {})
        else:
            begin = int(span.removeprefix("bytes=").rstrip("-"))
            self._answer(206, data[begin:], {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"})

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server
        server.shutdown()
        thread.join()


def silent(name: str, here: int, size: int) -> None:
    pass


def test_a_file_of_a_quantisation_is_downloaded_once(hub: Hub) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull("hf.co/owner/model:q4_k_m", lambda *advance: seen.append(advance))
    assert path.read_bytes() == WEIGHTS
    assert path == find_model("owner/model:Q4_K_M")
    assert seen[-1] == ("model-Q4_K_M.gguf", len(WEIGHTS), len(WEIGHTS))
    assert pull("owner/model:Q4_K_M", silent) == path
    assert hub.ranges == [None]


def test_an_interrupted_download_continues(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)

    def interrupt(name: str, here: int, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("owner/model:Q4_K_M", interrupt)
    with pytest.raises(UnsupportedModel):
        find_model("owner/model:Q4_K_M")
    assert pull("owner/model:Q4_K_M", silent).read_bytes() == WEIGHTS
    first, second = hub.ranges
    assert first is None
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").rstrip("-")) < len(WEIGHTS)


def test_a_wrong_checksum_is_refused_and_the_file_deleted(hub: Hub) -> None:
    hub.sums["model-Q4_K_M.gguf"] = "0" * 64
    for _ in range(2):  # the second download begins anew
        with pytest.raises(PacelineError, match=r"has the checksum .* and not 0000.*deleted; download it again"):
            pull("owner/model:Q4_K_M", silent)
    assert hub.ranges == [None, None]
    with pytest.raises(UnsupportedModel):
        find_model("owner/model:Q4_K_M")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/gated", r"is gated: accept its terms at http://127.*/owner/gated, then set HF_TOKEN"),
        ("owner/absent", r"there is no owner/absent at http://127.*check the name"),
        ("owner/odd", r"refuses owner/odd with status 403: set HF_TOKEN"),
        ("owner/model:Q2_K", r"has no file for 'Q2_K': there are model-Q4_K_M, model-Q8_0"),
        ("model", "is no id of a model"),
    ],
)
def test_refusals_say_what_to_do(hub: Hub, name: str, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        pull(name, silent)


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(PacelineError, match=r"the download of owner/model from http://127\.0\.0\.1:1 stopped"):
        pull("owner/model", silent)


def test_a_missing_package_is_answered_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"paceline\[hub\]"):
        pull("owner/model", silent)


@pytest.mark.parametrize(
    ("kind", "names", "chosen"),
    [
        (None, ["a.safetensors", "config.json", "x.gguf", "README.md"], ["a.safetensors", "config.json"]),
        (None, ["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        (None, ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf"], ["m-Q4_K_M.gguf"]),
        (None, ["m-odd.gguf"], ["m-odd.gguf"]),
        ("Q8_0", ["m.Q8_0.gguf", "m.IQ8_0.gguf", "a.safetensors"], ["m.Q8_0.gguf"]),
        (
            "Q4_K_M",
            ["Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf", "m-Q8_0.gguf"],
            ["Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf"],
        ),
    ],
)
def test_which_files_a_model_consists_of(kind: str | None, names: list[str], chosen: list[str]) -> None:
    assert choose_files(Repository("owner/model", kind), names) == chosen
    with pytest.raises(UnsupportedModel, match="no GGUF file"):
        choose_files(Repository("owner/model"), ["README.md"])
