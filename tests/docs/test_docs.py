"""Tests that the documentation shows what happens."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import gdp
from benchmarks.__main__ import app_of
from benchmarks.architectures.__main__ import app as drawing
from benchmarks.architectures.train import app as training
from doc_commands import CommandError, check_command, command_lines, inline_commands
from doc_pages import PageError, check, check_block, read_blocks
from gdp.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *RESULTS]
RECORDS = [DOCS / "results.md", *RESULTS]  # their commands are parsed
RUN = [page for page in PAGES if page not in RECORDS]
LONG = {"exports.md", "tutorial.md"} | {
    page.name for page in (*DOCS.glob("models-*.md"), *DOCS.glob("howto/*.md")) if page.name != "onnx.md"
}
LAST_COMMIT = re.compile(r"commit [0-9a-f]{7} is the last")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?=[\s`=\]'\",):;|/]|\.\s|$)")
OF_OTHER_TOOLS = {  # options of torchrun, vLLM, llama.cpp, Megatron-LM, torchtitan, pip and scripts of tests/
    "--nproc-per-node",
    "--standalone",
    "--pipeline-parallel-size",
    "--tensor-parallel-size",
    "--split-mode",
    "--gpu-memory-utilization",
    "--pipeline-model-parallel-layout",
    "--global-batch-size",
    "--micro-batch-size",
    "--config",
    "--module",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--tensor-model-parallel-size",
    "--use-distributed-optimizer",
    "--pipeline-model-parallel-size",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--max-restarts",
    "--model",
    "--batch-size",
    "--input-len",
    "--output-len",
    "--cases",
}


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of captured graphs that all pages share."""
    return tmp_path_factory.mktemp("graphs")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUN, ids=_name)
def test_blocks_are_well_formed(page: Path) -> None:
    """Every block of a page is run, or has a reason for not being run, or is no code."""
    for block in read_blocks(page):
        check_block(block, page)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=_name(page), marks=[pytest.mark.long] * (page.name in LONG)) for page in RUN]
)
def test_blocks_run(page: Path, tmp_path: Path, graphs: Path) -> None:
    """The quick blocks of a page run and print what the page shows."""
    check(page, tmp_path, graphs, with_long=page.name in LONG)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in RUN if any(block.is_long for block in read_blocks(page))], ids=_name)
def test_long_blocks_run(page: Path, tmp_path: Path, graphs: Path) -> None:
    """All blocks of a page run and print what the page shows."""
    check(page, tmp_path, graphs)


def test_commands_parse() -> None:
    """Every command of a page could be run, and a record has one, or names the last commit that had it."""
    commands = {page: list(command_lines(page)) for page in PAGES}
    for page in RECORDS:
        commands[page] += inline_commands(page)
    assert [page for page in RECORDS if not (commands[page] or LAST_COMMIT.search(page.read_text()))] == []
    assert commands[ROOT / "README.md"]
    for command in itertools.chain.from_iterable(commands.values()):
        check_command(command)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("gdp plaice rnnlm-2", "no command plaice"),
        ("python -m benchmarks", "no command"),
        ("gdp place --devices local", "MODEL"),
        ("gdp place rnnlm-2 --devices local --bugdet 3s", "No such option: --bugdet"),
        ("python -m benchmarks serach", "no command serach"),
        ("python -m benchmarks search --seeds many | tee log", "not a valid|valid integer"),
        ("torchrun --nproc-per-node 2 -m gdp run rnnlm-2 --plans plan.json", "No such option: --plans"),
        ("make tests", "no target tests"),
        ("pytest -m long tests/test_no_such.py", "there is no tests/test_no_such.py"),
    ],
)
def test_wrong_commands(command: str, message: str) -> None:
    """A command that could not be run is found without running it."""
    with pytest.raises(CommandError, match=message):
        check_command(command)


