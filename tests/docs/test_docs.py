"""What the documentation shows is what happens."""

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
from doc_pages import PageError, check
from gdp.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN = sorted(
    page.relative_to(DOCS)
    for page in (DOCS / "index.md", DOCS / "tutorial.md", *DOCS.glob("models*.md"), *DOCS.glob("howto/*.md"))
)
QUICK = {"index.md", "models.md", "models-jax.md", "howto/onnx.md"}  # one of each front end
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?=[\s`=\]'\",):;|/]|\.\s|$)")
OF_OTHER_TOOLS = {  # options that pages mention, of torchrun, vLLM, Megatron-LM, pip
    "--nproc-per-node", "--standalone", "--pipeline-parallel-size", "--pipeline-model-parallel-layout",
    "--pipeline-model-parallel-size",
}  # fmt: skip


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The captured graphs that all pages share."""
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page), marks=[] if str(page) in QUICK else pytest.mark.long) for page in RUN]
)
def test_every_block_of_a_page_runs_and_prints_what_is_shown(page: Path, tmp_path: Path, graphs: Path) -> None:
    check(DOCS / page, tmp_path, graphs)


def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert len(pages) > len(RUN)
    fetched = re.compile(r'(?:<script[^>]* src|<link[^>]* href|<img[^>]* src)="((?:https?:)?//[^"]*)"|@import|url\(//')
    assert {page.name: found for page, text in pages.items() if (found := fetched.findall(text))} == {}
    assert {page.name for page, text in pages.items() if "<p>```" in text or "<p>- " in text} == set()
    assert 'id="gdp-place"' in (tmp_path / "commands.html").read_text()
    assert "--free-replicas" in (tmp_path / "commands.html").read_text()


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: gdp\.(\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(gdp._HOME)


def _commands(command: Any, name: str = "gdp") -> Iterator[tuple[str, set[str]]]:
    options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    yield name, {option for option in options if option.startswith("--")} | {"--help"}
    for child, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{name} {child}")


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.stem)
def test_pages_mention_only_options_that_exist(page: Path) -> None:
    options = dict(_commands(typer.main.get_command(app)))
    text = re.sub(r"\\\n(> )?", " ", page.read_text())
    text = re.sub(r"--[^\n`]*?-->", "", text)  # arrows of drawings
    known = set().union(*options.values(), OF_OTHER_TOOLS)
    assert set(OPTION.findall(text)) <= known
    for line in re.findall(r"(?:^|[`$ ])(gdp (?:[a-z]+)[^`\n#]*)", text, re.MULTILINE):
        words = line.split()
        name = next((name for name in (" ".join(words[:n]) for n in (3, 2)) if name in options), None)
        if name is not None and not line.startswith("gdp export --help"):
            used = set(OPTION.findall(line))
            assert used <= options[name], line


def test_a_page_that_shows_what_is_not_so_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    def run(text: str) -> None:
        page.write_text(text)
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        check(page, directory, tmp_path)

    run("```console\n$ echo a \\\n>     b\na b\n$ printf '1\\n2\\nx 3.0 ms\\n'\n...\nx 3.1 ms\n```\n")
    run('```yaml title="a/made.yaml"\nx: 1\n```\n```console\n$ cat a/made.yaml\nx: 1\n```\n')
    run("<!-- status=3 -->\n```console\n$ (exit 3)\n```\n")
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
    ):
        with pytest.raises(PageError, match=message):
            run(text)
