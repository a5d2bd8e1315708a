"""The checks of a cluster file as a whole: models, ranks, drafts, keys, and memory by device. No weights are loaded.

`python -m paceline.cli.doctor_cluster` is the process of `check_before_start`: it reads the cluster from standard input and
writes its problems.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from paceline.cli.doctor_checks import Check, CheckResult, ModelSketch, describe, describe_draft, sketch
from paceline.cli.workers import UNSOUND
from paceline.core.cluster_config import ClusterConfig
from paceline.core.config import EngineConfig
from paceline.core.errors import IncompatibleDraft, InvalidConfig, PacelineError, UnsupportedModel
from paceline.core.machine import GIB, available_memory
from paceline.core.pool_config import PoolConfig
from paceline.engine.sizing import device_facts, size_engine
from paceline.engine.start import pick_device, pick_dtype
from paceline.model_files.hub import pick_draft
from paceline.model_files.tokenizer import check_compatible, describe_mismatch, fingerprint
from paceline.models.drafts import DraftFolder, find_draft
from paceline.models.heads import distilled_config
from paceline.models.loading import LoadedModel
from paceline.models.shards import check_split, shard_config
from paceline.wire.keys import KEY_ROLE_OF, KeyFolder


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory of one worker on each of its devices."""

    name: str
    devices: tuple[str, ...]
    needed_bytes: int
    budget_bytes: int


def require_sound(config: ClusterConfig) -> None:
    """Raise `InvalidConfig` with every problem of the cluster."""
    problems = [check for check in check_cluster(config) if check.verdict is CheckResult.PROBLEM]
    if problems:
        lines = [f"{check.name}: {check.found}{f' ({check.advice})' if check.advice else ''}" for check in problems]
        raise InvalidConfig("this cluster cannot start; " + "; ".join(lines))


def check_cluster(config: ClusterConfig) -> Iterator[Check]:
    """Check the settings, and the devices and memory of this machine. With `ray` the workers run elsewhere, so devices and
    memory are not checked."""
    yield Check(
        "cluster",
        f"{config.name}: {', '.join(f'{pool.name} ({pool.replicas} {pool.role})' for pool in config.pools)}, "
        + (f"on Ray at {config.ray}" if config.ray is not None else "on this machine"),
    )
    if config.keys is not None:
        yield _keys(config)
    targets: dict[str, ModelSketch] = {}
    """Target models that can be opened, by name."""
    memory: list[WorkerMemory] = []
    for pool in sorted(config.pools, key=lambda pool: pool.role == "draft"):  # drafts are compared with the targets
        try:
            yield from _check_pool(config, pool, targets, memory)
        except UnsupportedModel as error:
            if config.ray is None:
                yield Check.problem(pool.name, str(error))
            else:  # the nodes of Ray may have it
                yield Check.note(pool.name, f"not checked: {error}", "run paceline doctor where the model is")
        except PacelineError as error:
            yield Check.problem(pool.name, str(error))
    if config.ray is not None:
        yield Check.note(
            "memory", "not checked: Ray chooses the machines", "run paceline doctor on a node of each kind"
        )
        return
    yield from _check_devices(memory)


def _keys(config: ClusterConfig) -> Check:
    assert config.keys is not None
    folder = KeyFolder(Path(config.keys))
    try:
        folder.key_pair("gateway")
        for role in {KEY_ROLE_OF[pool.role] for pool in config.pools}:
            folder.server_security(role)
    except PacelineError as error:
        return Check.problem("keys", str(error))
    return Check("keys", f"{folder.path}: a pair for every role of this cluster")


def _check_pool(
    config: ClusterConfig, pool: PoolConfig, targets: dict[str, ModelSketch], memory: list[WorkerMemory]
) -> Iterator[Check]:
    """The pool's model, its ranks and drafts. Adds the target to `targets` and its workers to `memory`."""
    if pool.engine != "paceline":
        yield Check(pool.name, f"{pool.model} on {pool.engine}, which checks models and memory itself")
        return
    engines = {name: engine for name, engine in config.engines().items() if name in pool.worker_names}
    first = pool.devices[0] if pool.devices else "auto"
    device = torch.device("cpu") if config.ray is not None else pick_device(first)
    folder = find_draft(pool.model) if pool.role == "draft" else None
    if folder is None:
        model = sketch(pool.model, device, pick_dtype(pool.dtype, device), pool.quantization != "none")
    else:
        model = _distilled(folder, targets)
    yield Check(pool.name, f"{describe(model)}; {_split(model, pool)}")
    if pool.role == "target":
        targets[pool.model] = model
        yield from _check_head(pool, model)
    elif pool.role == "draft":
        yield _fits(pool, model, targets)
    if config.ray is None:
        for name, engine in engines.items():
            try:
                memory.append(_worker_memory(pool, name, engine, model, pick_device(engine.device)))
            except PacelineError as error:
                yield Check.problem(name, str(error))


def _split(model: ModelSketch, pool: PoolConfig) -> str:
    """Heads and the ranks that share them. Raises `InvalidConfig` if they cannot be divided."""
    shape, ranks = model.config, pool.tensor_parallel_size
    check_split(shape, ranks)
    heads = f"{shape.num_heads} heads, {shape.num_kv_heads} key-value heads"
    return heads if ranks == 1 else f"{heads}, {shape.num_heads // ranks} heads on each of {ranks} ranks"


