"""Draft workers with a distilled draft load the target's embedding and head, without its layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.cluster_config import ClusterConfig, cluster_config
from paceline.core.errors import IncompatibleDraft, InvalidConfig
from paceline.drafting.model import load_draft_model
from paceline.engine.sizing.sizing import size_engine
from paceline.models.drafts.load import find_draft, load_draft
from paceline.models.loading.load import load_model
from paceline.models.runner.runner import ModelRunner, Span
from paceline.transfer.weights.loader import WeightManager
from paceline.wire.worker_spec import WorkerSpec, worker_specs
from tests.engine.start.test_build import save_checkpoint
from tests.heads import draft_config, draft_tensors, save_draft

CPU = torch.device("cpu")


def settings(folder: Path, kind: str) -> ClusterConfig:
    target = save_checkpoint(folder / "target")
    shape = draft_config(load_model(target).model, kind)
    pools = [
        {"name": "target", "role": "target", "model": target},
        {"name": "draft", "role": "draft", "model": save_draft(folder / kind, shape, draft_tensors(shape))},
    ]
    return cluster_config({"name": "test", "state_dir": str(folder), "pools": pools})


def draft_spec(config: ClusterConfig) -> WorkerSpec:
    addresses = {"target-0": "tcp://127.0.0.1:0", "draft-0": "tcp://127.0.0.1:0"}
    return worker_specs(config, addresses, None)[1]


def logits(runner: ModelRunner) -> torch.Tensor:
    found = runner.forward([Span((0,), 0, (1, 2, 3, 4), 4)]).logits
    assert found is not None
    return found


def test_distilled_draft_equals_the_draft_inside_an_engine(tmp_path: Path) -> None:
    config = settings(tmp_path, "distilled")
    spec = draft_spec(config)
    weights = WeightManager(None, None)
    try:
        draft, tables = load_draft_model(spec, CPU, weights)
    finally:
        weights.close()
    target = load_model(config.targets[0].model)
    folder = find_draft(spec.engine.model)
    assert folder is not None
    in_engine = load_draft(folder, target)
    assert tables is not None
    assert tables.model.layers == []
    assert torch.equal(logits(ModelRunner(draft.model, 4)), logits(ModelRunner(in_engine.model, 4)))  # type: ignore[arg-type]
    fit = size_engine(spec.engine, tables, draft, CPU).memory
    assert fit.weight_bytes == draft.model.weight_bytes + tables.model.embedding.nbytes
    assert fit.kv_bytes_per_token == draft.config.kv_bytes_per_token(4)


def test_distilled_draft_is_not_quantised(tmp_path: Path) -> None:
    spec = draft_spec(settings(tmp_path, "distilled"))
    weights = WeightManager(None, None)
    try:
        with pytest.raises(InvalidConfig, match="leave out `quantization`"):
            load_draft_model(replace(spec, engine=replace(spec.engine, quantization="int8")), CPU, weights)
    finally:
        weights.close()


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_heads_are_rejected(kind: str, tmp_path: Path) -> None:
    weights = WeightManager(None, None)
    try:
        with pytest.raises(IncompatibleDraft, match="as `draft` of the target pool"):
            load_draft_model(draft_spec(settings(tmp_path, kind)), CPU, weights)
    finally:
        weights.close()
