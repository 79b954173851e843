"""Runs the pages of the documentation: the code blocks of a page, in order, in one directory.

```console              bash runs each line after `$ ` (lines after `> ` continue it); the lines below are its output on
                        both streams, and `...` stands for any lines
```python               Python executes it; all blocks of a page share one process
```text title="Output"  the output of the Python block before it
```text                 is not run and must not be code
```LANGUAGE title="NAME"  any other language: written to the file NAME

A comment on the line before a block has its options:

<!-- status=3 -->       the exit status; 0 otherwise
<!-- times=vary -->     times depend on the machine, so they are not compared
<!-- run=long -->       only `make test-long` runs the block; the page must run without it, too
<!-- unrun="WHY" -->    nothing runs the block, for this reason; commands are parsed, Python is compiled

`gdp` and Python are forks of one process (doc_server.py).

<!-- gdp report PLAN --figure PATH -->    a command on a line of its own that makes the picture PATH, from the same run

python tests/doc_pages.py [--only-quick] docs/PAGE.md ...     runs pages and rewrites the output and pictures they show
"""

import ast
import atexit
import contextlib
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

from markdown_it import MarkdownIt
from PIL import Image

ANY = "..."
INDENTED = "indented"
TOLERANCE = 0.05  # of step times; docs/index.md states it
_NUMBER = re.compile(r"(?:(?<!\S)[+-])?\d[\d,.]*")
_TIME = re.compile(r"(\d[\d,.]*) (ms|us)\b")
_NS = {"us": 1e3, "ms": 1e6}
_PASSING = ("gdp: [", "The machine was busy before the run")  # true here and now
_TIMEOUT = 300  # seconds of one command
_PROGRAMS = r"gdp|python3?|pip|make|torchrun|pytest|git|docker"
_ROOT = Path(__file__).parents[1]
_SOURCE = os.pathsep.join((str(_ROOT / "src"), str(_ROOT)))  # the benchmarks run in a checkout
_SERVER = Path(__file__).with_name("doc_server.py")
_COMMAND = re.compile(rf"(?:\$ \S|(?:\.venv/bin/)?(?:{_PROGRAMS}) [\w.-])")


@cache
def _client() -> list[str]:
    """Starts the server of this process and returns the command that asks it."""
    directory = tempfile.TemporaryDirectory(prefix="gdp-pages-")
    path = Path(directory.name) / "socket"
    environment = {**os.environ, "PYTHONPATH": _SOURCE, "NO_COLOR": "1"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, str(_SERVER), "serve", str(number)]
        server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[number])
    atexit.register(directory.cleanup)
    atexit.register(server.communicate)  # ends its input, and with it the server
    return [sys.executable, "-S", str(_SERVER), str(path)]


