"""TLS: certificate files, and a server with TLS, keys and an audit log from start to stop."""

import json
import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from paceline.core.errors import InvalidConfig
from paceline.gateway.audit.audit_log import verify
from paceline.gateway.audit.strict import text_hash
from paceline.gateway.auth.api_keys import KeyFile
from paceline.gateway.http.server import TlsFiles
from paceline.model_files.checksums import weights_checksum
from tests.engine.start.test_build import save_checkpoint
from tests.gateway.process import server_process

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to create certificates")


def make_certificate(folder: Path, name: str, *options: str) -> tuple[str, str]:
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", *(options or ("-nodes",))),
        ],
        check=True,
        capture_output=True,
    )
    return str(certificate), str(key)


def test_files_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "other")
    _, locked = make_certificate(tmp_path, "locked", "-passout", "pass:secret")
    assert TlsFiles.from_paths(None, None) is None
    assert TlsFiles.from_paths(certificate, key) == TlsFiles(certificate, key)
    both = tmp_path / "both.pem"
    both.write_text(Path(certificate).read_text() + Path(key).read_text())
    assert TlsFiles.from_paths(str(both), None) == TlsFiles(str(both), None)
    for files, message in (
        ((None, key), "needs tls_cert"),
        ((certificate, None), "not a certificate and its key"),
        ((certificate, other), "not a certificate and its key"),
        ((certificate, locked), "is encrypted"),
        ((str(tmp_path / "absent"), key), "cannot read tls_cert .*absent or tls_key"),
        ((str(tmp_path / "absent"), None), "cannot read tls_cert .*absent"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            TlsFiles.from_paths(*files)


def test_a_server_with_tls_keys_and_audit_log(tmp_path: Path) -> None:
    certificate, key_file = make_certificate(tmp_path, "server")
    log = tmp_path / "audit.jsonl"
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("bank", strict=True)
    model = save_checkpoint(tmp_path / "model")
    files = {"tls_cert": certificate, "tls_key": key_file, "api_keys": str(keys.path), "audit_trail": str(log)}
    with server_process(model=model, draft="none", max_model_len=256, **files) as process:
        assert process.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=process.url, verify=trusted, timeout=60) as client:
            body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 401
            response = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(process.url.replace("https", "http") + "/health")
        assert process.stop(signal.SIGTERM) == 0
    answer = response.json()
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert verify(log).unfinished == ()
    opened, started, finished = (json.loads(line) for line in log.read_text().splitlines())
    assert opened["weights"] == started["weights"] == weights_checksum(model)
    assert (started["request"], started["key"]) == (answer["id"], "bank")
    assert finished["outputs"][0]["text_sha256"] == text_hash(answer["choices"][0]["text"])
