"""Tests that pages and docstrings keep to the words of docs/glossary.md."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import gdp

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page != GLOSSARY and page.parent.name not in ("notes", "results")
]
MARKDOWN = MarkdownIt("commonmark").enable("table")


def entries() -> list[tuple[str, str, list[str]]]:
    """Returns the word, the meaning and the words not used of each row of the glossary."""
    texts: list[str] = []
    tokens = MARKDOWN.parse(GLOSSARY.read_text())
    for before, token in itertools.pairwise(tokens):
        if before.type == "td_open":
            texts.append(token.content)
    rows = zip(texts[::3], texts[1::3], texts[2::3], strict=True)
    return [(word, meaning, unused.split(", ") if unused else []) for word, meaning, unused in rows]


ENTRIES = entries()


def prose(text: str) -> str:
    """Returns the text of a page without code, addresses of links and comments."""
    tokens = [token for token in MARKDOWN.parse(text) if token.type == "inline"]
    parts = [child for token in tokens for child in (*(token.children or ()), None)]
    return " ".join("." if part is None else part.content for part in parts if part is None or part.type == "text")


def docstrings(tree: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Yields the docstrings of a module and of its public names, without code."""
    yield re.sub(r"`[^`]*`", "", ast.get_docstring(tree) or "")
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield from docstrings(node)


def pattern(word: str) -> re.Pattern[str]:
    """Returns the pattern of a word and its plural or past."""
    return re.compile(r"(?<![\w-])" + re.sub("[ -]", "[ -]", word) + r"(?:s|es|d|ed)?(?![\w-])", re.IGNORECASE)


def places(word: str, texts: dict[str, str]) -> list[str]:
    """Returns the names of the texts that have a word."""
    return [name for name, text in texts.items() if pattern(word).search(text)]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Returns the prose of each page for users by its path."""
    return {str(page.relative_to(ROOT)): prose(page.read_text()) for page in PAGES}


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    """Returns the public docstrings of each module by its path."""
    package = Path(gdp.__file__).parent
    paths = {str(path.relative_to(package)): path for path in package.rglob("*.py")}
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    return {name: " ".join(" . ".join(docstrings(tree)).split()) for name, tree in trees.items()}


def test_each_word_has_one_meaning() -> None:
    """A word is defined once, in one sentence of at most twenty words, and no entry rules out another's word."""
    words = [word for word, _, _ in ENTRIES]
    unused = [other for _, _, others in ENTRIES for other in others]
    assert len(words) >= 40
    assert sorted(words) == sorted(set(words))
    assert sorted(unused) == sorted(set(unused) - set(words))
    assert [m for _, m, _ in ENTRIES if not m.endswith(".") or m.count(". ") or len(m.split()) > 20] == []


@pytest.mark.parametrize("word", [word for word, _, _ in ENTRIES])
def test_words_are_used(word: str, pages: dict[str, str], modules: dict[str, str]) -> None:
    """A word of the glossary is in a page for users and in a public docstring."""
    assert places(word, pages)
    assert places(word, modules)


@pytest.mark.parametrize("word", [other for _, _, others in ENTRIES for other in others])
def test_other_words_are_not_used(word: str, pages: dict[str, str], modules: dict[str, str]) -> None:
    """A word that the glossary rules out is in no page, no public docstring and no meaning."""
    meanings = {name: meaning for name, meaning, _ in ENTRIES}
    assert places(word, pages) + places(word, modules) + places(word, meanings) == []


def test_texts_are_searched() -> None:
    """Words are found in prose and docstrings, in any case and number, and not in code."""
    page = prose("# Two Makespans\n\nSee [it](makespan.md), `makespan`.\n\n```text\nmakespan\n```\n")
    assert places("makespan", {"page": page}) == ["page"]
    assert places("makespan", {"page": page.replace("Makespans", "step times")}) == []
    source = 'class A:\n    def b():\n        """A graph\n        node."""\n    def _c():\n        """A makespan."""\n'
    found = " ".join(" ".join(docstrings(ast.parse(source))).split())
    assert places("graph node", {"a": found}) == ["a"]
    assert places("makespan", {"a": found}) == []
