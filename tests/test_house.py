"""What the house asks of every module, as far as a program can tell: CONTRIBUTING.md has the rules."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import gdp

PACKAGE = Path(gdp.__file__).parent
MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
MAX_PARAMETERS = 9
PUBLIC = {"place", "compare"}  # their options are those of the command line
NO_SENTENCE = re.compile(r"(What|Which|Whether|Whatever|Such|Those|How|Where|When|So (many|much))\b")

Named = tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]


def definitions() -> Iterator[Named]:
    """Yields every class and function with the name of its module."""
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield name, node


def test_class_names_are_unique() -> None:
    """No two classes share a name, private ones included."""
    counts = Counter(node.name for _, node in definitions() if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A docstring is a sentence, not a relative clause."""
    described = [*definitions(), *MODULES.items()]
    riddles = [
        f"{module}:{getattr(node, 'lineno', 1)}"
        for module, node in described
        if NO_SENTENCE.match(ast.get_docstring(node) or "")
    ]
    assert riddles == []


def test_no_function_takes_more_than_nine_parameters() -> None:
    """Above nine there is a record; commands and the two public verbs have an option each."""
    long = []
    for module, node in definitions():
        if isinstance(node, ast.ClassDef) or module.startswith("cli/") or node.name in PUBLIC:
            continue
        arguments = node.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        if count > MAX_PARAMETERS:
            long.append(f"{module}:{node.lineno} {node.name} ({count})")
    assert long == []


def test_the_formatter_is_not_fought() -> None:
    """No line asks the formatter to leave it alone."""
    assert [path.name for path in PACKAGE.rglob("*.py") if "fmt: skip" in path.read_text()] == []


@pytest.mark.parametrize("name", sorted(gdp.__all__))
def test_public_names_are_documented(name: str) -> None:
    """Every public name has a docstring."""
    assert getattr(gdp, name).__doc__
