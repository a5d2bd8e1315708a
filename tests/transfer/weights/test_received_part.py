"""A part that arrives in chunks of any order has the bytes that were sent, on the host and through buffers to a device."""

import random

import pytest
import torch

from paceline.models.manifest.manifest import PartForm, PieceForm, TensorForm
from paceline.models.memory.memory import memory_checksum
from paceline.transfer.weights import peers as received_part
from paceline.transfer.weights.peers import MAX_BUFFERS, HostPart, StagedPart
from paceline.transfer.weights.sources import chunk_ranges

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_staged", [False, True])
def test_chunks_in_any_order(is_staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.transfer.weights.sources.CHUNK_BYTES", 64)
    monkeypatch.setattr(received_part, "CHUNK_BYTES", 64)
    sent = [torch.randn(40, 7), torch.empty(0), torch.randn(3).to(torch.bfloat16)]
    forms = tuple(TensorForm(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in sent)
    form = PartForm((PieceForm("a", "quantized", forms),), "")
    chunks = chunk_ranges(forms)
    part = StagedPart(form, chunks, CPU) if is_staged else HostPart(form, chunks)
    indices = list(range(len(chunks)))
    random.Random(0).shuffle(indices)
    while indices:  # several at once, as in a fetch
        arriving, indices = indices[:3], indices[3:]
        buffers = {index: part.get_buffer(index) for index in arriving}
        for index, buffer in buffers.items():
            tensor, start, end = chunks[index]
            buffer[:] = sent[tensor].view(-1).view(torch.uint8)[start:end].numpy().data
            part.copy(index)
    assert all(map(torch.equal, part.tensors, sent))
    assert part.checksum() == memory_checksum(sent)
    if isinstance(part, StagedPart):
        assert len(chunks) > part._num_buffers == MAX_BUFFERS
