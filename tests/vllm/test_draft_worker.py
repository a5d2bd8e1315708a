"""The command line of a draft worker for vLLM."""

import pytest

from paceline.vllm.draft_worker import main


@pytest.mark.parametrize(
    ("address", "draft", "message"),
    [
        ("tcp://0.0.0.0:0", "no-such-draft", "create keys with `paceline keys`"),
        (
            "127.0.0.1:5555",
            "smollm2-distilled",
            "--address must be tcp://HOST:PORT or ipc://PATH, got '127.0.0.1:5555'",
        ),
        ("tcp://127.0.0.1:0", "no-such-draft", "no model at 'no-such-draft'"),
    ],
)
def test_an_error_is_a_message_without_a_traceback(
    address: str, draft: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.vllm.draft_worker.log_as", lambda *_: None)  # it configures the logs of this process
    with pytest.raises(SystemExit) as end:
        main(["--draft", draft, "--model", "smollm2", "--address", address, "--threads", "1"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
