"""The rejection rule: accept x with probability min(1, p(x)/q(x)), replace the first rejected token from max(0, p - q).

Siblings are tried in drafting order against what earlier ones left over: with one-hot `q` a rejected token is zeroed in
`p`; with tokens drawn without replacement `p` becomes max(0, p - q) and `q` loses the token; both are renormalised.
Acceptance uniforms are keyed by position and token, the last token by noise of its own stream. Math is in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.speculation.drafts import Draft
from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.noise import Purpose, gumbel, uniform
from paceline.speculation.verification.rows import RowContext

Outcome = tuple[list[int], Tensor]
"""Accepted nodes, and the weights [V] that the token after them is drawn from."""


def walk_all(
    logits: Tensor, rounds: Sequence[tuple[Sequence[RowContext], Draft]]
) -> list[tuple[list[int], int, Tensor]]:
    """(accepted nodes, token that follows, p of its rows) per sequence, whose rows lie one after the other in logits [R, V]."""
    p = log_distribution(logits, [row for rows, _ in rounds for row in rows]).exp_()
    nodes = [
        (rows[parent + 1].key, token)
        for rows, draft in rounds
        for token, parent in zip(draft.tokens, draft.parents, strict=True)
    ]
    uniforms: list[float] = uniform([key for key, _ in nodes], Purpose.ACCEPT, [token for _, token in nodes]).tolist()
    outcomes: list[Outcome | None] = [None] * len(rounds)
    chains: list[_Chain] = []
    laws: list[Tensor] = []
    row, node = 0, 0
    for i, (rows, draft) in enumerate(rounds):
        laws.append(p[row : row + len(rows)])
        if draft.is_chain:
            chains.append(_Chain(i, draft, row, uniforms[node : node + len(draft)]))
        else:
            outcomes[i] = _walk_tree(draft, laws[i], uniforms[node : node + len(draft)])
        row, node = row + len(rows), node + len(draft)
    for chain, outcome in zip(chains, _walk_chains(chains, p), strict=True):
        outcomes[chain.index] = outcome
    done = [outcome for outcome in outcomes if outcome is not None]
    keys = [rows[path[-1] + 1 if path else 0].key for (rows, _), (path, _) in zip(rounds, done, strict=True)]
    noise = gumbel(keys, Purpose.RECOVER, logits.shape[1], logits.device)
    # argmax(log w + G) does not ask for weights that sum to one
    tokens: list[int] = noise.add_(torch.stack([weights for _, weights in done]).log_()).argmax(1).tolist()
    return [(path, token, law) for (path, _), token, law in zip(done, tokens, laws, strict=True)]


@dataclass(frozen=True, slots=True)
class _Chain:
    index: int
    """Which of the rounds."""
    draft: Draft
    row: int
    """Its first row in p."""
    uniforms: list[float]


def _walk_chains(chains: Sequence[_Chain], p: Tensor) -> list[Outcome]:
    """All chains at once: one look at p(x) and q(x) of every node, one subtraction for all that were rejected."""
    if not chains:
        return []
    vocab_size, device = p.shape[1], p.device
    rows = torch.tensor([chain.row + i for chain in chains for i in range(len(chain.draft))], device=device)
    tokens = torch.tensor([token for chain in chains for token in chain.draft.tokens], device=device)
    px: list[float] = p[rows.long(), tokens.long()].tolist()
    laws = [chain.draft.q(vocab_size) for chain in chains]
    qx: list[float] = []
    for chain, q in zip(chains, laws, strict=True):
        if q is None:
            qx.extend([1.0] * len(chain.draft))
        else:
            qx.extend(q[range(len(chain.draft)), list(chain.draft.tokens)].tolist())
    paths, start = [], 0
    for chain in chains:
        count = 0
        while count < len(chain.draft) and _accepts(chain.uniforms[count], px[start + count], qx[start + count]):
            count += 1
        paths.append(list(range(count)))
        start += len(chain.draft)
    ends = torch.tensor([chain.row + len(path) for chain, path in zip(chains, paths, strict=True)], device=device)
    left = p[ends]  # [C, V], a copy
    for weights, chain, path, q in zip(left, chains, paths, laws, strict=True):
        if len(path) == len(chain.draft):
            continue  # bonus: p itself
        if q is None:
            weights[chain.draft.tokens[len(path)]] = 0.0
        else:
            weights.sub_(q[len(path)].to(device)).clamp_(min=0.0)
    # p and q differ by rounding alone: nothing is left, so p itself will do
    empty = (left.sum(1) == 0).nonzero().squeeze(1)
    left[empty] = p[ends[empty]]
    return list(zip(paths, left, strict=True))


def _accepts(u: float, px: float, qx: float) -> bool:
    """u < p(x)/q(x). u < 1, so p == q always accepts; q(x) = 0 was never drawn from q, so it never does."""
    return qx > 0.0 and u * qx < px


def _walk_tree(draft: Draft, p: Tensor, uniforms: Sequence[float]) -> Outcome:
    """(accepted nodes, weights [V] of the token that follows) from p [1 + len(draft), V]."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        children = draft.children(node)
        left = p[node + 1]
        law = _law(draft, children[0], left) if children else None
        for child in children:
            x = draft.tokens[child]
            px, qx = float(left[x]), 1.0 if law is None else float(law[x])
            if _accepts(uniforms[child], px, qx):
                path.append(child)
                break
            rest, law = _without(x, left, law)
            mass = float(rest.sum())
            if mass == 0.0:
                return path, left  # p and q differ by rounding alone: nothing is left to subtract from
            left = rest.div_(mass)
        else:
            return path, left


def _law(draft: Draft, node: int, like: Tensor) -> Tensor | None:
    """[V] what the node and its siblings were drawn from; None for one-hot."""
    if draft.probs is None:
        return None
    row = draft.rows.start + node
    return draft.probs.dense(slice(row, row + 1), len(like))[0].to(like.device)


def _without(x: int, left: Tensor, law: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What remains of p (not normalised) and of q after x was rejected."""
    if law is None:
        rest = left.clone()
        rest[x] = 0.0
        return rest, None
    rest = (left - law).clamp_(min=0.0)
    law = law.clone()
    law[x] = 0.0
    return rest, law.div_(law.sum().clamp_(min=torch.finfo(law.dtype).tiny))
