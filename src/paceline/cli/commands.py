"""The Typer application with all commands."""

from paceline.cli.application import application

cli = application()
