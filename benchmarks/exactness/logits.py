"""Logits compared with transformers in float32: every model family, and the embedded model on real text.

    python benchmarks/exactness/logits.py --prompts spec_bench_dev.jsonl

The figure is the largest difference over the standard deviation of the logits. transformers loads the GGUF with its
own code.
"""

import argparse
import json
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.model_files.hub.hub import find_model
from paceline.models.loading.load import build_model, open_checkpoint
from paceline.models.runner.runner import ModelRunner, Span

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES = {
    "llama 2": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama 3, scaled rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama, tied head": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "mistral, window 64": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=64)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
}


def load(path: str | Path) -> ModelRunner:
    model = build_model(open_checkpoint(path), torch.device("cpu"), torch.float32, activations="float32")
    return ModelRunner(model, num_blocks=64)


def difference(runner: ModelRunner, reference: torch.nn.Module, ids: list[int], chunk: int) -> float:
    """Paceline computes in chunks through the paged cache, transformers in one pass."""
    rows = []
    for start in range(0, len(ids), chunk):
        tokens = ids[start : start + chunk]
        rows.append(runner.forward([Span(range(runner.num_blocks), start, tokens, len(tokens))]).logits)
    with torch.inference_mode():
        theirs = reference(torch.tensor([ids])).logits[0].float()
    return float((torch.cat(rows) - theirs).abs().max() / theirs.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, required=True, help="spec_bench_dev.jsonl, see benchmarks/gpu/README.md"
    )
    prompts = parser.parse_args().prompts
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(f"{'model':28} {'tokens':>6} {'chunk':>6} {'max |diff| / deviation':>24}")
    for name, make in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            reference = make().eval()
            for parameter in reference.parameters():  # away from the near-zero initialisation
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            reference.save_pretrained(folder)
            runner = load(folder)
            ids = torch.randint(0, SHAPE["vocab_size"], (200,)).tolist()
            for chunk in (200, 17, 1):
                print(f"{name:28} {len(ids):6} {chunk:6} {difference(runner, reference, ids, chunk):24.2e}", flush=True)
    path = find_model("smollm2")
    tokenizer = open_checkpoint(path).read_tokenizer()
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    runner = load(path)
    texts = [json.loads(line)["turns"][0] for line in prompts.read_text().splitlines()]
    ids = tokenizer.encode("\n\n".join(texts[::30]))[:800]
    for chunk in (800, 64, 1):
        print(
            f"{'smollm2 (embedded), real text':28} {len(ids):6} {chunk:6} {difference(runner, reference, ids, chunk):24.2e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
