"""Command line: `main` runs it, `app` has its commands."""

from gdp.cli.app import app, main

__all__ = ["app", "main"]
