"""The command line: `main` runs it, `app` is its commands."""

from gdp.cli.app import app, main

__all__ = ["app", "main"]
