"""Runs of a prefix tree: consecutive blocks of one chain that the same holders have."""


class Run:
    """Chains that have all blocks of the run continue in one of its children, if they continue."""

    __slots__ = ("children", "holders", "keys", "orphans", "parent", "start")

    def __init__(self, keys: list[int], start: int, parent: "Run | None") -> None:
        self.keys, self.start, self.parent = keys, start, parent
        """`start` is the number of blocks before the first."""
        self.children: dict[int, Run] = {}
        """The runs that follow, by their first key."""
        self.holders = 0
        """The holders of every block up to the end of the run, as a bitmask."""
        self.orphans = 0
        """The holders of its blocks that lack a block before them, as a bitmask."""


def offset(run: Run, key: int) -> int:
    """Position of a block in its run. Most blocks that are asked for are the last or the first."""
    keys = run.keys
    if keys[-1] == key:
        return len(keys) - 1
    return keys.index(key)


def split(runs: dict[int, Run], run: Run, at: int) -> Run:
    """Divide the run before its block `at`; returns the first part. The smaller part becomes the new object."""
    keys, parent = run.keys, run.parent
    if 2 * at <= len(keys):
        first, rest = Run(keys[:at], run.start, parent), run
        rest.keys, rest.start, rest.parent = keys[at:], run.start + at, first
        if parent is not None:
            parent.children[keys[0]] = first
        moved = first
    else:
        first, rest = run, Run(keys[at:], run.start + at, run)
        rest.children, first.children = first.children, rest.children
        for child in rest.children.values():
            child.parent = rest
        del keys[at:]
        moved = rest
    first.children[rest.keys[0]] = rest
    moved.holders, moved.orphans = run.holders, run.orphans
    for key in moved.keys:
        runs[key] = moved
    return first


def merge(runs: dict[int, Run], run: Run) -> None:
    """Join the run with its only child, and with its parent whose only child it is, where they have the same holders."""
    if len(run.children) == 1:
        [child] = run.children.values()
        if child.holders == run.holders and child.orphans == run.orphans:
            run = _join(runs, run, child)
    parent = run.parent
    if (
        parent is not None
        and len(parent.children) == 1
        and parent.holders == run.holders
        and parent.orphans == run.orphans
    ):
        _join(runs, parent, run)


def _join(runs: dict[int, Run], first: Run, rest: Run) -> Run:
    if len(first.keys) >= len(rest.keys):
        for key in rest.keys:
            runs[key] = first
        first.keys += rest.keys
        first.children = rest.children
        for child in first.children.values():
            child.parent = first
        return first
    for key in first.keys:
        runs[key] = rest
    rest.keys = first.keys + rest.keys
    rest.start, rest.parent = first.start, first.parent
    if rest.parent is not None:
        rest.parent.children[rest.keys[0]] = rest
    return rest


def prune(runs: dict[int, Run], run: Run) -> None:
    """Take a run without blocks in `runs` out of the tree, and those before it that then have neither holders nor children."""
    parent = run.parent
    while parent is not None:
        del parent.children[run.keys[0]]
        if parent.holders or parent.orphans or parent.children:
            merge(runs, parent)
            return
        for key in parent.keys:
            del runs[key]
        run, parent = parent, parent.parent
