"""A larger model on this CPU, with the embedded model as its draft: plain and speculative decoding in turn.

    python benchmarks/cpu/cpu_large.py --prompts spec_bench_dev.jsonl [--shape llama-1b] [--bits 4 8] [--tokens 48] [--count 6]

The target is inflated from the embedded model (noise 0.06). The matrices of its layers have 4 bits in groups of 32, with a
scale and an offset each, or 8 bits with a scale for each output. Greedy, one stream, prefill included. Texts must be equal.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from paceline.core.config import EngineConfig
from paceline.core.machine import cpu_name, usable_cores
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.engine.engine import Engine
from paceline.engine.start.build import build_engine
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Activations, Dense, Weight
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.models.heads.vocabulary import four_bits
from paceline.models.loading.load import LoadedModel, build_model, load_model, open_checkpoint
from paceline.models.weights.checkpoint import DerivedWeights


class FourBitWeights(DerivedWeights):
    """`Weights` whose layer matrices are rounded to 4 bits."""

    def matrix(self, name: str) -> Weight:
        weight = self._weights.matrix(name)
        is_layer = name.startswith("model.layers.")
        return four_bits(weight.values) if is_layer and isinstance(weight, Dense) else weight


def load_four_bits(
    name: str, device: torch.device, dtype: torch.dtype, quantization: Quantization | None, activations: Activations
) -> LoadedModel:
    if not name.startswith("inflate:"):
        return load_model(name, device, dtype, quantization, activations)
    checkpoint = open_checkpoint(name, device, dtype)
    checkpoint = replace(checkpoint, weights=FourBitWeights(checkpoint.weights))
    model = build_model(checkpoint, device, dtype, None, activations)
    return LoadedModel(checkpoint.name, model.config, model, checkpoint.read_tokenizer())


def build(shape: str, bits: int) -> Engine:
    config = EngineConfig(
        model=f"inflate:{shape}?noise=0.06",
        draft="smollm2",
        device="cpu",
        quantization="int8" if bits == 8 else "none",
        prefix_caching=False,
        max_num_seqs=1,
        max_model_len=1024,
        kv_tokens=2048,
        audit_fraction=0.0,
    )
    return build_engine(config, load=load_four_bits if bits == 4 else load_model)


def generate(
    engine: Engine, number: int, prompt: list[int], tokens: int, enabled: bool
) -> tuple[float, list[int], int]:
    """Seconds, the tokens, and the number of steps that committed them."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    started, made, steps = time.perf_counter(), list[int](), 0
    engine.add(
        engine.validate(Request(f"{number}-{enabled}", tuple(prompt), sampling, SpeculationParams(enabled=enabled)))
    )
    while engine.has_work:
        for output in engine.step():
            made += output.tokens
            steps += 1
    return time.perf_counter() - started, made, steps


def measure(shape: str, bits: int, prompts: list[list[int]], tokens: int) -> str:
    engine = build(shape, bits)
    seconds, steps = {False: 0.0, True: 0.0}, 0
    try:
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
            texts = {}
            for enabled in (False, True):
                took, texts[enabled], count = generate(engine, number, prompt, tokens, enabled)
                seconds[enabled] += took if number else 0.0
                steps += count if number and enabled else 0
            if texts[False] != texts[True]:
                raise SystemExit("speculation changed the text")
    finally:
        engine.close()
    plain, speculative = (len(prompts) * tokens / seconds[enabled] for enabled in (False, True))
    tokens_a_step = len(prompts) * tokens / steps
    return f"| {shape} | {bits} | {plain:.2f} | {speculative:.2f} | {speculative / plain:.2f} | {tokens_a_step:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8], choices=[4, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--count", type=int, default=6)
    options = parser.parse_args()
    tokenizer = open_checkpoint("smollm2").read_tokenizer()
    template = ChatTemplate.of(tokenizer)
    texts = [json.loads(line)["turns"][0] for line in options.prompts.read_text("utf-8").splitlines()]
    texts = [text for text in texts if len(text) < 500]
    texts = texts[:: max(1, len(texts) // options.count)][: options.count]
    prompts = [
        tokenizer.encode(template.render([{"role": "user", "content": text}]), add_special=False) for text in texts
    ]
    print(f"{cpu_name()}, {usable_cores()} cores; {len(prompts)} prompts, {options.tokens} new tokens each\n")
    print(
        "| shape | bits | plain, tok/s | speculative, tok/s | gain | tokens a step |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for bits in options.bits:
        print(measure(options.shape, bits, prompts, options.tokens), flush=True)


if __name__ == "__main__":
    main()
