"""The wheels: built, unpacked outside the checkout, and served from there. Dependencies come from this environment."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.gateway.process import CODE, SMALL

ROOT = Path(__file__).parent.parent
MAX_BYTES = 3 * 2**20
"""Size of the base wheel; the model and its drafts are in another."""

pytestmark = pytest.mark.slow


def build(source: Path, out: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with both wheels unpacked."""
    folder = tmp_path_factory.mktemp("wheels")
    checkout = folder / "checkout"
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    staged = folder / "staged"
    subprocess.run([sys.executable, str(ROOT / "packages" / "smollm2" / "stage.py"), str(staged)], check=True)
    base, model = build(checkout, folder / "base"), build(staged, folder / "model")
    assert base.stat().st_size < MAX_BYTES
    site = folder / "site"
    for wheel in (base, model):
        zipfile.ZipFile(wheel).extractall(site)
    return site


def run(site: Path, code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": str(site)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_model_and_its_drafts_are_found_in_their_wheel(site: Path) -> None:
    code = (
        "import paceline; from paceline.model_files.hub.hub import *; "
        "print(paceline.__file__, find_model('smollm2'), *shipped_drafts())"
    )
    text = run(site, code).communicate(timeout=120)[0]
    package, model, *drafts = text.split()
    assert package.startswith(str(site))
    assert model.startswith(str(site / "paceline_smollm2"))
    assert "smollm2-eagle" in drafts


def test_a_server_runs_from_the_wheels(site: Path) -> None:
    process = run(site, CODE, json.dumps(SMALL))
    try:
        assert process.stdout is not None
        word, url = process.stdout.readline().split()
        assert word == "READY"
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "speculation": {"enabled": True}}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        with urllib.request.urlopen(f"{url}/", timeout=60) as page:
            assert b"Paceline" in page.read()
    finally:
        process.terminate()
        process.communicate(timeout=60)
