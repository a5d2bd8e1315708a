"""Load generators and evaluations of other projects against a server, unmodified. `make test-clients` installs them."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import client_environment

pytestmark = pytest.mark.clients

RUN_SECONDS = 300


def run(command: list[Any], folder: Path, offline: bool = True) -> str:
    """What the command prints; its own folder, so that no file of the repository is imported by accident."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    for name in ("PYTHONPATH", *(() if offline else ("HF_HUB_OFFLINE",))):
        environment.pop(name, None)
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def run_script(name: str, script: str, folder: Path, *arguments: Any) -> Any:
    """The JSON that the script prints last, run with the client's Python."""
    python = client_environment(name) / "python"
    return json.loads(run([python, "-c", script, *arguments], folder).splitlines()[-1])


def test_guidellm(url: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [client_environment("guidellm") / "guidellm", "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={url},model=smollm2"]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer_folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=10"]
    run([*command, "--output", f"kind=json,path={report}"], tmp_path)
    (benchmark,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (10, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 16


def test_aiperf(url: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    command = [client_environment("aiperf") / "aiperf", "profile", "--model", "smollm2", "--url", url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer_folder, "--ui", "none"]
    command += ["--request-count", 6, "--concurrency", 2, "--isl", 64, "--osl", 32, "--artifact-dir", tmp_path]
    for extra in ("ignore_eos:true", "min_tokens:32", "temperature:0"):
        command += ["--extra-inputs", extra]
    run(command, tmp_path, offline=False)  # offline, it looks for a tokenizer folder in the Hub's cache
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text("utf-8"))
    assert report["request_count"]["avg"] == 6
    assert report["output_sequence_length"]["avg"] == 32
    assert report["total_spec_decode_steps"]["avg"] > 0  # it read the metrics of the stream


def test_vllm_bench_serve(url: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    command = [
        client_environment("vllm") / "vllm",
        "bench",
        "serve",
        "--base-url",
        url,
        "--tokenizer",
        tokenizer_folder,
    ]
    command += ["--dataset-name", "random", "--random-input-len", 48, "--random-output-len", 32]
    text = run([*command, "--num-prompts", 8, "--max-concurrency", 2, "--temperature", 0], tmp_path)
    assert re.search(r"Successful requests: +8\b", text)
    rate = re.search(r"Acceptance rate \(%\): +([\d.]+)", text)
    assert rate is not None
    assert float(rate[1]) > 0


LM_EVAL = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

lm = LocalCompletionsAPI(model="smollm2", base_url=sys.argv[1], tokenizer=sys.argv[2], batch_size=2, max_length=2048)
pairs = [("The sky is", " blue"), ("The sky is", " zxq"), ("The capital of France is", " Paris")]
scores = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
until = {"until": ["."], "max_gen_toks": 16, "temperature": 0}
texts = lm.generate_until([Instance("generate_until", {}, ("The capital of France is", until), 0)])
print(json.dumps({"scores": scores, "texts": texts}))
"""


def test_lm_eval(url: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    """Log-likelihoods by `echo` and `logprobs` of token-id prompts, and texts up to a stop string."""
    found = run_script("lm-eval", LM_EVAL, tmp_path, f"{url}/v1/completions", tokenizer_folder)
    (blue, _), (nonsense, _), (paris, is_greedy) = found["scores"]
    assert blue > nonsense
    assert is_greedy
    assert paris > -2
    assert found["texts"] == [" Paris"]