class PageError(AssertionError):
    """A page shows something that does not happen."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code; its content begins at `line`, counted from 1."""

    language: str
    content: str
    line: int
    options: dict[str, str]

    @property
    def title(self) -> str | None:
        return self.options.get("title")

    @property
    def is_long(self) -> bool:
        return self.options.get("run") == "long"

    @property
    def is_run(self) -> bool:
        return "unrun" not in self.options and not (self.language == "text" and self.title is None)


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the output that the page shows for it, from `line` on."""

    text: str
    printed: tuple[str, ...]
    line: int


def read_blocks(page: Path) -> list[Block]:
    """Returns the blocks of `page`; the language of an indented block is INDENTED."""
    blocks = []
    comment = ""  # on the line before a block
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "code_block":
            blocks.append(Block(INDENTED, token.content, line, {}))
        if token.type == "fence":
            language, _, rest = token.info.strip().partition(" ")
            pairs = re.findall(r'(\w+)=(?:"([^"]*)"|(\S+))', f"{comment} {rest}")
            options = {key: quoted or bare for key, quoted, bare in pairs}
            blocks.append(Block(language, token.content, line + 1, options))
        comment = token.content if token.type == "html_block" else ""
    return blocks


def check_block(block: Block, page: Path) -> None:
    """Raises PageError unless `block` can be run, gives a reason for not being run, or is no code."""
    where = f"{page}:{block.line}"
    unknown = set(block.options) - {"title", "status", "times", "run", "unrun"}
    if unknown:
        raise PageError(f"{where}: {', '.join(sorted(unknown))} means nothing here")
    if block.options.get("run", "long") != "long":
        raise PageError(f"{where}: run={block.options['run']}; long is the only value")
    if "unrun" in block.options and len(block.options["unrun"].split()) < 3:
        raise PageError(f"{where}: unrun is to say why the block is not run")
    if block.language == INDENTED:
        raise PageError(f"{where}: an indented block is not run; fence it")
    if block.language == "console":
        read_commands(block)
    elif block.language == "python" and not block.is_run:
        ast.parse(block.content)
    elif block.language == "text" and block.title is None and _is_code(block.content):
        raise PageError(f"{where}: a text block is not run, and this is code; make it console or python")
    elif block.language not in ("python", "text") and block.title is None:
        raise PageError(f"{where}: a block of {block.language or 'nothing'} without a title is not run")


def _is_code(text: str) -> bool:
    """Returns True for Python and for text with a command."""
    if any(_COMMAND.match(line.strip()) for line in text.splitlines()):
        return True
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, (ast.Assign, ast.Call, ast.Import, ast.ImportFrom)) for node in ast.walk(tree))


def read_commands(block: Block) -> list[Command]:
    """Returns the commands of a console block."""
    commands: list[Command] = []
    lines = block.content.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("$ "):
            raise PageError(f"line {block.line + at}: a console block begins with '$ '")
        text = [lines[at][2:]]
        while text[-1].endswith("\\") or (at + 1 < len(lines) and lines[at + 1].startswith("> ")):
            at += 1
            text.append(lines[at].removeprefix("> "))
        at += 1
        end = next((i for i in range(at, len(lines)) if lines[i].startswith("$ ")), len(lines))
        commands.append(Command("\n".join(text), tuple(lines[at:end]), block.line + at))
        at = end
    return commands


@dataclass
class Session:
    """Runs the blocks of a page in `directory`; pages share captured graphs through `graphs`."""

    directory: Path
    graphs: Path
    _python: "subprocess.Popen[str] | None" = field(default=None, init=False)
    output: str = field(default="", init=False)  # of the last Python block

    def __enter__(self) -> Self:
        own = self.directory / ".own"
        (own / "bin").mkdir(parents=True)
        (own / "cache" / "gdp").mkdir(parents=True)
        (own / "cache" / "gdp" / "graphs").symlink_to(self.graphs)
        gdp = own / "bin" / "gdp"
        gdp.write_text(f'#!/bin/sh\nexec {shlex.join(_client())} gdp "$@"\n')
        gdp.chmod(0o755)
        path = os.pathsep.join((str(own / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
        cache = str(own / "cache")
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": _SOURCE, "XDG_CACHE_HOME": cache, "NO_COLOR": "1"}
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._python.communicate()  # its input ends

    def run(self, block: Block, page: Path) -> list[tuple[Command, list[str]]]:
        """Runs `block` and returns its commands with their output.

        PageError: an exit status or the output of a Python block is not the one shown.
        """
        check_block(block, page)
        if not block.is_run:
            return []
        if block.language == "console":
            return [(command, self._run_command(command, block, page)) for command in read_commands(block)]
        if block.language == "text":
            with_times = block.options.get("times") != "vary"
            where = f"{page}:{block.line}"
            compare(block.content.splitlines(), self.output.splitlines(), where, with_times=with_times)
        elif block.title is not None:
            path = self.directory / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content)
        else:
            self.output = self._run_python(block, page)
        return []

    def _run_command(self, command: Command, block: Block, page: Path) -> list[str]:
        where = f"{page}:{command.line - 1}: {command.text}"
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=self.directory,
            env=self.environment,
            text=True,
            timeout=_TIMEOUT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        status = int(block.options.get("status", 0))
        if done.returncode != status:
            raise PageError(f"{where}\nexit status {done.returncode}, not {status}\n{done.stdout}")
        return [line for line in done.stdout.splitlines() if not line.startswith(_PASSING)]

    def _run_python(self, block: Block, page: Path) -> str:
        if self._python is None:
            self._python = subprocess.Popen(
                [*_client(), "python"],
                cwd=self.directory,
                env=self.environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        label = f"{page}:{block.line}"
        self._python.stdin.write(json.dumps({"content": block.content, "label": label}) + "\n")
        self._python.stdin.flush()
        printed, failed = json.loads(self._python.stdout.readline())
        if failed:
            raise PageError(f"{label}\n{printed}{failed}")
        return str(printed)


def check(page: Path, directory: Path, graphs: Path, *, with_long: bool = True) -> None:
    """Runs all of `page`, or all but its long blocks. Raises PageError if its output is not the one shown."""
    with Session(directory, graphs) as session:
        for block in read_blocks(page):
            if block.is_long and not with_long:
                check_block(block, page)
                continue
            for command, printed in session.run(block, page):
                where = f"{page}:{command.line}: {command.text}"
                compare(command.printed, printed, where, with_times=block.options.get("times") != "vary")
        for path, content in _pictures(page, session):
            if not _shows_same(path.read_bytes(), content):
                raise PageError(f"{page}: {path.name} is no longer what its command makes; make pictures renews it")


def _shows_same(one: bytes, other: bytes) -> bool:
    """Returns whether two PNG files have the same pixels."""
    pixels = [Image.open(io.BytesIO(content)).convert("RGBA") for content in (one, other)]
    return pixels[0] == pixels[1]


def _pictures(page: Path, session: Session) -> Iterator[tuple[Path, bytes]]:
    """Yields the path of each picture with a command in `page`, and what the command makes now."""
    for words, name in re.findall(r"^<!-- (gdp .*--figure) (\S+) -->$", page.read_text(), re.MULTILINE):
        made = session.directory / f"picture{Path(name).suffix}"
        command = ["bash", "-c", f"{words} {made}"]
        subprocess.run(
            command, cwd=session.directory, env=session.environment, timeout=_TIMEOUT, capture_output=True, check=True
        )
        yield page.parent / name, made.read_bytes()


def compare(shown: Sequence[str], printed: Sequence[str], where: str, *, with_times: bool = True) -> None:
    """Raises PageError unless `printed` equals `shown`.

    Numbers, blank lines, widths of columns and the lines under `...` may differ; step times by at most TOLERANCE.
    """
    try:
        for expected, line in _matched(shown, printed):
            if with_times:
                _compare_times(expected, line)
    except PageError as error:
        text = "\n".join(("", "shown:", *shown, "", "printed:", *printed))
        raise PageError(f"{where}\n{error}{text}") from None


def _masked(line: str) -> str:
    return " ".join(_NUMBER.sub("0", re.sub("─+", "─", line)).split())


def _matched(shown: Sequence[str], printed: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each line of `shown` with the printed line that equals it but for numbers."""
    lines = [line for line in printed if line.strip()]
    at, is_free = 0, False
    for expected in shown:
        if not expected.strip():
            continue
        if expected.strip() == ANY:
            is_free = True
            continue
        candidates = range(at, len(lines)) if is_free else range(at, min(at + 1, len(lines)))
        match = next((i for i in candidates if _masked(lines[i]) == _masked(expected)), None)
        if match is None:
            raise PageError(f"is not printed: {expected}")
        yield expected, lines[match]
        at, is_free = match + 1, False
    if at < len(lines) and not is_free:
        raise PageError(f"is not shown: {lines[at]}")


