"""``python -m keyshard``."""

from keyshard.cli import app

app()
