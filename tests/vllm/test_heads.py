"""Random EAGLE-3 heads in the published layout, every variant of the config: in vLLM's CPU build and in our engine.

With one draft token a round both engines draft chains, so that they must draft the same tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.core.errors import UnsupportedModel
from paceline.core.request import SamplingParams
from paceline.engine.hook import StepHook
from paceline.engine.start.llm import LLM
from paceline.engine.step.step import Schedule
from paceline.models.decoder.decoder import ForwardOutput
from paceline.speculation.drafts.drafts import Draft
from tests.heads import save_draft
from tests.vllm.environment import run_vllm
from tests.vllm.random_heads import (
    DRAFT_VOCAB,
    FFN,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LLAMA3_ROPE,
    TARGETS,
    VOCAB,
    WIDTH,
    Variant,
    head_config,
    head_tensors,
    save_head,
    save_target,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("unrounded_drafts")]

NUM_TOKENS = 32
PROMPTS = [[(7 * i + j * (i + 3)) % (VOCAB - 2) for j in range(10 + i)] for i in range(16)]
SECOND_LAYER = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFN, WIDTH),
    "mlp.up_proj": (FFN, WIDTH),
    "mlp.down_proj": (WIDTH, FFN),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}

IN_BOTH = {
    "d2t and own lm_head": Variant(),
    "d2t, own lm_head and embedding, norm_before_residual": Variant(norm_before_residual=True, has_embedding=True),
    "whole vocabulary, own lm_head": Variant(is_reduced=False),
    "whole vocabulary, the target's lm_head, norm_before_residual": Variant(
        is_reduced=False, has_head=False, norm_before_residual=True
    ),
    "the lm_head of a tied target": Variant(target="llama-tied", is_reduced=False, has_head=False),
    "no layer ids": Variant(state_layers=None),
    "rope of type llama3": Variant(layer={"rope_scaling": LLAMA3_ROPE}),
    "Qwen3 target, norm_before_residual": Variant(target="qwen3", norm_before_residual=True),
    "norm_before_fc": Variant(fields={"norm_before_fc": True}, tensors={"input_norm.weight": (3 * WIDTH,)}),
    "fc_norm": Variant(fields={"fc_norm": True}, tensors={f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}),
    "norm_output": Variant(fields={"norm_output": True}),
    "Qwen3 layer": Variant(
        layer={"model_type": "qwen3"},
        tensors={f"layers.0.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"},
    ),
    "two layers": Variant(
        layer={"num_hidden_layers": 2},
        tensors={f"layers.1.{name}.weight": size for name, size in SECOND_LAYER.items()},
    ),
}
IN_VLLM_ONLY = {
    "no norm_before_residual": (Variant(norm_before_residual=None), "lacks norm_before_residual"),
    "attention_bias": (
        Variant(
            layer={"attention_bias": True},
            tensors={
                "layers.0.self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
                "layers.0.self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
                "layers.0.self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
                "layers.0.self_attn.o_proj.bias": (WIDTH,),
            },
        ),
        "attention_bias",
    ),
}
FOUR_STATES = Variant(state_layers=(1, 3, 5, 7))
REDUCED_WITHOUT_HEAD = Variant(has_head=False)
VARIANTS = (
    IN_BOTH
    | {name: variant for name, (variant, _) in IN_VLLM_ONLY.items()}
    | {"four states": FOUR_STATES, "d2t without lm_head": REDUCED_WITHOUT_HEAD}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All targets and heads."""
    home = tmp_path_factory.mktemp("heads")
    for name in TARGETS:
        save_target(home / name, name)
    for name, variant in VARIANTS.items():
        save_head(home / name, variant)
    return home


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    """Results of vLLM by variant, and by target without a head."""
    heads: list[dict[str, str | None]] = [
        {"name": name, "target": str(folder / name), "folder": None} for name in TARGETS
    ]
    for name, variant in VARIANTS.items():
        heads.append({"name": name, "target": str(folder / variant.target), "folder": str(folder / name)})
    job = {"prompts": PROMPTS, "max_tokens": NUM_TOKENS, "depth": 1, "heads": heads}
    results = run_vllm(folder, "heads", job, "load_heads.py")
    for result in results.values():  # vLLM drafts once more after the last token
        result["drafted"] = [drafted[:-1] for drafted in result.get("drafted", [])]
    return results


