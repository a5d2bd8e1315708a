"""Environments of clients, one each: their dependencies contradict each other and ours."""

import os
import shutil
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

AI_SDK = ["ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105"]
AI_SDK += ["zod@4.6.7", "openai@6.49.0"]

CLIENTS: dict[str, list[list[str]]] = {
    "guidellm": [["torch", "guidellm"]],
    "aiperf": [["aiperf"]],
    "lm-eval": [["torch", "lm-eval[api]", "transformers"]],
    "langchain": [["langchain-openai==1.7.3", "langchain"]],
    "litellm": [["litellm[mcp]==1.106.2"]],
    "openai": [["openai==3.51.0"]],
    "anthropic": [["anthropic==2.10.0"]],
    "llama-index": [["llama-index-llms-openai-like==0.8.1"]],
    "pydantic-ai": [["pydantic-ai-slim[openai,anthropic]==2.68.0"]],
    "ollama": [["ollama==0.6.3"]],
    "aider": [["aider-chat==0.86.2"]],
    "mini-swe-agent": [["mini-swe-agent==2.4.6", "litellm[mcp]==1.106.2"]],
    "vllm": [VLLM_IMPORTS, ["--no-deps", "vllm"]],
}
"""Arguments of `pip install`, one list per call."""

NODE = "node@22.23.3"
NODE_CLIENTS: dict[str, list[str]] = {
    "codex": ["@openai/codex@0.169.0"],
    "claude-code": ["@anthropic-ai/claude-code@2.1.328", NODE],
    "ai-sdk": [*AI_SDK, NODE],
}
"""Arguments of `npm install`. Some need a newer Node.js than a distribution has, which npm can install too."""


def client_environment(name: str) -> Path:
    """The folder `bin` of the client's environment. The test is skipped if the client cannot be installed here."""
    home = FOLDER / name
    ready = home / ".ready"
    if name in NODE_CLIENTS:
        return _node_environment(name, home, ready)
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        for packages in CLIENTS[name]:
            command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", *_torch(packages), *packages]
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
            if done.returncode:
                pytest.skip(f"{name} does not install here: {done.stderr.strip().splitlines()[-1]}")
        ready.touch()
    return home / "bin"


def _node_environment(name: str, home: Path, ready: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{name} needs npm: install Node.js 20 or later")
    if not ready.exists():
        home.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(home), *NODE_CLIENTS[name]]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        if done.returncode:
            pytest.skip(f"{name} does not install here: {done.stderr.strip().splitlines()[-1]}")
        ready.touch()
    return home / "node_modules" / ".bin"


def _torch(packages: list[str]) -> list[str]:
    """The torch of this environment, so that pip does not bring CUDA where there is no GPU."""
    if "torch" not in packages:
        return []
    import torch

    pinned = FOLDER / "constraints.txt"
    pinned.write_text(f"torch=={torch.__version__}\n")
    index = os.environ.get("TORCH_INDEX")
    return ["-c", str(pinned), *(["--extra-index-url", index] if index else [])]
