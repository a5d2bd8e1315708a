"""Client libraries, unmodified, against servers: programs of checks in `programs/`, each in its client's environment.

What needs no wits runs with small models: any text and texts of a given form with the embedded model, calls of tools and
answers with their results with the scripted one. All of it also runs with Qwen2.5-Coder-1.5B: a check then fails only for
what is not the model's fault.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import NODE_CLIENTS, client_environment
from tests.clients.matrix import LIBRARIES, PROTOCOL, QWEN, record

pytestmark = pytest.mark.clients

PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 900
QWEN_SECONDS = 3600


def run_checks(client: str, url: str, kinds: list[str], folder: Path, seconds: float) -> dict[str, str]:
    """The errors of the client's checks by their name. They are empty for checks that passed."""
    program = f"{client.replace('-', '_')}_checks"
    binaries = client_environment(client)
    if client in NODE_CLIENTS:
        command = [binaries / "node", PROGRAMS / f"{program}.mjs"]
    else:
        command = [binaries / "python", PROGRAMS / f"{program}.py"]
    off = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    environment = {**os.environ, **off, "NODE_PACKAGES": str(binaries.parents[1]), "OPENAI_API_KEY": "none"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*map(str, command), url, "local", *kinds],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    print(done.stderr[-8000:])
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("client", LIBRARIES)
def test_a_library_with_small_models(client: str, url: str, scripted_url: str, tmp_path: Path) -> None:
    found = run_checks(client, url, ["text", "schema"], tmp_path, SECONDS)
    found |= run_checks(client, scripted_url, ["tools"], tmp_path, SECONDS)
    record(client, PROTOCOL, found)
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.parametrize("client", LIBRARIES)
def test_a_library_with_qwen(client: str, qwen_url: str, tmp_path: Path) -> None:
    found = run_checks(client, qwen_url, ["text", "schema", "tools"], tmp_path, QWEN_SECONDS)
    record(client, QWEN, found)
    assert {name: error for name, error in found.items() if error and not error.startswith("ModelFault")} == {}