def test_site(tmp_path: Path) -> None:
    """The site is built without a warning, and its pages fetch nothing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    fetched = re.compile(r'(?:<script[^>]* src|<link[^>]* href|<img[^>]* src)="((?:https?:)?//[^"]*)"|@import|url\(//')
    assert {page.name: found for page, text in pages.items() if (found := fetched.findall(text))} == {}
    assert {page.name for page, text in pages.items() if "<p>```" in text or "<p>- " in text} == set()
    assert 'id="gdp-place"' in (tmp_path / "commands.html").read_text()
    assert "--microbatches" in (tmp_path / "commands.html").read_text()


def test_reference() -> None:
    """The reference has every public name."""
    named = re.findall(r"^::: gdp\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(gdp.__all__)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_to_results(page: Path) -> None:
    """A page links only to results that are there."""
    for link in re.findall(r"\]\(([^)#:]*benchmarks/[^)#]*|[^)#:/]*\.md)", page.read_text()):
        assert (page.parent / link).exists(), link


def _commands(command: Any, name: str = "gdp") -> Iterator[tuple[str, set[str]]]:
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    yield name, {option for option in options if option.startswith("--")} | {"--help"}
    for child, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{name} {child}")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_options_exist(page: Path) -> None:
    """A page mentions only options that exist, and with a command only its own."""
    options = dict(_commands(typer.main.get_command(app)))
    text = re.sub(r"\\\n(> )?", " ", page.read_text())
    text = re.sub(r"--[^\n`]*?-->", "", text)  # arrows of drawings
    benchmarks = dict(_commands(typer.main.get_command(app_of()), "python -m benchmarks"))
    drawer = dict(_commands(typer.main.get_command(drawing), "python -m benchmarks.architectures"))
    drawer |= dict(_commands(typer.main.get_command(training), "python -m benchmarks.architectures.train"))
    known = set().union(*options.values(), *benchmarks.values(), *drawer.values(), OF_OTHER_TOOLS)
    assert set(OPTION.findall(text)) <= known
    for line in re.findall(r"(?:^|[`$ ])(gdp (?:[a-z]+)[^`\n#]*)", text, re.MULTILINE):
        words = line.split()
        name = next((name for name in (" ".join(words[:n]) for n in (3, 2)) if name in options), None)
        if name is not None and not line.startswith("gdp export --help"):
            used = set(OPTION.findall(re.sub(r"'[^']*'", "", line)))  # a quoted command is another tool's
            assert used <= options[name], line


def test_wrong_pages(tmp_path: Path) -> None:
    """A page fails if it shows something that does not happen."""
    page = tmp_path / "page.md"

    def run(text: str) -> None:
        page.write_text(text)
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        check(page, directory, tmp_path)

    run("```console\n$ echo a \\\n>     b\na b\n$ printf '1\\n2\\nx 3.0 ms\\n'\n...\nx 3.1 ms\n```\n")
    run('```yaml title="a/made.yaml"\nx: 1\n```\n```console\n$ cat a/made.yaml\nx: 1\n```\n')
    run("<!-- status=3 -->\n```console\n$ (exit 3)\n```\n")
    run('<!-- unrun="needs two GPUs" -->\n```console\n$ (exit 3)\n```\n')
    run('```python\nx = 1\n```\n```python\nprint(x)\n```\n```text title="Output"\n1\n```\n')
    for text, message in (
        ("```console\n$ echo a\nb\n```\n", "is not printed: b"),
        ("```console\n$ printf 'a\\nb\\n'\na\n```\n", "is not shown: b"),
        ("```console\n$ echo a\na\n...\nb\n```\n", "is not printed: b"),
        ("```console\n$ echo 3.0 ms\n3.3 ms\n```\n", "times differ"),
        ("```console\n$ (exit 3)\n```\n", "exit status 3, not 0"),
        ("```console\necho a\n```\n", "begins with"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```yaml\na: 1\n```\n", "without a title"),
        ("text\n\n    gdp place\n", "an indented block is not run"),
        ("```text\ngdp place rnnlm-2\n```\n", "this is code"),
        ("```text\nplan = gdp.place(graph)\n```\n", "this is code"),
        ("```\na\n```\n", "without a title"),
        ("<!-- unrun=no -->\n```console\n$ true\n```\n", "is to say why"),
        ("<!-- stauts=3 -->\n```console\n$ true\n```\n", "stauts means nothing"),
    ):
        with pytest.raises(PageError, match=message):
            run(text)
