"""Heads in their published forms: loaded from folders, compared with plain torch, and refused if something is wrong."""

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli.doctor_checks import ModelSketch, _Weights, describe_draft
from paceline.core.errors import PacelineError
from paceline.core.request import SamplingParams
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.drafts.load import DraftFolder, LoadedHead, load_draft, open_draft_folder
from paceline.models.heads.block.block import BlockModel, BlockRunner
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.heads.medusa import MedusaModel
from paceline.models.loading.load import LoadedModel
from paceline.models.runner.runner import Span
from paceline.speculation.proposer import HiddenRows, SequenceProgress
from paceline.speculation.proposers.block import BlockProposer
from tests.models.public_reference import block_drafts, eagle_logits, medusa_logits, token_ids
from tests.models.reference_heads import target_states
from tests.public_heads import BLOCK_HEADS, EAGLE_HEADS, MEDUSA_HEADS, PUBLIC_HEADS, D, PublicHead, V, target

TARGET = target()
IDS = [7, 3, 22, 9, 14, 39, 0, 5, 5, 8, 31, 17, 2, 6, 28, 11, 4, 13, 19]
DRAFTED = 4


def load(head: PublicHead, folder: Path) -> EagleModel | MedusaModel | BlockModel:
    found = open_draft_folder(head.save(folder))
    assert found is not None
    assert found.form == head.form
    loaded = load_draft(found, LoadedModel("tiny", TARGET.config, TARGET, cast(Tokenizer, None)))
    assert isinstance(loaded, LoadedHead)
    return loaded.model


@pytest.mark.usefixtures("unrounded_drafts")
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("name", EAGLE_HEADS)
def test_drafts_are_those_of_plain_torch(
    name: str, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = EAGLE_HEADS[name]()
    if not is_native:
        monkeypatch.setattr(EagleModel, "native", lambda _model, _cache: None)
    model = load(head, tmp_path / "head")
    assert isinstance(model, EagleModel)
    assert model.config.state_layers == head.states
    runner, ids, path = EagleRunner(model, num_blocks=2, num_lanes=1), token_ids(head), []
    inner, _ = target_states(TARGET, IDS, head.states)
    first, rest = ({layer: states[rows] for layer, states in inner.items()} for rows in (slice(10), slice(10, 18)))
    with torch.inference_mode():
        runner.forward([Span([0, 1], 0, IDS[1:11], 0)], first)
        state = runner.forward([Span([0, 1], 10, IDS[11:], 0)], rest)[-1:]
        for step in range(DRAFTED):
            logits, expected = model.logits(state)[0], eagle_logits(head, TARGET, IDS, path)
            torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)
            best = int(expected.argmax())
            assert int(logits.argmax()) == best
            path.append(best if ids is None else ids[best])
            assert model.vocabulary.tokens(torch.tensor([best])).tolist() == path[-1:]
            state = runner.forward([Span([0, 1], 18 + step, path[-1:], 0)], state)


@pytest.mark.usefixtures("unrounded_drafts")
@pytest.mark.parametrize("name", MEDUSA_HEADS)
def test_medusa_heads_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    head = MEDUSA_HEADS[name]()
    model = load(head, tmp_path / "head")
    assert isinstance(model, MedusaModel)
    expected = medusa_logits(head, TARGET, IDS)
    _, last = target_states(TARGET, IDS, ())
    torch.testing.assert_close(model.logits(last[-1:])[0], expected, rtol=2e-3, atol=2e-3)
    columns = torch.arange(expected.shape[1])
    assert model.vocabulary.tokens(columns).tolist() == (token_ids(head) or columns.tolist())


@pytest.mark.usefixtures("unrounded_drafts")
@pytest.mark.parametrize("name", BLOCK_HEADS)
def test_blocks_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    """The proposer observes a prompt in two parts, drafts, and drafts again after three more tokens."""
    head = BLOCK_HEADS[name]()
    model = load(head, tmp_path / "head")
    assert isinstance(model, BlockModel)
    proposer, start = BlockProposer(BlockRunner(model, 4), 64), 0
    for end, depth in ((9, 0), (16, 32), (19, 3)):
        ids = IDS[:end]
        inner, _ = target_states(TARGET, ids, head.states)
        states = {layer: values[start : end - 1] for layer, values in inner.items()}
        hidden, params = HiddenRows(start, states, None), SamplingParams(temperature=0.0)
        proposer.observe([SequenceProgress(0, ids, depth, params, 0, 0, 5, "coupled", hidden=hidden)])
        start = end - 1
        if depth:
            drafted = proposer.collect([0], 0.0).split()[0]
            expected, logits = block_drafts(head, TARGET, ids)
            assert list(drafted.tokens) == expected[:depth]
            assert len(expected) == model.config.num_drafted
            assert float((logits.topk(2).values @ torch.tensor([1.0, -1.0])).min()) > 1e-3  # no pick is close
    free = proposer.num_free_blocks
    assert free < 4
    proposer.close([0])
    assert proposer.num_free_blocks == 4


