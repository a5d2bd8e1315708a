"""From guesses to one number to go down: the loss that every kind of draft is trained with."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.train.drafts.draft import Draft
from paceline.train.drafts.reduced_vocab import DraftVocabulary
from paceline.train.drafts.target import States, Target
from paceline.train.soft_loss import soft_loss


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    total: Tensor  # scalar, differentiable
    kl: Tensor  # [U]
    agreement: Tensor  # [U]: alpha by depth in the making


def loss_of(
    draft: Draft, target: Target, head: Tensor, vocabulary: DraftVocabulary, states: States, compiled: bool = False
) -> Loss:
    """`head` is `vocabulary.head(target.head)`, sliced once for all steps. User and assistant text count alike.

    Under a reduced vocabulary p is renormalised over it, and rows that continue with a token outside it are left out.
    """
    objective = draft.objective
    guesses = draft.guess(target, states, objective.depth)
    depth, length = len(guesses.hidden), states.ids.shape[1]
    rows = torch.arange(length, device=states.ids.device)
    inside = F.pad(vocabulary.contains(states.ids[:, 1:]), (0, 1), value=True)  # row j is followed by token j+1
    first = torch.tensor(guesses.first, device=rows.device)
    weights = ((rows >= first[:, None])[:, None] & inside[None]).float()  # [U, B, S]

    # Row 0 is left out by all kinds that look at hidden states: nothing but the first token made it.
    students, teacher = guesses.hidden.flatten(1, 2), states.last.flatten(0, 1)
    soft = soft_loss(students, teacher, head, weights.flatten(1), compiled)
    discount = objective.decay ** torch.arange(depth, device=rows.device)
    terms = soft.kl
    if objective.feature_weight:
        # In units of the teacher's own size, so that the weight means the same for every target.
        size = states.last.float().square().mean().sqrt()
        away = F.smooth_l1_loss(
            guesses.hidden / size, (states.last / size)[None].expand_as(guesses.hidden).float(), reduction="none"
        )
        terms = terms + objective.feature_weight * _mean(away.mean(-1), weights)
    return Loss((discount * terms).sum(), soft.kl.detach(), soft.agreement)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    """[U, B, S] -> [U]"""
    return (values * weights).sum((1, 2)) / weights.sum((1, 2)).clamp(min=1e-9)
