"""The rejection rule: accept x with probability min(1, p(x)/q(x)), replace the first rejected token from max(0, p - q).

Siblings are tried in draft order against the remainder of earlier siblings. With one-hot `q` a rejected token is zeroed in `p`.
With tokens drawn without replacement `p` becomes max(0, p - q) and `q` loses the token; `p` and `q` are renormalised.
Acceptance uniforms are keyed by position and token, the last token by noise of its own stream. Math is in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.speculation.distribution import log_distribution
from paceline.speculation.drafts import Draft
from paceline.speculation.rows import Purpose, RowContext, gumbel, uniform

Outcome = tuple[list[int], Tensor]
"""Accepted nodes, and the weights [V] that the token after them is drawn from."""


def walk_all(
    logits: Tensor, rounds: Sequence[tuple[Sequence[RowContext], Draft]]
) -> list[tuple[list[int], int, Tensor]]:
    """(accepted nodes, next token, p of its rows) per sequence; the rows are consecutive in logits [R, V]."""
    p = log_distribution(logits, [row for rows, _ in rounds for row in rows]).exp_()
    nodes = [
        (rows[parent + 1].key, token)
        for rows, draft in rounds
        for token, parent in zip(draft.tokens, draft.parents, strict=True)
    ]
    uniforms: list[float] = uniform([key for key, _ in nodes], Purpose.ACCEPT, [token for _, token in nodes]).tolist()
    outcomes: list[Outcome | None] = [None] * len(rounds)
    chains: list[_Chain] = []
    ps: list[Tensor] = []
    row, node = 0, 0
    for i, (rows, draft) in enumerate(rounds):
        ps.append(p[row : row + len(rows)])
        if draft.is_chain:
            chains.append(_Chain(i, draft, row, uniforms[node : node + len(draft)]))
        else:
            outcomes[i] = _walk_tree(draft, ps[i], uniforms[node : node + len(draft)])
        row, node = row + len(rows), node + len(draft)
    for chain, outcome in zip(chains, _walk_chains(chains, p), strict=True):
        outcomes[chain.index] = outcome
    done = [outcome for outcome in outcomes if outcome is not None]
    keys = [rows[path[-1] + 1 if path else 0].key for (rows, _), (path, _) in zip(rounds, done, strict=True)]
    noise = gumbel(keys, Purpose.RECOVER, logits.shape[1], logits.device)
    # argmax(log w + G) needs no normalised weights
    tokens: list[int] = noise.add_(torch.stack([weights for _, weights in done]).log_()).argmax(1).tolist()
    return [(path, token, own) for (path, _), token, own in zip(done, tokens, ps, strict=True)]


@dataclass(frozen=True, slots=True)
class _Chain:
    index: int
    """Index of the round."""
    draft: Draft
    row: int
    """First row in p."""
    uniforms: list[float]


def _walk_chains(chains: Sequence[_Chain], p: Tensor) -> list[Outcome]:
    """All chains at once: p(x) and q(x) of every node are read together, and the remainders computed together."""
    if not chains:
        return []
    vocab_size, device = p.shape[1], p.device
    rows = torch.tensor([chain.row + i for chain in chains for i in range(len(chain.draft))], device=device)
    tokens = torch.tensor([token for chain in chains for token in chain.draft.tokens], device=device)
    px: list[float] = p[rows.long(), tokens.long()].tolist()
    qs = [chain.draft.q(vocab_size) for chain in chains]
    qx: list[float] = []
    for chain, q in zip(chains, qs, strict=True):
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
    for weights, chain, path, q in zip(left, chains, paths, qs, strict=True):
        if len(path) == len(chain.draft):
            continue  # bonus: p itself
        if q is None:
            weights[chain.draft.tokens[len(path)]] = 0.0
        else:
            weights.sub_(q[len(path)].to(device)).clamp_(min=0.0)
    # p and q differ only by rounding: the remainder is empty, so p itself is used
    empty = (left.sum(1) == 0).nonzero().squeeze(1)
    left[empty] = p[ends[empty]]
    return list(zip(paths, left, strict=True))


def _accepts(u: float, px: float, qx: float) -> bool:
    """u < p(x)/q(x). u < 1, so p == q always accepts. q(x) = 0 never accepts: x was not drawn from q."""
    return qx > 0.0 and u * qx < px


def _walk_tree(draft: Draft, p: Tensor, uniforms: Sequence[float]) -> Outcome:
    """(accepted nodes, weights [V] of the next token) from p [1 + len(draft), V]."""
    path: list[int] = []
    while True:
        node = path[-1] if path else -1
        children = draft.children(node)
        left = p[node + 1]
        q = _q_of(draft, children[0], left) if children else None
        for child in children:
            x = draft.tokens[child]
            px, qx = float(left[x]), 1.0 if q is None else float(q[x])
            if _accepts(uniforms[child], px, qx):
                path.append(child)
                break
            rest, q = _without(x, left, q)
            mass = float(rest.sum())
            if mass == 0.0:
                return path, left  # p and q differ only by rounding: the remainder is empty
            left = rest.div_(mass)
        else:
            return path, left


def _q_of(draft: Draft, node: int, like: Tensor) -> Tensor | None:
    """[V] distribution of the node and its siblings; None for one-hot."""
    if draft.probs is None:
        return None
    row = draft.rows.start + node
    return draft.probs.dense(slice(row, row + 1), len(like))[0].to(like.device)


def _without(x: int, left: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The remainders of p (not normalised) and of q after x was rejected."""
    if q is None:
        rest = left.clone()
        rest[x] = 0.0
        return rest, None
    rest = (left - q).clamp_(min=0.0)
    q = q.clone()
    q[x] = 0.0
    return rest, q.div_(q.sum().clamp_(min=torch.finfo(q.dtype).tiny))