class Code:
    """What a pickle would execute."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (EXECUTED,)


EXECUTED = "/tmp/paceline-test-executed-code"


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    """Writes the head with other keys of config.json; None removes a key."""

    def save(folder: Path) -> None:
        head = PUBLIC_HEADS[name]()
        config = {key: value for key, value in {**head.config, **changes}.items() if value is not None}
        replace(head, config=config).save(folder)

    return save


def with_tensors(name: str, **changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Writes the head with other tensors; None removes one. `__` stands for a dot."""

    def save(folder: Path) -> None:
        head = PUBLIC_HEADS[name]()
        tensors = {**head.tensors, **{key.replace("__", "."): value for key, value in changes.items()}}
        kept = {key: value for key, value in tensors.items() if value is not None}
        replace(head, tensors=kept).save(folder)

    return save


def with_file(contents: Callable[[Path], None]) -> Callable[[Path], None]:
    """Writes a pickled head, then another file in place of its pickle."""

    def save(folder: Path) -> None:
        PUBLIC_HEADS["medusa"]().save(folder)
        contents(folder / "medusa_lm_head.pt")

    return save


def compress(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


LAYER = {"hidden_size": D, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
         "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5}  # fmt: skip
BAD_HEADS: dict[str, tuple[Callable[[Path], None], str]] = {
    "code in a pickle": (with_file(lambda path: torch.save({"a": Code()}, path)), "nothing in it was executed"),
    "old pickle": (with_file(lambda path: path.write_bytes(pickle.dumps(Code()))), "not a whole file of torch.save"),
    "half a pickle": (with_file(lambda path: path.write_bytes(path.read_bytes()[:999])), "not a whole file"),
    "compressed pickle": (with_file(compress), "is compressed"),
    "a list of tensors": (with_file(lambda path: torch.save([torch.ones(2)], path)), "not a dictionary of names"),
    "expanded tensor": (
        with_file(lambda path: torch.save({"0.0.linear.weight": torch.ones(1).expand(1 << 40)}, path)),
        "not a dictionary of names and tensors",
    ),
    "no residual flag": (edited("speculators", norm_before_residual=None), "lacks norm_before_residual"),
    "both norms": (edited("speculators fc_norm", norm_before_fc=True), "fc_norm and norm_before_fc"),
    "a flag without its norms": (edited("speculators", fc_norm=True), r"has no weight fc_norm\.0\.weight"),
    "norms without their flag": (edited("speculators fc_norm", fc_norm=False), r"the weight fc_norm\.0\.weight, which"),
    "another type of layer": (
        edited("speculators", transformer_layer_config={**LAYER, "model_type": "qwen3"}),
        "'qwen3'",
    ),
    "biases": (edited("speculators", transformer_layer_config={**LAYER, "attention_bias": True}), "attention_bias"),
    "windows": (
        edited("speculators", transformer_layer_config={**LAYER, "layer_types": ["sliding_attention"]}),
        "sliding_attention",
    ),
    "two layers in config.json": (
        edited("speculators", transformer_layer_config={**LAYER, "num_hidden_layers": 2}),
        r"has no weight layers\.1",
    ),
    "a state that the target lacks": (
        edited("speculators", eagle_aux_hidden_state_layer_ids=[1, 3, 8]),
        "has 7 layers",
    ),
    "a state twice": (edited("speculators", eagle_aux_hidden_state_layer_ids=[1, 3, 3]), "each once"),
    "another speculator": (
        edited("speculators", speculators_model_type="peagle"),
        "'peagle'; supported: eagle3, dflash, dspark",
    ),
    "a list of speculators": (
        edited("speculators", speculators_model_type=["eagle3"]),
        r"\['eagle3'\]; supported: eagle3",
    ),
    "layer numbers of two meanings": (
        edited("sglang", eagle_aux_hidden_state_layer_ids=[0, 2, 4]),
        "outside eagle_config",
    ),
    "two values of a flag": (edited("sglang two layers", norm_output=False), "two values of norm_output"),
    "another first layer": (
        edited("sglang", eagle_config={"use_input_layernorm_in_first_layer": False}),
        "use_input_layernorm_in_first_layer=False",
    ),
    "no layer numbers": (edited("deepspec", target_layer_ids=None), "target_layer_ids"),
    "no vocabulary size": (edited("eagle3 pickle", draft_vocab_size=None), "has no draft_vocab_size"),
    "another vocabulary size": (edited("sglang", draft_vocab_size=23), "draft_vocab_size=23"),
    "another drafter": (
        edited("dflash", architectures=["DFlash2DraftModel"]),
        "DFlash2DraftModel, which is not supported",
    ),
    "no map": (with_tensors("speculators", d2t=None), "has no d2t"),
    "a map out of range": (with_tensors("speculators", d2t=torch.full((24,), 39)), "outside the target's vocabulary"),
    "a map of ids": (with_tensors("speculators", d2t=torch.linspace(1, V - 2, 24).long()), "outside the target's"),
    "a map with an id twice": (with_tensors("speculators", d2t=-torch.arange(24)), "the same id twice"),
    "a map of another size": (with_tensors("speculators", d2t=torch.arange(12)), "lm_head.weight of"),
    "a map of a matrix": (with_tensors("speculators", d2t=torch.ones(4, 6)), "not a vector"),
    "another shape": (with_tensors("speculators", fc__weight=torch.ones(D, 5 * D)), r"fc\.weight .* requires"),
    "a missing weight": (with_tensors("eagle3 pickle", norm__weight=None), r"has no weight norm\.weight"),
    "an unknown weight": (with_tensors("sglang", mystery__weight=torch.ones(3)), r"the weight mystery\.weight, which"),
    "whole numbers": (with_tensors("sglang", norm__weight=torch.ones(D, dtype=torch.int64)), "is not float32"),
    "a weight twice": (with_tensors("sglang", model__norm__weight=torch.ones(D)), "which are the same weight"),
    "another vocabulary": (
        with_tensors("speculators own tables", embed_tokens__weight=torch.ones(50, D)),
        "a target of 50 tokens, and this target has 40",
    ),
    "another width": (
        edited("sglang narrow", target_hidden_size=64),
        "a target of hidden size 64, and this target has 32",
    ),
    "no embedding": (with_tensors("sglang narrow", embed_tokens__weight=None), "has no embed_tokens.weight"),
    "medusa of another width": (
        with_tensors("medusa", **{f"0__{i}__linear__weight": torch.ones(64, 64) for i in (0, 1)}),
        "a target of hidden size 64",
    ),
    "medusa of another vocabulary": (with_tensors("medusa", **{"0__2__weight": torch.ones(50, D)}), "50 tokens"),
    "medusa without a map": (with_tensors("medusa vllm", token_map=None), "has no token_map"),
    "medusa with a map out of range": (
        with_tensors("medusa vllm", token_map=torch.arange(24) + 20),
        "outside the target",
    ),
    "no mask id": (edited("dspark", mask_token_id=None), "mask_token_id"),
    "a mask id out of range": (edited("dspark", mask_token_id=V), "mask_token_id=40"),
    "no block size": (edited("dflash", block_size=None), "block_size"),
    "no states of a block": (edited("dflash", dflash_config={"mask_token_id": 3}), "target_layer_ids"),
    "no layout": (edited("speculators dflash", sample_from_anchor=None), "lacks sample_from_anchor"),
    "another Markov head": (edited("dspark", markov_head_type="lstm"), "'lstm', which is not supported"),
    "a Markov head of another rank": (edited("dspark", markov_rank=9), r"markov_w1\.weight .* requires"),
    "a Markov head in DFlash": (
        with_tensors("dflash", markov_head__markov_w1__weight=torch.ones(V, 8)),
        r"the weight markov_head\.markov_w1",
    ),
    "medusa with a missing head": (with_tensors("medusa", **{"1__2__weight": None}), r"has no weight lm_heads\.1"),
}


def verdict(folder: Path, check: Callable[[DraftFolder], object]) -> str | None:
    """The refusal of a head; None if it is accepted."""
    try:
        found = open_draft_folder(folder)
        assert found is not None
        check(found)
    except PacelineError as error:
        return str(error)
    return None


def refusals(folder: Path) -> tuple[str | None, str | None]:
    """What doctor and the loader say about a head."""
    sketch = ModelSketch("tiny", TARGET.config, _Weights(torch.float32, 0), cast(Tokenizer, None))
    loaded = LoadedModel("tiny", TARGET.config, TARGET, cast(Tokenizer, None))
    return (
        verdict(folder, lambda found: describe_draft(found, "tiny", sketch)),
        verdict(folder, lambda found: load_draft(found, loaded)),
    )


@pytest.mark.parametrize("name", BAD_HEADS)
def test_bad_heads_are_refused_by_doctor_and_loader(name: str, tmp_path: Path) -> None:
    save, message = BAD_HEADS[name]
    save(tmp_path / "head")
    checked, loaded = refusals(tmp_path / "head")
    assert checked is not None
    assert re.search(message, checked), checked
    assert "\n" not in checked
    assert loaded == checked
    assert not Path(EXECUTED).exists()


@pytest.mark.parametrize("name", PUBLIC_HEADS)
def test_what_doctor_passes_is_loaded(name: str, tmp_path: Path) -> None:
    assert refusals(PUBLIC_HEADS[name]().save(tmp_path / "head")) == (None, None)


def test_a_small_llama_is_no_head(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_draft_folder(tmp_path) is None
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    assert open_draft_folder(tmp_path) is None
