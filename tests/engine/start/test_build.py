"""From a configuration to an engine, over checkpoints of a few kilobytes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.errors import IncompatibleDraft, InvalidConfig, OutOfMemory, UnsupportedModel
from paceline.core.request import Request, SamplingParams, ValidatedRequest
from paceline.engine.engine import Engine
from paceline.engine.sizing import calibration, sizing
from paceline.engine.start.build import build_engine, pick_device, pick_dtype
from paceline.models.families.read import read_config
from paceline.models.loading.load import LoadedModel
from paceline.policy.depth.goodput import GoodputDepth
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from tests.fakes import RandomWeights, run

HF = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 35,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz.,:;!?0123"


def save_checkpoint(folder: Path, letters: str = LETTERS, seed: int = 0, perturb: float = 0.0, **shape: Any) -> str:
    """A random model and a tokenizer of single characters, as `save_pretrained` would leave them."""
    folder.mkdir(parents=True)
    values = HF | shape
    (folder / "config.json").write_text(json.dumps(values))
    config = read_config(values)
    weights = RandomWeights(config, seed, perturb)
    layers = [f"model.layers.{i}." for i in range(config.num_layers)]
    parts = [*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down"))]
    matrices = ["model.embed_tokens.weight", *(f"{layer}{part}.weight" for layer in layers for part in parts)]
    norms = ("input_layernorm", "post_attention_layernorm")
    vectors = ["model.norm.weight", *(f"{layer}{norm}.weight" for layer in layers for norm in norms)]
    tensors = {name: weights.matrix(name).values.contiguous() for name in matrices}
    save_file(tensors | {name: weights.vector(name) for name in vectors}, folder / "model.safetensors")
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target")


def engine(target: str, **options: Any) -> Engine:
    speculation = SpeculationConfig(**options.pop("speculation", {}))
    options = {"kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 32, "device": "cpu", **options}
    return build_engine(EngineConfig(model=target, speculation=speculation, **options))


def test_equal_files_and_settings_have_equal_fingerprints(target: str, tmp_path: Path) -> None:
    ours = engine(target).fingerprint
    assert ours is not None
    assert ours.digest.startswith("fp_")
    copied = Path(shutil.copytree(target, tmp_path / "copy"))
    assert engine(str(copied), max_num_seqs=2, speculation={"method": "suffix"}).fingerprint == ours
    others = [engine(target, quantization="int8"), engine(target, kv_dtype="fp8"), engine(target, dtype="bfloat16")]
    others.append(engine(save_checkpoint(tmp_path / "other", seed=1)))
    template = {"chat_template": "{{ messages[0].content }}"}
    (copied / "tokenizer_config.json").write_text(json.dumps(template))
    others.append(engine(str(copied)))
    digests = {ours.digest, *(other.fingerprint.digest for other in others if other.fingerprint is not None)}
    assert len(digests) == 1 + len(others)


def prompt(count: int = 20) -> tuple[int, ...]:
    return tuple(i * 7 % 36 for i in range(count))


def texts(engine: Engine, **sampling: Any) -> dict[tuple[str, int], list[int]]:
    options = {"max_tokens": 24, "ignore_eos": True, **sampling}
    return run(engine, [Request(f"r{i}", prompt(9 + i), SamplingParams(seed=i, **options)) for i in range(3)]).tokens


def test_a_draft_brings_its_method(target: str, tmp_path: Path) -> None:
    plain = engine(target, speculation={"enabled": False})
    assert not plain.speculator.enabled
    expected = texts(plain)
    draft = save_checkpoint(tmp_path / "draft", perturb=0.2)
    drafted = engine(target, draft=draft, speculation={"depth": "fixed", "max_depth": 3})
    assert isinstance(drafted.speculator.proposers["draft_model"], DraftModelProposer)
    assert drafted.speculator.enabled
    assert texts(drafted) == expected
    default = Request("r", prompt())
    assert [engine.validator.sequences(ValidatedRequest.of(default), 0.0)[0].method for engine in (plain, drafted)] == [
        "ngram",
        "draft_model",
    ]
    assert texts(
        engine(target, draft=draft, speculation={"method": "ngram", "depth": "fixed"}), temperature=0.3
    ) == texts(plain, temperature=0.3)


def test_both_caches_hold_as_many_tokens(target: str, tmp_path: Path) -> None:
    draft = save_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    built = engine(target, draft=draft, kv_tokens=600)
    proposer = built.speculator.proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    assert (built.runner.num_blocks, built.scheduler.tables.pool.num_blocks, proposer.num_free_blocks) == (37, 37, 37)


def test_a_draft_with_fewer_rows_and_a_shorter_window(target: str, tmp_path: Path) -> None:
    """Tokens 36 to 39 are padding in the target, absent in the draft, and a client may send them all the same."""
    draft = save_checkpoint(tmp_path / "draft", vocab_size=36, max_position_embeddings=32)
    built = engine(target, draft=draft, speculation={"depth": "fixed", "max_depth": 4})
    one = Request("r", (1, 38, 2, 39), SamplingParams(max_tokens=60, seed=1, repetition_penalty=1.2, ignore_eos=True))
    result = run(built, [one])
    assert result.tokens == run(engine(target), [one]).tokens
    assert result.drafted > 4


def test_a_draft_of_another_vocabulary_is_refused(target: str, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", letters=LETTERS[::-1])
    with pytest.raises(IncompatibleDraft, match="token 0 is 'a' in the target and '3' in the draft"):
        build_engine(EngineConfig(model=target, draft=other), load=no_load)


def no_load(*_: object) -> LoadedModel:
    raise AssertionError("weights are read before the pair is refused")


def test_a_draft_with_other_stop_tokens_is_a_warning(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = save_checkpoint(tmp_path / "ends", eos_token_id=3)
    built = engine(target, draft=ends, speculation={"depth": "fixed", "max_depth": 4})
    (message,) = [message for message in caplog.messages if "draft" in message and "stops" in message]
    assert message.startswith(f"the draft {ends}: the target stops at ")
    request_ = Request("r", (1, 2), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    assert run(built, [request_]).tokens == run(engine(target), [request_]).tokens


def test_the_window_is_the_least_of_asked_and_made_for(target: str, caplog: pytest.LogCaptureFixture) -> None:
    for asked, window in ((None, 256), (64, 64), (4096, 256)):
        caplog.clear()
        built = engine(target, max_model_len=asked)
        warned = "max_model_len is 4096, but the model supports 256: using that" in caplog.messages
        assert warned == (asked == 4096)
        (sequence,) = built.validator.sequences(
            ValidatedRequest.of(Request("r", prompt(), SamplingParams(max_tokens=10_000))), 0.0
        )
        assert built.validator.remaining(sequence) == window - 20


def test_a_cache_too_small_for_one_sequence_is_refused(target: str) -> None:
    with pytest.raises(InvalidConfig, match=r"raise it to 272 or more, or set max_model_len \(now 256\) lower"):
        engine(target, kv_tokens=256)
    assert engine(target, kv_tokens=272).runner.num_blocks == 17


def test_the_cache_follows_the_memory_when_not_asked_for(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = engine(target, kv_tokens=None)
    assert built.runner.num_blocks == 4 * 256 // 16  # all slots at full length
    monkeypatch.setattr(sizing, "CPU_CACHE_SHARE", 0)
    monkeypatch.setattr(sizing, "CPU_CACHE_BYTES", 512 * 512)  # a token takes 512 bytes
    assert engine(target, kv_tokens=None).runner.num_blocks == 512 // 16
    monkeypatch.setattr(sizing, "total_memory", lambda: 60_000)
    with pytest.raises(OutOfMemory):
        engine(target)


def test_goodput_starts_from_a_measurement(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    original = calibration.measure_passes
    monkeypatch.setattr(calibration, "measure_passes", lambda *a: measured.append(a[2]) or original(*a))
    assert isinstance(engine(target).speculator.depth, GoodputDepth)
    engine(target, speculation={"enabled": False})
    engine(target, speculation={"depth": "fixed"})
    assert measured == [16]


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        build_engine(EngineConfig(model=str(tmp_path / "nothing")))


def test_a_draft_that_is_not_there_is_named_before_the_target_is_read(target: str) -> None:
    def load(*_: object) -> LoadedModel:
        raise AssertionError("the target was read")

    with pytest.raises(UnsupportedModel, match=r"no draft at 'WRONG'.*set `draft` to `none`"):
        build_engine(EngineConfig(model=target, draft="WRONG", device="cpu"), load=load)


def test_a_draft_that_cannot_be_loaded_is_named(target: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModel, match=r"the draft .*empty cannot be used: "):
        engine(target, draft=str(tmp_path / "empty"))


def test_device_and_dtype() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert pick_device("auto") == torch.device("cpu")
        with pytest.raises(InvalidConfig, match="use device cpu"):
            pick_device("cuda")
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize("name", ["gpu", "mps", "cuda:", "cuda:one", ""])
def test_a_device_that_is_none_says_what_is(name: str) -> None:
    with pytest.raises(InvalidConfig, match="use auto, cpu, cuda, or one GPU of several"):
        pick_device(name)


def test_a_gpu_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InvalidConfig, match="the GPUs are cuda:0 to 1"):
        pick_device("cuda:2")
