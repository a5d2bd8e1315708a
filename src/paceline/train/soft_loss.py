"""KL(p || q) through a frozen head, without ever holding the logits of a whole batch.

Logits of a batch are far larger than everything else in a step (tokens x vocabulary). They are made for a few thousand
rows at a time, and the gradient of the hidden states is taken on the spot:

    d KL(p || softmax(W h)) / d h = W^T (q - p)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 28
"""Logits held at a time: 1 GB in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class SoftLoss:
    kl: Tensor  # [U], the weighted mean over rows; differentiable
    agreement: Tensor  # [U], the weighted share of rows where both arg-maxes agree


def soft_loss(students: Tensor, teacher: Tensor, head: Tensor, weights: Tensor, compiled: bool = False) -> SoftLoss:
    """`students` [U, N, D] against `teacher` [N, D], both read by `head` [V, D]; `weights` [U, N] float32."""
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


_kept: list[Callable[..., Any]] = []


def _compiled() -> Callable[..., Any]:
    if not _kept:
        _kept.append(torch.compile(_compare, dynamic=True))
    return _kept[0]
