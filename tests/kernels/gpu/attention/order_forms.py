"""Attention of the same rows in many forms of passes, and copies of the kernels with a planted fault."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from paceline.kernels.formats.layout import LongPrompt
from paceline.kernels.gpu import attention
from paceline.kernels.gpu.attention import paged, prompts
from paceline.kernels.gpu.attention.plan import attention_plan, ragged_plan
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE

PAGE = 16
HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 32, 0.2
LONGEST = 4096
_PACKAGE = attention.__name__


class Rows:
    """The last `count` rows of a sequence of `length` tokens, whose keys and values are cached."""

    def __init__(
        self,
        length: int,
        count: int,
        seed: int = 0,
        window: int | None = None,
        has_sinks: bool = False,
        cache_dtype: torch.dtype | None = None,
        kernels: ModuleType = paged,
    ) -> None:
        g = generator(seed)
        blocks, dtype = -(-length // PAGE) + 6, torch.bfloat16
        self.length, self.count, self.window = length, count, window
        self.table = torch.randperm(blocks, generator=g).to(torch.int32).to(DEVICE)[None]
        shape = blocks, PAGE, KV_HEADS, WIDTH
        self.cache = [torch.randn(shape, generator=g).to(cache_dtype or dtype).to(DEVICE) for _ in range(2)]
        self.q = (3 * torch.randn(count, HEADS, WIDTH, generator=g)).to(DEVICE, dtype)
        self.sinks = torch.randn(HEADS, generator=g).to(DEVICE, dtype) if has_sinks else None
        self.kernels = kernels

    def pass_over(
        self,
        first: int = 0,
        count: int | None = None,
        splits: int = 1,
        tile: int | None = None,
        ancestors: Sequence[int] | None = None,
    ) -> Tensor:
        """[count, HEADS * WIDTH]: rows from `first` on, in one pass."""
        count = self.count - first if count is None else count
        plan = attention_plan(
            count, 1, count, HEADS, KV_HEADS, WIDTH, LONGEST, DEVICE, splits, tile=tile, is_tree=ancestors is not None
        )
        context = self.length - self.count + first
        marks = None if ancestors is None else torch.tensor(ancestors, device=DEVICE)
        query = self.q[first : first + count]
        out = torch.empty(count, HEADS * WIDTH, device=DEVICE)  # float32, to see differences that a model rounds away
        where = ints(0, count), ints(context), self.table
        self.kernels.paged_attention(query, *self.cache, *where, plan, SCALE, marks, self.window, out, sinks=self.sinks)
        assert not plan.counters.any()
        return out

    def one_by_one(self, rows: Sequence[int], splits: int = 1) -> Tensor:
        """Plain decoding, one row after another."""
        return torch.cat([self.pass_over(row, 1, splits) for row in rows])

    def in_pieces(self, size: int, splits: int = 1) -> Tensor:
        firsts = range(0, self.count, size)
        return torch.cat([self.pass_over(first, min(size, self.count - first), splits) for first in firsts])

    def as_long_prompt(self) -> Tensor:
        out = torch.empty(self.count, HEADS * WIDTH, device=DEVICE)
        prompt = LongPrompt(0, 0, self.count, self.length - self.count)
        prompts.attend_long_prompt(self.q, *self.cache, self.table, prompt, SCALE, out)
        return out

    def path_decoded(self, path: Sequence[int]) -> Tensor:
        """Plain decoding of the last node of a path, whose keys follow the context."""
        context, moved = self.length - self.count, Rows.__new__(Rows)
        vars(moved).update(vars(self), cache=[part.clone() for part in self.cache])
        table = self.table[0].tolist()
        for depth, node in enumerate(path):
            (source, target) = ((table[index // PAGE], index % PAGE) for index in (context + node, context + depth))
            for part, original in zip(moved.cache, self.cache, strict=True):
                part[target] = original[source]
        moved.q, moved.count, moved.length = self.q[path[-1] : path[-1] + 1], 1, context + len(path)
        return moved.pass_over()


def together(sequences: Sequence[Rows], splits: int, num_decoding: int = 0) -> list[Tensor]:
    """All sequences in one ragged pass. The first `num_decoding` have one row, and the pass is planned for that."""
    counts = [each.count for each in sequences]
    shape = HEADS, KV_HEADS, WIDTH, LONGEST, DEVICE
    if num_decoding:
        plan = ragged_plan(sum(counts), len(counts), *shape, num_decoding=num_decoding)
    else:
        plan = attention_plan(sum(counts), len(counts), max(counts), *shape, splits)
    sizes = [len(each.cache[0]) for each in sequences]
    tables = torch.zeros(len(sequences), max(sizes), dtype=torch.int32, device=DEVICE)
    for s, each in enumerate(sequences):
        tables[s, : sizes[s]] = each.table[0] + sum(sizes[:s])
    cache = [torch.cat([each.cache[part] for each in sequences]) for part in range(2)]
    starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
    contexts = [each.length - each.count for each in sequences]
    q, out = torch.cat([each.q for each in sequences]), torch.empty(sum(counts), HEADS * WIDTH, device=DEVICE)
    paged.paged_attention(q, *cache, ints(*starts), ints(*contexts), tables, plan, SCALE, out=out)
    return list(out.split(counts))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def planted(folder: Path, module: str, *changes: tuple[str, str]) -> ModuleType:
    """`paged.py` of a copy of the kernels in which `module` is changed."""
    name = f"planted_{folder.name.replace('-', '_')}"
    target = folder / name
    target.mkdir()
    (target / "__init__.py").touch()
    names = ("order", "states", "kernels", "trees", "paged")
    for each in names:
        text = (Path(paged.__file__).parent / f"{each}.py").read_text()
        if each == module:
            for old, new in changes:
                assert text.count(old) == 1, old
                text = text.replace(old, new)
        for other in names:
            text = text.replace(f"{_PACKAGE}.{other} ", f"{name}.{other} ")
        (target / f"{each}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.paged")
    finally:
        sys.path.remove(str(folder))
