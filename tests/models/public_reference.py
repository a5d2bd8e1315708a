"""The logits of published heads in plain torch, from the papers' code: one sequence, no cache, every slot computed again."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from paceline.models.decoder.forward import DecoderModel
from tests.models.reference_heads import feed_forward, norm, rotate, table, target_states
from tests.public_heads import HD, HEADS, KV, MASK, PublicHead

EPS, THETA = 1e-5, 10_000.0


def eagle_logits(head: PublicHead, target: DecoderModel, ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
    """[V'] after the drafted tokens `path`, which follow the committed tokens `ids`."""
    inner, last = target_states(target, ids, head.states)
    rows = len(ids) - 1
    has = head.flags.__contains__
    if has("eagle1"):
        states = last[:rows]
    else:
        parts = [inner[layer][:rows] for layer in head.states]
        if has("fc_norm"):
            parts = [norm(part, head.weight(f"fc_norm.{i}.weight"), EPS) for i, part in enumerate(parts)]
        joined = torch.cat(parts, 1)
        if has("norm_before_fc"):
            joined = norm(joined, head.weight("input_norm.weight"), EPS)
        states = joined @ head.weight("fc.weight").T
    own = head.names("embed_tokens.weight")
    embedding = head.tensors[own] if own in head.tensors and not has("eagle1") else table(target.embedding)
    tokens = [*ids[1:], *path]
    while True:
        out = _layers(head, embedding[tokens[: len(states)]], states)
        if len(states) == len(tokens):
            break
        states = torch.cat((states, out[-1:]))
    if has("norm_output"):
        return _output(head, target, out[-1])
    return _output(head, target, out[-1] if has("eagle1") else norm(out[-1], head.weight("norm.weight"), EPS))


def _layers(head: PublicHead, embedded: Tensor, states: Tensor) -> Tensor:
    """The states of the next slots [T, D]."""
    has = head.flags.__contains__
    if has("eagle1"):
        x = torch.cat((embedded, states), 1) @ head.weight("fc.weight").T
        x = x + head.weight("fc.bias") if "fc.bias" in head.tensors else x
        entered = x
    else:
        normed = norm(states, head.weight("layers.0.hidden_norm.weight"), EPS)
        entered = torch.cat((norm(embedded, head.weight("layers.0.input_layernorm.weight"), EPS), normed), 1)
        x = normed if has("norm_before_residual") else states
    number = 0
    while head.names(f"layers.{number}.self_attn.q_proj.weight") in head.tensors:
        if number:
            entered = norm(x, head.weight(f"layers.{number}.input_layernorm.weight"), EPS)
        x = x + _attend(head, f"layers.{number}.self_attn", entered)
        middle = norm(x, head.weight(f"layers.{number}.post_attention_layernorm.weight"), EPS)
        names = [f"layers.{number}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        x = x + feed_forward(middle, {name: head.weight(name) for name in names}, f"layers.{number}.mlp")
        number += 1
    return norm(x, head.weight("norm.weight"), EPS) if has("norm_output") else x


def _attend(head: PublicHead, prefix: str, x: Tensor) -> Tensor:
    positions, parts = torch.arange(len(x)), {}
    for part, count in (("q", HEADS), ("k", KV), ("v", KV)):
        values = x @ head.weight(f"{prefix}.{part}_proj.weight").T
        bias, normed = f"{prefix}.{part}_proj.bias", head.names(f"{prefix}.{part}_norm.weight")
        values = (values + head.tensors[bias] if bias in head.tensors else values).unflatten(1, (count, HD))
        parts[part] = norm(values, head.tensors[normed], EPS) if normed in head.tensors else values
    q, k = rotate(parts["q"], positions, THETA), rotate(parts["k"], positions, THETA)
    k, v = (values.repeat_interleave(HEADS // KV, 1) for values in (k, parts["v"]))
    scores = torch.einsum("thd,shd->hts", q, k) / HD**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
    return attended @ head.weight(f"{prefix}.o_proj.weight").T


def _output(head: PublicHead, target: DecoderModel, normed: Tensor) -> Tensor:
    name = head.names("lm_head.weight")
    return normed @ (head.tensors[name] if name in head.tensors else table(target.head)).T


def medusa_logits(head: PublicHead, target: DecoderModel, ids: Sequence[int]) -> Tensor:
    """[H, V'] after the committed tokens."""
    _, last = target_states(target, ids, ())
    logits, state, number = [], last[len(ids) - 1], 0
    while True:
        h, layer = state, 0
        while (name := _medusa_layer(head, number, layer)) is not None:
            bias = head.tensors.get(f"{name}.bias", torch.zeros(len(h)))
            h, layer = h + silu(h @ head.tensors[f"{name}.weight"].T + bias), layer + 1
        if layer == 0:
            return torch.stack(logits)
        output = f"lm_heads.{number}.weight" if head.form == "medusa_vllm" else f"{number}.{layer}.weight"
        logits.append(h @ head.tensors[output].T)
        number += 1


def _medusa_layer(head: PublicHead, number: int, layer: int) -> str | None:
    name = f"blocks.{number}.layers.{layer}" if head.form == "medusa_vllm" else f"{number}.{layer}.linear"
    return name if f"{name}.weight" in head.tensors else None


def block_drafts(head: PublicHead, target: DecoderModel, ids: Sequence[int]) -> tuple[list[int], Tensor]:
    """The greedy tokens of a block after the committed tokens, and their logits [K, V']."""
    inner, _ = target_states(target, ids, head.states)
    joined = torch.cat([inner[layer][: len(ids) - 1] for layer in head.states], 1)
    context = norm(joined @ head.weight("fc.weight").T, head.weight("hidden_norm.weight"), EPS)
    size = head.config.get("block_size") or head.config["dflash_config"]["block_size"]
    own = head.tensors.get("embed_tokens.weight", table(target.embedding))
    x = own[[ids[-1], *[MASK] * (size - 1)]]
    for number in range(sum(name.endswith("input_layernorm.weight") for name in head.tensors)):
        prefix = f"layers.{number}"
        entered = norm(x, head.weight(f"{prefix}.input_layernorm.weight"), EPS)
        x = x + _block_attention(head, f"{prefix}.self_attn", context, entered)
        middle = norm(x, head.weight(f"{prefix}.post_attention_layernorm.weight"), EPS)
        names = [f"{prefix}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        x = x + feed_forward(middle, {name: head.weight(name) for name in names}, f"{prefix}.mlp")
    rows = norm(x, head.weight("norm.weight"), EPS)[0 if "predicts next" in head.flags else 1 :]
    base, tokens, logits, state = _output(head, target, rows), [], [], None
    columns, previous = token_ids(head), ids[-1]
    for row, hidden in zip(base, rows, strict=True):
        bias, state = _markov_bias(head, previous, hidden, state)
        logits.append(row + bias)
        best = int(logits[-1].argmax())
        previous = best if columns is None else columns[best]
        tokens.append(previous)
    return tokens, torch.stack(logits)


def _block_attention(head: PublicHead, prefix: str, context: Tensor, x: Tensor) -> Tensor:
    """Every row of the block attends to the context and to the whole block."""
    both, first = torch.cat((context, x)), len(context)
    q, k, v = (
        (values @ head.weight(f"{prefix}.{part}_proj.weight").T).unflatten(1, (count, HD))
        for part, values, count in (("q", x, HEADS), ("k", both, KV), ("v", both, KV))
    )
    positions = torch.arange(len(both))
    q = rotate(norm(q, head.weight(f"{prefix}.q_norm.weight"), EPS), positions[first:], THETA)
    k = rotate(norm(k, head.weight(f"{prefix}.k_norm.weight"), EPS), positions, THETA)
    k, v = (values.repeat_interleave(HEADS // KV, 1) for values in (k, v))
    weights = (torch.einsum("thd,shd->hts", q, k) / HD**0.5).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1) @ head.weight(f"{prefix}.o_proj.weight").T


def _markov_bias(
    head: PublicHead, previous: int, hidden: Tensor, state: Tensor | None
) -> tuple[Tensor | float, Tensor | None]:
    if "markov_head.markov_w1.weight" not in head.tensors:
        return 0.0, None
    before = head.weight("markov_head.markov_w1.weight")[previous]
    if "gated" in head.flags:
        gate = head.weight("markov_head.gate_proj.weight") @ torch.cat((hidden, before))
        before = before * (gate + head.weight("markov_head.gate_proj.bias")).sigmoid()
    if "rnn" in head.flags:
        state = torch.zeros_like(before) if state is None else state
        joint = head.weight("markov_head.joint_proj.weight") @ torch.cat((state, before, hidden))
        gate, candidate, output = (joint + head.weight("markov_head.joint_proj.bias")).chunk(3)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        before = output.tanh()
    return head.weight("markov_head.markov_w2.weight") @ before, state


def token_ids(head: PublicHead) -> list[int] | None:
    """The target's token of each column. None if it is the number of the column."""
    if "token_map" in head.tensors:
        return head.tensors["token_map"].tolist()
    if "d2t" in head.tensors:
        return (torch.arange(len(head.tensors["d2t"])) + head.tensors["d2t"]).tolist()
    return None