class DraftRecorder(StepHook):
    """Draft tokens by sequence."""

    def __init__(self) -> None:
        self.drafted: dict[int, list[int]] = {}

    def after_pass(self, schedule: Schedule, drafts: Mapping[int, Draft], output: ForwardOutput) -> None:
        for sequence, draft in drafts.items():
            self.drafted.setdefault(sequence, []).extend(draft.tokens)


def ours(folder: Path, target: str, head: str | None) -> dict[str, Any]:
    """The result of our engine in the same form."""
    speculation = {"depth": "fixed", "max_depth": 1, "breaker_rounds": 10**6}
    limits = {"kv_tokens": 4096, "max_model_len": 256, "max_num_seqs": 16, "audit_fraction": 0.0}
    draft, recorder = None if head is None else str(folder / head), DraftRecorder()
    with LLM(
        str(folder / target), draft=draft, device="cpu", speculation=speculation, hooks=[recorder], **limits
    ) as llm:
        # One token more: vLLM also drafts when only one token is left, and we do not.
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS + 1, ignore_eos=True)
        made = llm.generate(PROMPTS, sampling, speculation={"enabled": head is not None})
    return {
        "tokens": [list(one.completions[0].token_ids[:NUM_TOKENS]) for one in made],
        "drafted": [recorder.drafted[i] for i in sorted(recorder.drafted)] or [[] for _ in PROMPTS],
        "accepted": sum(one.completions[0].speculation.num_accepted_draft_tokens for one in made),
    }


@pytest.mark.parametrize("target", TARGETS)
def test_targets_without_a_head_give_the_same_text(folder: Path, theirs: dict[str, Any], target: str) -> None:
    assert ours(folder, target, None) == theirs[target]


@pytest.mark.parametrize("name", IN_BOTH)
def test_a_head_loads_in_both_and_drafts_the_same_tokens(folder: Path, theirs: dict[str, Any], name: str) -> None:
    target = IN_BOTH[name].target
    mine = ours(folder, target, name)
    assert mine["tokens"] == theirs[target]["tokens"]  # in our engine, as without a head
    assert theirs[name] == mine
    assert mine["accepted"] > 0
    assert mine["drafted"] not in [theirs[other]["drafted"] for other in IN_BOTH if other != name]


@pytest.mark.parametrize("name", IN_VLLM_ONLY)
def test_what_we_refuse_loads_in_vllm(folder: Path, theirs: dict[str, Any], name: str) -> None:
    assert theirs[name]["tokens"] == theirs["llama"]["tokens"]
    assert all(theirs[name]["drafted"])
    with pytest.raises(UnsupportedModel, match=IN_VLLM_ONLY[name][1]):
        ours(folder, "llama", name)


def test_a_head_over_four_states_loads_in_our_engine_only(folder: Path, theirs: dict[str, Any]) -> None:
    """vLLM reads the number of states from another field than `speculators` writes."""
    assert "Tried to load weights of size" in theirs["four states"]["error"]
    mine = ours(folder, "llama", "four states")
    assert mine["tokens"] == theirs["llama"]["tokens"]
    assert mine["accepted"] > 0


def test_vllm_takes_norm_before_residual_as_true_if_it_is_missing(
    tmp_path: Path, folder: Path, theirs: dict[str, Any]
) -> None:
    head = save_head(tmp_path / "head", replace(IN_VLLM_ONLY["no norm_before_residual"][0], norm_before_residual=True))
    assert ours(folder, "llama", str(head)) == theirs["no norm_before_residual"]


def test_a_reduced_vocabulary_without_an_output_head_drafts_other_tokens_in_vllm(
    tmp_path: Path, folder: Path, theirs: dict[str, Any]
) -> None:
    """We take the rows of the target's head that `d2t` names, and vLLM the first ones."""
    mine, other = ours(folder, "llama", "d2t without lm_head"), theirs["d2t without lm_head"]
    assert mine["tokens"] == theirs["llama"]["tokens"] == other["tokens"]
    assert mine["drafted"] != other["drafted"]
    rows = load_file(folder / "llama" / "model.safetensors")["lm_head.weight"][:DRAFT_VOCAB]
    save_draft(tmp_path / "head", head_config(Variant()), head_tensors(Variant()) | {"lm_head.weight": rows})
    assert ours(folder, "llama", str(tmp_path / "head")) == other
