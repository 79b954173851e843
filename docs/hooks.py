"""Hooks of MkDocs: write the references of commands and of JSON keys, and find docstrings of public names."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

PLACE, KEYS = "<!-- commands -->", "<!-- keys -->"
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+(benchmarks/[^)#]*)(?:#[^)]*)?\)")  # a link to a file that is no page


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts in the commands for PLACE, tables for KEYS, paths for links to results, and modules for `::: gdp.NAME`."""
    if PLACE in markdown:
        markdown = markdown.replace(PLACE, "\n".join(_commands()))
    if KEYS in markdown:
        sys.path.append(str(Path(__file__).parent))
        import json_documents

        markdown = markdown.replace(KEYS, "\n".join(json_documents.tables()))
    markdown = _OUTSIDE.sub(r"\1 (`\2`)", markdown)
    return re.sub(r"^::: gdp\.(\w+)$", _public_name, markdown, flags=re.MULTILINE)


def _public_name(match: re.Match[str]) -> str:
    """Returns the directive with the module that defines the name."""
    import gdp

    name = match[1]
    options = (f"heading: gdp.{name}", f"toc_label: {name}")
    return "\n      ".join((f"::: {getattr(gdp, name).__module__}.{name}\n    options:", *options))


def _commands() -> Iterator[str]:
    from gdp.cli import app

    yield from _command("gdp", typer.main.get_command(app), depth=1)


def _command(name: str, command: Any, depth: int) -> Iterator[str]:
    """Yields the lines of a section for a command and its subcommands."""
    subcommands = getattr(command, "commands", {})
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    required = [f"{param.opts[0]} {param.metavar or param.name.upper()}" for param in options if param.required]
    usage = [name, *(param.metavar or param.name.upper() for param in arguments), *required]
    if any(not param.required for param in options):
        usage.append("[OPTIONS]")
    if subcommands:
        usage.append("COMMAND")
    if depth > 1:
        yield from ("", f"{'#' * depth} {name}", "", " ".join((command.help or "").split()), "")
    yield from ("```text", " ".join(usage), "```", "")
    rows = [_row(param) for param in (*arguments, *options)]
    if rows:
        yield from ("| argument | meaning | default |", "|---|---|---|", *rows, "")
    for child, below in sorted(subcommands.items()) if depth > 1 else subcommands.items():
        yield from _command(f"{name} {child}", below, depth + 1)


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
    elif isinstance(param.default, bool) or param.secondary_opts:
        name = "/".join((*param.opts, *param.secondary_opts))
    else:
        name = f"{param.opts[0]} {param.metavar or param.name.upper()}"
    if param.required:
        default = "required"
    else:
        is_shown = not isinstance(param.default, bool) and param.default not in (None, (), [], "")
        default = f"`{param.default}`" if is_shown else ""
    cells = (f"`{name}`", param.help or "", default)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