def _compare_times(expected: str, line: str) -> None:
    pairs = zip(_times_ns(expected), _times_ns(line), strict=True)
    if any(abs(one - other) > TOLERANCE * max(one, other) for one, other in pairs):
        raise PageError(f"times differ by more than {TOLERANCE:.0%}: {expected} | {line}")


def _times_ns(line: str) -> list[float]:
    return [float(number.replace(",", "")) * _NS[unit] for number, unit in _TIME.findall(line)]


# Writing pages


def rewritten(page: Path, directory: Path, graphs: Path, *, with_long: bool = True) -> str:
    """Returns `page` with the present output of its commands: the lines shown if they are still printed, else all."""
    lines = page.read_text().splitlines()
    changes: list[tuple[Command, list[str]]] = []
    with Session(directory, graphs) as session:
        for block in read_blocks(page):
            if block.is_long and not with_long:
                continue
            if block.is_run and block.language == "text":
                shown = Command("", tuple(block.content.splitlines()), block.line)
                changes.append((shown, session.output.splitlines()))
            else:
                changes += session.run(block, page)
        for path, content in _pictures(page, session):
            path.write_bytes(content)
    for command, printed in reversed(changes):
        start = command.line - 1
        lines[start : start + len(command.printed)] = _updated(command.printed, printed)
    return "\n".join(lines) + "\n"


def _updated(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    matches: list[tuple[str, str]] = []
    with contextlib.suppress(PageError):
        matches.extend(_matched(shown, printed))
        present = iter(matches)
        return [line if not line.strip() or line.strip() == ANY else next(present)[1] for line in shown]
    return list(printed)


def main(words: Sequence[str]) -> None:
    with_long = "--only-quick" not in words
    for page in (Path(word) for word in words if word != "--only-quick"):
        with tempfile.TemporaryDirectory() as directory:
            graphs = Path(directory) / "graphs"
            graphs.mkdir()
            where = Path(directory) / "page"
            where.mkdir()
            page.write_text(rewritten(page, where, graphs, with_long=with_long))


if __name__ == "__main__":
    main(sys.argv[1:])
