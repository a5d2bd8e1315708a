"""Virtual environments of clients, one each: their dependencies contradict each other and ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("CLIENTS_FOLDER") or ROOT / "build" / "clients")
"""Folder of the environments; they are made once and kept."""
INSTALL_SECONDS = 1800

# What `vllm bench serve` imports; all requirements of vLLM would bring CUDA.
VLLM_IMPORTS = [
    "aiohttp",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed-tensors",
    "datasets",
    "depyf",
    "diskcache",
    "einops",
    "fastapi",
    "filelock",
    "gguf",
    "ijson",
    "lark",
    "llguidance",
    "mistral_common",
    "msgspec",
    "numpy",
    "openai",
    "openai-harmony",
    "orjson",
    "pandas",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "python-json-logger",
    "pyyaml",
    "pyzmq",
    "regex",
    "requests",
    "sentencepiece",
    "setproctitle",
    "six",
    "tiktoken",
    "torch",
    "tqdm",
    "transformers",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xgrammar",
]

CLIENTS: dict[str, list[list[str]]] = {
    "guidellm": [["torch", "guidellm"]],
    "aiperf": [["aiperf"]],
    "lm-eval": [["torch", "lm-eval[api]", "transformers"]],
    "langchain": [["langchain-openai"]],
    "litellm": [["litellm"]],
    "vllm": [VLLM_IMPORTS, ["--no-deps", "vllm"]],
}
"""Arguments of `pip install`, one list per call."""


def client_environment(name: str) -> Path:
    """The folder `bin` of the client's environment. The test is skipped if the client cannot be installed here."""
    home = FOLDER / name
    ready = home / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        for packages in CLIENTS[name]:
            command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", *_torch(packages), *packages]
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
            if done.returncode:
                pytest.skip(f"{name} does not install here: {done.stderr.strip().splitlines()[-1]}")
        ready.touch()
    return home / "bin"


def _torch(packages: list[str]) -> list[str]:
    """The torch of this environment, so that pip does not bring CUDA where there is no GPU."""
    if "torch" not in packages:
        return []
    import torch

    pinned = FOLDER / "constraints.txt"
    pinned.write_text(f"torch=={torch.__version__}\n")
    index = os.environ.get("TORCH_INDEX")
    return ["-c", str(pinned), *(["--extra-index-url", index] if index else [])]
