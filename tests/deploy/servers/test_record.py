import subprocess
import sys
from pathlib import Path

import pytest

from paceline.deploy.servers import recorded, running_servers

HOLD = """
import sys
from paceline.deploy.servers import recorded
with recorded("http://127.0.0.1:7", ["tiny", "alias"], ["/models/tiny.gguf"], False):
    print("here", flush=True)
    sys.stdin.read()
"""


def test_a_server_is_listed_while_it_runs_and_not_after_it_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert running_servers() == []
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        (server,) = running_servers()
        assert (server.pid, server.url, server.models) == (child.pid, "http://127.0.0.1:7", ("tiny", "alias"))
        assert server.serves("alias")
        assert server.serves("/models/tiny.gguf")
        assert not server.serves("other")
        child.kill()
    assert running_servers() == []
    assert list((tmp_path / "paceline" / "servers").iterdir()) == []


def test_a_folder_that_cannot_be_written_does_not_stop_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with recorded("http://127.0.0.1:7", ["tiny"], [], False):
        assert running_servers() == []
