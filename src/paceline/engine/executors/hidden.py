"""Hidden states of committed tokens, for proposers that draft from them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.engine.schedule import Schedule
from paceline.models.architectures.decoder import ForwardOutput
from paceline.models.row_states import HiddenStates
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import HiddenRequest, HiddenRows
from paceline.speculation.verification.verify import Verdict


def committed_hidden(
    plan: Schedule,
    drafts: Mapping[int, Draft],
    verdicts: Mapping[int, Verdict],
    output: ForwardOutput,
    wanted: Mapping[str, HiddenRequest],
) -> dict[int, HiddenRows]:
    """By sequence id, for sequences whose method is in `wanted`. Call it before commit: the rows of a sequence start at
    `num_computed`."""
    if not wanted:
        return {}
    rows: list[int] = []
    owners: list[tuple[int, str, int, slice]] = []  # sequence, method, first position, its part of `rows`
    first = 0
    for item in plan.items:
        sequence, draft, verdict = item.sequence, drafts.get(item.sequence.id), verdicts.get(item.sequence.id)
        if sequence.method in wanted and sequence.speculation.enabled:
            begin = len(rows)
            rows.extend(range(first, first + item.num_tokens))
            if verdict is not None:
                rows.extend(first + item.num_tokens + node for node in verdict.path)
            owners.append((sequence.id, sequence.method, sequence.num_computed, slice(begin, len(rows))))
        first += item.num_tokens + (len(draft) if draft else 0)
    if isinstance(output.hidden_by_layer, HiddenStates) and output.last_hidden is None:
        return {i: HiddenRows(start, output.hidden_by_layer.choose(rows[part]), None) for i, _, start, part in owners}
    return _states_of(owners, rows, output, wanted)


@torch.inference_mode()
def _states_of(
    owners: Sequence[tuple[int, str, int, slice]],
    rows: list[int],
    output: ForwardOutput,
    wanted: Mapping[str, HiddenRequest],
) -> dict[int, HiddenRows]:
    layers = {layer for wants in wanted.values() for layer in wants.layers}
    inner = {layer: _take(output.hidden_by_layer[layer], rows) for layer in layers}
    last = None if output.last_hidden is None else _take(output.last_hidden, rows)
    return {
        sequence_id: HiddenRows(
            start,
            {layer: inner[layer][part] for layer in wanted[method].layers},
            last[part] if last is not None and wanted[method].last else None,
        )
        for sequence_id, method, start, part in owners
    }


def _take(states: Tensor, rows: list[int]) -> Tensor:
    """states[rows]: a copy on a GPU, where a pass may reuse the memory of its outputs."""
    if states.is_cpu and rows and rows[-1] - rows[0] == len(rows) - 1:  # they increase
        return states[rows[0] : rows[-1] + 1]
    return states[torch.tensor(rows, dtype=torch.int64, device=states.device)]
