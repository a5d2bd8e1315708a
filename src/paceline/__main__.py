"""`python -m paceline` is `paceline`."""

from paceline.cli.main import app

app()
