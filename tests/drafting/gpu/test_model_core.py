"""The draft backend on a GPU, or with interpreted GPU kernels, drafts what the same model drafts on the CPU."""

import threading

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.drafting.model import ModelDraftBackend
from paceline.drafting.state import DraftBranch
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.models.runner.runner import ModelRunner
from paceline.speculation.proposers.model.model_drafter import SequenceParams
from tests.fakes import TINY, tiny_model
from tests.specs import changed

SMALL = changed(TINY, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, ffn_size=16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def core(runner_kind, device):
    size = SMALL.vocab_size
    return ModelDraftBackend(runner_kind(tiny_model(config=SMALL, device=device), 64), 64, size, size)


def branch(number, ids, committed):
    params = SequenceParams(SamplingParams(temperature=1.0), 5, 0, 1, "coupled", "")
    return DraftBranch(number, params, list(ids), committed)


def draft(one, branches, count):
    for _ in range(count):
        for each, drafted in zip(branches, one.step(branches), strict=True):
            each.ids.append(drafted.token)
    return [list(each.ids) for each in branches]


def forked(one, length, count=3):
    """Draft a prompt, fork two branches, draft all three together, then truncate the first and continue it."""
    prompt = [(7 * i) % 40 for i in range(length)]
    main = branch(0, prompt, length)
    texts = draft(one, [main], count)
    children = [branch(n, [*prompt, *main.ids[length : length + 1], token], length) for n, token in ((1, 39), (2, 38))]
    for child in children:
        one.fork(main, child)
    texts += draft(one, [main, *children], count)
    one.close(children)
    one.truncate(main, length + 1)
    main.ids += [37, 36]
    main.num_committed = len(main.ids)
    texts += draft(one, [main], count)
    one.close([main])
    return texts


@pytest.mark.parametrize("length", [5, 15, 16])
def test_fork_and_truncate(length):
    assert forked(core(GpuRunner, DEVICE), length) == forked(core(ModelRunner, "cpu"), length)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are captured on a GPU only")
def test_no_graph_is_captured_after_warm_up():
    one = core(GpuRunner, DEVICE)
    one.warm_up(max_num_seqs=3, window=64)
    count = len(one.drafter.runner._graphs)
    assert forked(one, 15) == forked(core(ModelRunner, "cpu"), 15)
    assert len(one.drafter.runner._graphs) == count > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="streams exist on a GPU only")
def test_two_cores_run_concurrently():
    """Each core captures graphs on its own stream while the other computes."""
    expected = [forked(core(ModelRunner, "cpu"), length, 8) for length in (5, 20)]
    found = [[], []]

    def work(i, length):
        one = core(GpuRunner, DEVICE)
        for _ in range(20):
            found[i].append(forked(one, length, 8))

    threads = [threading.Thread(target=work, args=(i, length)) for i, length in enumerate((5, 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert found == [[text] * 20 for text in expected]
