"""Checks commands of pages without running them.

`gdp` and the benchmarks parse their commands, `make` must have the target, `pytest` and `python` must find the file.
"""

import contextlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main
from markdown_it import MarkdownIt

from benchmarks.__main__ import NAMES, app_of
from doc_pages import INDENTED, read_blocks, read_commands
from gdp.cli import app

ROOT = Path(__file__).parents[1]
_PROGRAMS = ("gdp", "make", "pytest", "python", "python3", "torchrun")


class CommandError(AssertionError):
    """A command cannot be run as it is written."""


def command_lines(page: Path) -> Iterator[str]:
    """Yields the commands in blocks of `page`, fenced or indented: without prompts, continued lines as one."""
    for block in read_blocks(page):
        if block.language == "console":
            lines = [command.text for command in read_commands(block)]
        elif block.language == INDENTED:
            shown = block.content.splitlines()
            prompted = [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]
            lines = ["\n".join(prompted or shown)]
        else:
            continue
        for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
            text = line.strip().removeprefix(".venv/bin/")
            if text.split(" ")[0] in _PROGRAMS:
                yield text


def inline_commands(page: Path) -> Iterator[str]:
    """Yields the commands with arguments in the running text and the tables of `page`."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or ():
            words = child.content.split()
            if child.type == "code_inline" and len(words) > 1 and words[0] in _PROGRAMS:
                yield child.content


def check_command(text: str) -> None:
    """Raises CommandError unless `text` parses."""
    words = shlex.split(text, comments=True)
    end = next((at for at, word in enumerate(words) if word[0] in "|<>&"), len(words))
    words = words[:end]
    try:
        _check(words)
    except typer.TyperException as error:
        raise CommandError(f"{text}: {error.format_message()}") from None
    except CommandError as error:
        raise CommandError(f"{text}: {error}") from None


def _check(words: list[str]) -> None:
    program, *rest = words
    if program == "gdp":
        _check_words(rest, typer.main.get_command(app), "gdp")
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in rest:
            if "=" not in word and word not in targets:
                raise CommandError(f"Makefile has no target {word}")
    elif "-m" in rest and program != "pytest":
        module = rest.index("-m") + 1
        words = rest[module + 1 :]
        if rest[module] == "gdp":
            _check_words(words, typer.main.get_command(app), "gdp")
        elif rest[module] == "benchmarks":
            _check_words(
                words, typer.main.get_command(app_of([name for name in NAMES if name in words] or NAMES)), "benchmarks"
            )
    else:
        for word in rest:
            if word.endswith(".py") and not (ROOT / word).exists():
                raise CommandError(f"there is no {word}")


def _check_words(words: list[str], command: Any, name: str) -> None:
    while words and words[0] in getattr(command, "commands", {}):
        command, name = command.commands[words[0]], f"{name} {words[0]}"
        words = words[1:]
    if getattr(command, "commands", None) and not (words and words[0].startswith("--")):
        raise CommandError(f"{name} has no command {words[0] if words else 'without a name'}")
    with contextlib.suppress(typer.Exit):  # --help
        command.make_context(name, words)
