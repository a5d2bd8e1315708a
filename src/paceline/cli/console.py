"""Where the commands print: answers on standard output, everything about them on standard error."""

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """One red line."""
    err.print(f"error: {message}", style="bold red", markup=False, soft_wrap=True)