def _distilled(folder: DraftFolder, targets: dict[str, ModelSketch]) -> ModelSketch:
    """A distilled draft with its target's embedding and head. Raises `IncompatibleDraft` if it fits no target."""
    if folder.kind != "distilled":
        raise IncompatibleDraft(
            f"{folder.name} ({folder.kind}) drafts from hidden states of the target: set it as `draft` of the target pool"
        )
    target = distilled_target(folder, targets)
    shape = distilled_config(folder.config, target.config)
    tables = 2 * shape.vocab_size * target.config.hidden_size * target.model.dtype.itemsize
    weights = replace(target.model, weight_bytes=folder.weights.file_bytes + tables)
    return ModelSketch(folder.name, shape, weights, target.tokenizer)


def distilled_target(folder: DraftFolder, targets: dict[str, ModelSketch]) -> ModelSketch:
    """The first target that the draft was trained for. If it fits no target, raises the `IncompatibleDraft` of the last
    target."""
    reason = IncompatibleDraft(f"{folder.name} needs a target pool whose model can be opened")
    for name, target in targets.items():
        try:
            describe_draft(folder, name, target)
        except IncompatibleDraft as error:
            reason = error
        else:
            return target
    raise reason


def _check_head(pool: PoolConfig, target: ModelSketch) -> Iterator[Check]:
    """The draft that runs in the workers of a target pool."""
    name = pick_draft(pool.draft, pool.model)
    if name is None:
        return
    head = find_draft(name)
    if head is None:
        draft = sketch(name, torch.device("cpu"), target.model.dtype)
        warning = check_compatible(target.tokenizer, draft.tokenizer)
        if warning is not None:
            yield Check.note(f"{pool.name} draft", describe(draft), warning)
        else:
            yield Check(f"{pool.name} draft", describe(draft))
    else:
        what = describe_draft(head, pool.model, target)
        yield Check(f"{pool.name} draft", f"{head.name}: {what}, trained for {head.target_name}")


def _fits(pool: PoolConfig, draft: ModelSketch, targets: dict[str, ModelSketch]) -> Check:
    """Target models that the pool drafts for. A problem unless there is one."""
    fitting: list[str] = []
    reasons: list[str] = []
    warnings: list[str] = []
    for name, target in targets.items():
        try:
            warning = check_compatible(target.tokenizer, draft.tokenizer)
        except IncompatibleDraft as error:
            reasons.append(f"{name}: {error}")
            continue
        mismatch = describe_mismatch(fingerprint(target.tokenizer), fingerprint(draft.tokenizer))
        if mismatch is not None:
            reasons.append(f"{name}: {mismatch}; a draft worker needs the whole vocabulary of its target")
            continue
        fitting.append(target.name)
        if warning is not None:
            warnings.append(f"{name}: {warning}")
    label = f"{pool.name} fits"
    if fitting:
        others = f"; refused by {len(reasons)} other model{'s' if len(reasons) > 1 else ''}" if reasons else ""
        found = f"{', '.join(fitting)}: same tokens{others}"
        return Check.note(label, found, "; ".join(warnings)) if warnings else Check(label, found)
    if not targets:
        return Check.note(label, "not checked: no target model can be opened", "correct the target pools first")
    return Check.problem(label, "; ".join(reasons))


def _worker_memory(
    pool: PoolConfig, name: str, engine: EngineConfig, model: ModelSketch, device: torch.device
) -> WorkerMemory:
    """Raises `OutOfMemory` if the worker does not fit into its share of a device."""
    ranks = pool.tensor_parallel_size
    if ranks > 1:
        if device.type == "cuda" and (last := (device.index or 0) + ranks - 1) >= torch.cuda.device_count():
            raise InvalidConfig(
                f"tensor_parallel_size {ranks} needs cuda:{last}, and there are {torch.cuda.device_count()} GPUs: lower it"
            )
        model = replace(
            model,
            config=shard_config(model.config, ranks),
            model=replace(model.model, weight_bytes=model.model.weight_bytes // ranks),
        )
    fit = size_engine(engine, cast(LoadedModel, model), None, device).memory
    needed = fit.budget_bytes - fit.free_bytes
    draft = pick_draft(engine.draft, engine.model) if pool.role == "target" else None
    if draft is not None and (head := find_draft(draft)) is not None:
        needed += head.weights.file_bytes
    if device.type == "cpu":
        return WorkerMemory(name, ("cpu",), needed * ranks, fit.budget_bytes * ranks)
    first = device.index or 0
    return WorkerMemory(name, tuple(f"cuda:{first + rank}" for rank in range(ranks)), needed, fit.budget_bytes)


def _check_devices(memory: list[WorkerMemory]) -> Iterator[Check]:
    """One line per device, with what its workers need and what the device has."""
    for device in sorted({device for worker in memory for device in worker.devices}):
        workers = [worker for worker in memory if device in worker.devices]
        parts = " + ".join(f"{worker.name} {worker.needed_bytes / GIB:.2f}" for worker in workers)
        needed, total = sum(worker.needed_bytes for worker in workers), device_facts(torch.device(device)).memory_bytes
        free = available_memory() if device == "cpu" else int(torch.cuda.mem_get_info(torch.device(device))[0])
        found = f"{parts} = {needed / GIB:.2f} GiB of {total / GIB:.2f}"
        if needed > total:
            largest = max(workers, key=lambda worker: worker.needed_bytes)
            advice = f"{largest.name} needs most: lower its kv_tokens, max_model_len or replicas, or use another device"
            yield Check.problem(device, found, advice)
        elif free is not None and needed > free:
            yield Check.note(device, f"{found}, {free / GIB:.2f} GiB free now", "close other programs first")
        else:
            yield Check(device, found)


def main() -> int:
    import msgspec

    try:
        require_sound(msgspec.json.decode(sys.stdin.buffer.read(), type=ClusterConfig))
    except InvalidConfig as error:
        print(error, end="")
        return UNSOUND
    return 0


if __name__ == "__main__":
    sys.exit(main())
