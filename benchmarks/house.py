"""Counts what the package and its pages are made of: `python -m benchmarks.house [CHECKOUT]`."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
_MOST_PARAMETERS, _MOST_LINES, _MOST_NAMESAKES = 9, 100, 3


def counts(root: Path) -> dict[str, str | int]:
    """Returns what is counted in the checkout `root`, by its description."""
    package = root / "src" / "gdp"
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    functions = [
        (_size(node), sum(map(len, (node.args.posonlyargs, node.args.args, node.args.kwonlyargs))), path, node.name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    commands = package / "cli"
    calls = [(width, path, name) for _, width, path, name in functions if not path.is_relative_to(commands)]
    constants = [path for path, tree in trees.items() for _ in _numbers(tree)]
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    stems = Counter(path.stem for path in trees if path.stem != "__init__")
    pages = list((root / "docs").rglob("*.md"))
    for_users = [path for path in pages if not {"notes", "results"} & set(path.relative_to(root).parts)]
    longest, widest = max(functions), max(calls)
    return {
        "lines of Python in src/": sum(_num_lines(path) for path in trees),
        "files of Python in src/": len(trees),
        "lines of JavaScript and CSS in src/": sum(
            _num_lines(path) for path in package.rglob("*") if path.suffix in (".js", ".css")
        ),
        "lines of Python in benchmarks/": sum(map(_num_lines, (root / "benchmarks").rglob("*.py"))),
        "lines of Python in tests/": sum(map(_num_lines, (root / "tests").rglob("*.py"))),
        "words of docs/": sum(map(_num_words, pages)),
        "words of docs/ for users (no notes, no results)": sum(map(_num_words, for_users)),
        "numbers with a name at module level": len(constants),
        "of them in search/": sum(path.is_relative_to(package / "search") for path in constants),
        "of them in policy/": sum(path.is_relative_to(package / "policy") for path in constants),
        "fields of settings in search/settings.py": _num_fields(trees.get(package / "search" / "settings.py")),
        "functions of more than 9 parameters (commands apart)": sum(width > _MOST_PARAMETERS for width, *_ in calls),
        "most parameters (commands apart)": f"{widest[0]}, {_module(widest[1], package)}.{widest[2]}",
        "longest function, lines": f"{longest[0]}, {_module(longest[2], package)}.{longest[3]}",
        "functions of more than 100 lines": sum(size > _MOST_LINES for size, *_ in functions),
        "modules in a circle of imports, at call time too": _num_in_circles(trees, package),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "file names that stand three times": sum(count >= _MOST_NAMESAKES for count in stems.values()),
    }


def _num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _num_words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def _size(node: ast.FunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _numbers(tree: ast.Module) -> Iterator[str]:
    """Yields the names of constants that hold a number, or a tuple or a product with one."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [item for target in targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
        values: list[ast.expr] = [node.value]
        if isinstance(node.value, ast.Tuple):
            values += node.value.elts
        if isinstance(node.value, ast.BinOp):
            values += [node.value.left, node.value.right]
        has_number = any(isinstance(value, ast.Constant) and type(value.value) in (int, float) for value in values)
        for name in names:
            if has_number and isinstance(name, ast.Name) and _CONSTANT.fullmatch(name.id):
                yield name.id


def _num_fields(tree: ast.Module | None) -> int:
    if tree is None:
        return 0
    records = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "Settings"]
    return sum(isinstance(item, ast.AnnAssign) for record in records for item in record.body)


def _num_in_circles(trees: dict[Path, ast.Module], package: Path) -> int:
    """Returns the number of modules that import each other, directly or not, imports inside functions included."""
    names = {_module(path, package): tree for path, tree in trees.items()}
    numbers = {name: number for number, name in enumerate(names)}
    needs = [(numbers[name], numbers[other]) for name, tree in names.items() for other in _imports(tree, names)]
    graph = coo_array((np.ones(len(needs)), np.array(needs).T), shape=(len(names), len(names)))
    sizes = np.bincount(connected_components(graph, connection="strong")[1])
    return int(sizes[sizes > 1].sum())


def _imports(node: ast.AST, names: dict[str, ast.Module]) -> Iterator[str]:
    """Yields the modules of `names` that are imported below `node`, but for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                if full in names or child.module in names:
                    yield full if full in names else child.module
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in names)
        yield from _imports(child, names)


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    for what, count in counts(checkout).items():
        print(f"{what:55} {count}")
