"""Every mutated model file loads or ends in a typed error, within 5 seconds and 500 MB.

`make test-fuzz` makes 2,000 mutations of each format; the tests of a change make the first few of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.engine.start.test_build import LETTERS, save_checkpoint
from tests.models.drafts.test_load import save
from tests.models.tiny import build
from tests.models.weights.fuzz import FORMATS, MEGABYTES, SECONDS
from tests.models.weights.test_gguf_file import write_gguf

MUTATIONS = int(os.environ.get("FUZZ_MUTATIONS", "40"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<u>{{ m['content'] | trim }}{% else %}"
    "{{ raise_exception('roles') }}{% endif %}{% if loop.last %}{{ '>' ~ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    save_checkpoint(folder / "folder")
    tokens = {"bos_token": "a", "eos_token": {"content": "b"}, "chat_template": [{"name": "default", "template": "x"}]}
    (folder / "folder/tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "folder/chat_template.jinja").write_text(TEMPLATE)
    build("llama").save_pretrained(folder / "sharded", max_shard_size="100KB")
    (folder / "sharded/tokenizer.json").write_bytes((folder / "folder/tokenizer.json").read_bytes())
    _write_gguf(folder / "tiny.gguf")
    for kind in ("eagle", "medusa", "distilled"):
        save(folder / f"draft-{kind}", kind, reduced=20)
    return folder


def _write_gguf(path: Path) -> None:
    """A model with a SentencePiece vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *LETTERS]

    def add_vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(i) for i in range(len(pieces))])
        writer.add_token_types([2, 3, 3, *[1] * len(LETTERS)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)

    write_gguf(path, build("llama"), extra=add_vocabulary)


@pytest.fixture(scope="module")
def reports(files: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.models.weights.fuzz", str(SEED), str(MUTATIONS), str(files)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return {report["format"]: report for report in map(json.loads, done.stdout.splitlines())}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", FORMATS)
def test_mutated_files_end_in_typed_errors(kind: str, reports: dict[str, Any]) -> None:
    report = reports[kind]
    assert not report["failures"], "\n".join(report["failures"][:20])
    assert report["loaded"] + report["typed"] == MUTATIONS
    assert report["slowest_s"] < SECONDS
    assert report["largest_mb"] < MEGABYTES
