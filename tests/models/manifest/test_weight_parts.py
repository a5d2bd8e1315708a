"""Weights in parts are exact to the bit, exported from a model or read from disk part by part."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.packing import PackedForm, PackedWeight
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Dense, Grouped
from paceline.model_files.tokenizer.compatibility import fingerprint
from paceline.models.families.spec_json import spec_from_json, spec_to_json
from paceline.models.loading.load import LoadedModel, build_model, open_checkpoint
from paceline.models.loading.streamed import StreamedModel, StreamedWeights
from paceline.models.manifest.manifest import (
    ExportedWeights,
    Manifest,
    PartForm,
    assemble,
    empty_part,
    piece_tensors,
    tensor_bytes,
    weight_form,
)
from paceline.models.manifest.parts import CheckpointParts, Parts, part_of, tokenizer_from_tensor, tokenizer_to_tensor
from paceline.models.memory.memory import memory_checksum
from paceline.models.runner.runner import ModelRunner, Span, early_exit
from tests.engine.harness import letters
from tests.models import tiny

CPU = torch.device("cpu")
SPANS = [Span(blocks=[0], context_len=0, tokens=[3, 1, 4, 1, 5, 9], num_logits=2)]
KINDS: list[tuple[torch.dtype, Quantization | None]] = [
    (torch.float32, None),
    (torch.float32, "int8"),
    (torch.float32, "fp8"),
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "fp8"),
]


@pytest.fixture(scope="module", params=["llama", "llama-tied", "llama3-rope", "linear-rope", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny.build(request.param).save_pretrained(path)
    return path


def loaded(folder: Path, dtype: torch.dtype = torch.float32, quantization: Quantization | None = None) -> LoadedModel:
    model = build_model(open_checkpoint(folder), CPU, dtype, quantization)
    return LoadedModel(folder.name, model.config, model, letters())


def export(model: LoadedModel, quantization: Quantization | None = None) -> ExportedWeights:
    return ExportedWeights(model, weight_form(CPU, model.model.dtype, quantization), "f" * 64)


def transfer(exported: ExportedWeights, manifest: Manifest) -> StreamedWeights:
    """Every part copied to empty memory, as a transfer does."""
    streamed = StreamedWeights(Parts.of(spec_from_json(manifest.config)))
    for i, part in enumerate(manifest.parts):
        tensors = empty_part(part)
        for tensor, given in zip(tensors, exported.tensors(i), strict=True):
            tensor_bytes(tensor)[:] = tensor_bytes(given)
        assert memory_checksum(tensors) == part.sum
        streamed.put(i, assemble(part, tensors, CPU))
    return streamed


def logits(model: torch.nn.Module) -> torch.Tensor:
    return ModelRunner(model, 2).forward(SPANS).logits  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_transferred_model_has_the_same_bits(
    folder: Path, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    source = loaded(folder, dtype, quantization)
    exported = export(source, quantization)
    manifest = exported.manifest
    manifest.check()
    assert manifest.weight_bytes == source.model.weight_bytes
    streamed = transfer(exported, manifest)
    received = StreamedModel(spec_from_json(manifest.config), CPU, dtype, streamed, manifest.weight_bytes)
    assert received.is_complete
    assert received.config == source.config
    assert torch.equal(logits(received), logits(source.model))
    again = ExportedWeights(LoadedModel("", received.config, received, letters()), exported.manifest.form, "f" * 64)
    assert [part.sum for part in again.manifest.parts] == [part.sum for part in manifest.parts]


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_parts_read_from_disk_equal_those_of_the_model(
    folder: Path, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    model = loaded(folder, dtype, quantization).model
    stored = CheckpointParts(open_checkpoint(folder), CPU, dtype, quantization)
    parts = Parts.of(model.config)
    for part in range(1, parts.count):
        expected, found = part_of(model, part), stored.read(part)
        assert found.keys() == expected.keys()
        for name, piece in expected.items():
            pairs = zip(piece_tensors(found[name]), piece_tensors(piece), strict=True)
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_a_pass_waits_for_each_layer_when_it_reaches_it(folder: Path) -> None:
    source = loaded(folder)
    whole = transfer(export(source), export(source).manifest)
    parts = whole.parts
    streamed = StreamedWeights(parts)
    order = [parts.layer(number) for number in range(parts.num_layers)]
    streamed.put(parts.tokenizer, {})
    streamed.put(parts.tables, whole.wait(parts.tables))
    model = StreamedModel(source.config, CPU, torch.float32, streamed, source.model.weight_bytes)
    assert model.weight_bytes == source.model.weight_bytes  # known before the layers are loaded
    exit_early = early_exit(ModelRunner(model, 2), 1)
    computed: list[torch.Tensor] = []
    runner = ModelRunner(model, 2)
    thread = threading.Thread(target=lambda: computed.append(runner.forward(SPANS).logits))
    thread.start()
    for part in order:
        thread.join(0.02)
        assert thread.is_alive(), f"the pass did not wait for {parts.name(part)}"
        streamed.put(part, whole.wait(part))
        keys = runner.cache[part - 2][0]  # the pass reaches this layer and stores its keys
        _wait_until(lambda keys=keys: bool(keys.any()))
        assert not any(bool(later[0].any()) for later in runner.cache[part - 1 :])
    thread.join(30)
    assert torch.equal(computed[0], logits(source.model))
    assert torch.equal(
        exit_early.forward(SPANS).logits, early_exit(ModelRunner(source.model, 2), 1).forward(SPANS).logits
    )


def test_a_pass_that_waits_for_a_missing_part_raises_the_error(folder: Path) -> None:
    source = loaded(folder)
    whole = transfer(export(source), export(source).manifest)
    streamed = StreamedWeights(whole.parts)
    streamed.put(whole.parts.tables, whole.wait(whole.parts.tables))
    model = StreamedModel(source.config, CPU, torch.float32, streamed, 0)
    failed: list[Exception] = []

    def compute() -> None:
        try:
            logits(model)
        except UnsupportedModel as error:
            failed.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    streamed.fail(UnsupportedModel("no more"))
    thread.join(30)
    assert [str(error) for error in failed] == ["no more"]
    assert not model.is_complete


def test_the_tokenizer_is_transferred() -> None:
    tokenizer = letters()
    copy = tokenizer_from_tensor(tokenizer_to_tensor(tokenizer))
    assert fingerprint(copy) == fingerprint(tokenizer)
    assert (copy.bos_id, copy.special_tokens, copy.chat_template) == (None, {}, None)
    assert copy.encode("abc") == tokenizer.encode("abc")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        tokenizer_from_tensor(torch.tensor([1, 2, 3], dtype=torch.uint8))


def test_an_invalid_manifest_is_rejected(folder: Path) -> None:
    good = export(loaded(folder)).manifest
    tensor = replace(good.parts[1].pieces[0].tensors[0], shape=(1 << 40,))
    piece = replace(good.parts[1].pieces[0], tensors=(tensor,))
    config = json.loads(good.config)
    for wrong in (
        replace(good, parts=good.parts[:-1]),
        replace(good, parts=(*good.parts[:-1], replace(good.parts[-1], pieces=good.parts[-1].pieces[1:]))),
        replace(good, parts=(*good.parts[:-1], PartForm((piece,), ""))),
        replace(
            good, parts=(*good.parts[:-1], PartForm((replace(piece, tensors=(replace(tensor, shape=(-1,)),)),), ""))
        ),
        replace(
            good, parts=(*good.parts[:-1], PartForm((replace(piece, tensors=(replace(tensor, dtype="bool"),)),), ""))
        ),
        replace(good, config="{}"),
        replace(good, config=json.dumps(config | {"rotary": [{"kind": "Exec"}]})),
    ):
        with pytest.raises(UnsupportedModel):
            wrong.check()


def test_configurations_survive_json(folder: Path) -> None:
    config = open_checkpoint(folder).config
    assert spec_from_json(spec_to_json(config)) == config


def test_packed_tensors_too_small_for_native_code_are_rejected() -> None:
    weight = PackedWeight(Grouped(torch.zeros(40, 64, dtype=torch.uint8), torch.ones(40, 2), torch.ones(40, 2), 32))
    copy = PackedWeight.of(weight.form, weight.tensors)
    assert (copy.shape, copy.nbytes) == (weight.shape, weight.nbytes)
    dense = PackedWeight(Dense(torch.zeros(3, 5)))
    assert PackedWeight.of(dense.form, dense.tensors).shape == (3, 5)
    for form, tensors in (
        (weight.form, ()),
        (replace(weight.form, outputs=80), weight.tensors),
        (replace(weight.form, inputs=128), weight.tensors),
        (replace(weight.form, group=16), weight.tensors),
        (replace(weight.form, has_half_scales=False), weight.tensors),
        (replace(weight.form, format=9), weight.tensors),
        (PackedForm(0, 0, 0, 32, True, True), weight.tensors),
        (weight.form, (*weight.tensors, weight.tensors[1])),
    ):
        with pytest.raises(ValueError, match=r"do not match|does not describe"):
            PackedWeight.of(form, tensors)


def _wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("the condition was not met within 30 seconds")
