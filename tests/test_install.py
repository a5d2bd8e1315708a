"""`install.sh` against a package index on loopback with small wheels: which torch it asks for, what it leaves behind."""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "install.sh"
TOOLS = (
    "basename",
    "cat",
    "cp",
    "date",
    "dirname",
    "grep",
    "ln",
    "mkdir",
    "mktemp",
    "readlink",
    "rm",
    "sed",
    "sh",
    "uname",
)
NO_GPU = "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'\nexit 9\n"
GPU = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n"
COMMAND = "def app():\n    import torch\n    print('paceline {version} with torch', torch.__version__)\n"


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: str = "") -> None:
    """A wheel in the folder of its project in an index."""
    info, module = f"{name.replace('-', '_')}-{version}.dist-info", name.replace("-", "_")
    extras = "Provides-Extra: all\nProvides-Extra: smollm2\n"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extras}{requires}"
    contents = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "paceline":
        contents[f"{info}/entry_points.txt"] = "[console_scripts]\npaceline = paceline:app\n"
    hashes = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for path, text in contents.items()
    }
    record = "".join(f"{path},sha256={digest},{len(contents[path])}\n" for path, digest in hashes.items())
    project = folder / name
    project.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(project / f"{module}-{version}-py3-none-any.whl", "w") as file:
        for path, text in {**contents, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            file.writestr(path, text)


def publish(folder: Path, version: str) -> None:
    """Paceline and its model in an index."""
    requires = "Requires-Dist: torch>=2.11\nRequires-Dist: paceline-smollm2; extra == 'smollm2'\n"
    wheel(folder, "paceline", version, {"paceline.py": COMMAND.replace("{version}", version)}, requires)
    wheel(folder, "paceline-smollm2", "0.1.0", {"paceline_smollm2.py": ""})


class Machine:
    """A user's home, the programs on the path, and two package indexes: `simple`, and `cpu` with CPU builds of torch."""

    def __init__(self, folder: Path, url: str) -> None:
        self.home, self.bin, self.indexes, self._url = folder / "home", folder / "bin", folder / "www", url
        for index, version in (("simple", "2.13.0"), ("cpu", "2.13.0+cpu")):
            wheel(self.indexes / index, "torch", version, {"torch.py": f"__version__ = {version!r}\n"})
        publish(self.indexes / "simple", "1.0")
        self.home.mkdir()
        self.bin.mkdir()
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path is not None
            (self.bin / tool).symlink_to(path)
        self.put("cc", "#!/bin/sh\n")
        self.put("nvidia-smi", NO_GPU)

    def put(self, program: str, text: str) -> None:
        (self.bin / program).write_text(text)
        (self.bin / program).chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        simple = f"{self._url}/simple"
        return {
            "HOME": str(self.home),
            "PATH": str(self.bin),
            "PYTHON": sys.executable,
            "TMPDIR": str(self.home),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_INDEX_URL": simple,
            "UV_NO_CONFIG": "1",
            "UV_NO_CACHE": "1",
            "UV_DEFAULT_INDEX": simple,
            "TORCH_CPU_INDEX": f"{self._url}/cpu",
            **more,
        }

    def install(self, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Runs the script as `curl … | sh` does."""
        with SCRIPT.open() as script:
            return subprocess.run(
                ["sh"], stdin=script, env=self.environment(**environment), capture_output=True, text=True, check=False
            )

    def run(self) -> str:
        """The output of the installed command."""
        command = self.home / ".local" / "bin" / "paceline"
        return subprocess.run(
            [command], env=self.environment(), capture_output=True, text=True, check=True
        ).stdout.strip()

    @property
    def versions(self) -> list[Path]:
        folder = self.home / ".local" / "share" / "paceline"
        return sorted(path for path in folder.iterdir() if not path.is_symlink())


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    class Index(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Index, directory=str(tmp_path / "www")))
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield Machine(tmp_path, f"http://127.0.0.1:{http.server_port}")
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def test_install_upgrade_and_roll_back(machine: Machine) -> None:
    first = machine.install()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "There is no NVIDIA GPU: torch is the CPU build" in first.stdout
    assert first.stdout.splitlines()[-1] == f'Next: export PATH="{machine.home}/.local/bin:$PATH" && paceline serve'
    assert machine.run() == "paceline 1.0 with torch 2.13.0+cpu"
    (old,) = machine.versions

    publish(machine.indexes / "simple", "1.1")
    machine.put("nvidia-smi", GPU)
    second = machine.install(PATH=f"{machine.bin}:{machine.home}/.local/bin")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "There is an NVIDIA GPU: torch is the build for CUDA" in second.stdout
    assert second.stdout.splitlines()[-1] == "Next: paceline serve"
    assert machine.run() == "paceline 1.1 with torch 2.13.0"
    assert len(machine.versions) == 2

    (back,) = (line for line in second.stdout.splitlines() if "To go back: " in line)
    subprocess.run(["sh", "-c", back.partition("To go back: ")[2]], env=machine.environment(), check=True)
    assert machine.run() == "paceline 1.0 with torch 2.13.0+cpu"
    assert (machine.home / ".local/share/paceline/current").readlink() == old


def test_a_failed_installation_leaves_the_version_before(machine: Machine) -> None:
    previous = machine.home / ".local" / "share" / "paceline" / "20260101-000000-1"
    previous.mkdir(parents=True)
    (previous.parent / "current").symlink_to(previous)
    shutil.rmtree(machine.indexes / "simple" / "paceline")
    failed = machine.install(TORCH_INDEX=f"{machine._url}/simple")
    assert failed.returncode != 0
    assert "torch comes from http://127.0.0.1" in failed.stdout
    assert "No matching distribution found for paceline" in failed.stderr
    assert machine.versions == [previous]
    assert (previous.parent / "current").readlink() == previous
    assert [path.name for path in machine.home.iterdir()] == [".local"], "temporary files stay behind"


def test_without_python_it_says_what_to_do(machine: Machine) -> None:
    failed = machine.install(PYTHON="/no/python")
    assert failed.returncode == 1
    advice = "install it, or name it by PYTHON=…, or install uv, which brings its own"
    assert failed.stderr == f"error: Python 3.11 or later is needed: {advice}\n"


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed: pip install uv")
def test_uv_installs_where_it_is_on_the_path(machine: Machine) -> None:
    (machine.bin / "uv").symlink_to(shutil.which("uv") or "")
    done = machine.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.run() == "paceline 1.0 with torch 2.13.0+cpu"
