"""`python -m paceline.train`: the same as `paceline train`, with torch and the standard library alone."""

import argparse
import shlex
import sys
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.core.clock import WallClock
from paceline.core.errors import PacelineError
from paceline.train.card import read_record, table, write_card
from paceline.train.interrupt import INTERRUPTED, stop_on_interrupt
from paceline.train.plan import TrainPlan
from paceline.train.progress import PlainProgress
from paceline.train.run import train


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    progress = PlainProgress(WallClock())
    try:
        if given[:1] == ["card"]:
            for folder in given[1:]:
                write_card(Path(folder), read_record(Path(folder)), progress)
            return 0
        plan = TrainPlan(**vars(_parser().parse_args(given)))
        command = shlex.join(["python", "-m", "paceline.train", *given])
        with stop_on_interrupt(progress.note) as stop:
            record = train(plan, command, WallClock(), progress, stop)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if record is None:
        return INTERRUPTED
    print(table(record.judged or record.held_out, record.nodes))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paceline.train",
        description="Train a draft for a target. `card FOLDER…` renders the cards of trained drafts again.",
    )
    hints = get_type_hints(TrainPlan, include_extras=True)
    for entry in fields(TrainPlan):
        hint, words = get_args(hints[entry.name])
        kind, many = _value_type(hint)
        options: dict[str, Any] = {"help": words}
        if get_origin(kind) is Literal:
            parser.add_argument(entry.name, choices=get_args(kind), **options)
            continue
        if kind is bool:
            options |= {"action": argparse.BooleanOptionalAction, "default": entry.default}
        else:
            options |= {"type": kind, "metavar": "FILE" if kind is Path else "NUM" if kind in (int, float) else "TEXT"}
            options |= {"required": True} if entry.default is MISSING else {"default": entry.default}
            options |= {"action": _Append} if many else {}
        parser.add_argument(f"--{entry.name.replace('_', '-')}", **options)
    return parser


class _Append(argparse.Action):
    """Tuples grow; a default is never changed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


def _value_type(hint: Any) -> tuple[Any, bool]:
    """(type, may be given more than once)"""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not types.NoneType)
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return hint, False


if __name__ == "__main__":
    sys.exit(main())
