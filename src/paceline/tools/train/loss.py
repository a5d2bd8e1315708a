"""The training loss: KL(p || q) through the target's frozen head, without the logits of a whole batch in memory.

Logits (tokens x vocabulary) are far larger than everything else in a step. They are computed for a few thousand rows at a
time, together with the gradient of the hidden states:

    d KL(p || softmax(W h)) / d h = W^T (q - p)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.tools.train.drafts import Draft
from paceline.tools.train.layers import DraftVocabulary
from paceline.tools.train.target import States, Target

CHUNK_ELEMENTS = 1 << 28
"""Logits in memory at a time: 1 GB in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class SoftLoss:
    kl: Tensor  # [U], the weighted mean over rows; differentiable
    agreement: Tensor  # [U], the weighted share of rows where the two arg-maxes agree


def soft_loss(students: Tensor, teacher: Tensor, head: Tensor, weights: Tensor, compiled: bool = False) -> SoftLoss:
    """The loss of `students` [U, N, D] against `teacher` [N, D], each through `head` [V, D]. `weights` [U, N] are float32."""
    kl, agreement = _SoftLoss.apply(students, teacher, head, weights, _compiled() if compiled else _compare)  # type: ignore[no-untyped-call]
    return SoftLoss(kl, agreement)


class _SoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, students: Tensor, teacher: Tensor, head: Tensor, weights: Tensor, compare: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        shares = weights / weights.sum(1, keepdim=True).clamp(min=1e-9)  # [U, N]
        gradient = torch.zeros(students.shape, dtype=head.dtype, device=students.device)
        kl, agreement = torch.zeros(2, len(students), device=students.device)
        rows = max(1, CHUNK_ELEMENTS // len(head))
        for start in range(0, len(teacher), rows):
            part = slice(start, start + rows)
            log_p = (teacher[part].to(head.dtype) @ head.T).float().log_softmax(-1)
            for u in range(len(students)):
                logits = students[u, part].to(head.dtype) @ head.T
                losses, agrees, slope = compare(logits, log_p, shares[u, part])
                kl[u] += losses
                agreement[u] += agrees
                gradient[u, part] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.dtype = students.dtype
        ctx.mark_non_differentiable(agreement)
        return kl, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0][:, None, None]).to(ctx.dtype), None, None, None, None


def _compare(logits: Tensor, log_p: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted KL, weighted agreement, dKL/dlogits [n, V]) of `n` rows."""
    log_q, p = logits.float().log_softmax(-1), log_p.exp()
    losses = (p * (log_p - log_q)).sum(-1)
    agrees = logits.argmax(-1) == log_p.argmax(-1)
    return (losses * shares).sum(), (agrees * shares).sum(), (log_q.exp() - p) * shares[:, None]


_compiled_compare: list[Callable[..., Any]] = []


def _compiled() -> Callable[..., Any]:
    if not _compiled_compare:
        _compiled_compare.append(torch.compile(_compare, dynamic=True))
    return _compiled_compare[0]


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    total: Tensor  # scalar, differentiable
    kl: Tensor  # [U]
    agreement: Tensor  # [U]: estimate of alpha by depth


def compute_loss(
    draft: Draft,
    target: Target,
    head: Tensor,
    vocabulary: DraftVocabulary,
    states: States,
    compiled: bool = False,
    trained: Tensor | None = None,
) -> Loss:
    """The loss of a draft. `head` is `vocabulary.head(target.head)`. User and assistant text have the same weight, unless
    `trained` [B, S] selects the tokens to predict.

    With a reduced vocabulary p is renormalised over it, and rows followed by a token outside it are excluded.
    """
    objective = draft.objective
    predictions = draft.predict(target, states, objective.depth)
    depth, length = len(predictions.hidden), states.ids.shape[1]
    rows = torch.arange(length, device=states.ids.device)
    inside = F.pad(vocabulary.contains(states.ids[:, 1:]), (0, 1), value=True)  # row j is followed by token j+1
    first = torch.tensor(predictions.first, device=rows.device)
    if trained is not None:
        inside &= F.pad(trained[:, 1:], (0, 1), value=False)
    weights = ((rows >= first[:, None])[:, None] & inside[None]).float()  # [U, B, S]

    # Kinds that read hidden states exclude row 0: its state depends on the first token only.
    students, teacher = predictions.hidden.flatten(1, 2), states.last.flatten(0, 1)
    shares = weights.flatten(1)
    if trained is not None:  # the head is most of the cost: rows without weight skip it
        used = inside.flatten().nonzero()[:, 0]
        students, teacher, shares = students[:, used], teacher[used], shares[:, used]
    soft = soft_loss(students, teacher, head, shares, compiled)
    discount = objective.decay ** torch.arange(depth, device=rows.device)
    return Loss((discount * soft.kl).sum(), soft.kl.detach(), soft.agreement)
