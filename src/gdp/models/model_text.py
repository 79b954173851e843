"""The text of MODEL: a file, a directory of Transformers, a module's function, or the name of a workload."""

import ast
import os
import re
from pathlib import Path

from gdp.errors import InputError
from gdp.models.model import GGUF, HUGGING_FACE
from gdp.models.papers import PAPERS


def with_prefix(text: str) -> str:
    """Returns MODEL with the prefix of Transformers models if it is a `.gguf` file, which is read as one."""
    return f"{HUGGING_FACE}{text}" if re.fullmatch(rf".*{re.escape(GGUF)}(\?.*)?", text, re.DOTALL) else text


def in_directory(text: str, directory: Path) -> str:
    """Returns MODEL with its path, if it has a relative one, from `directory` on."""
    if text.startswith(HUGGING_FACE):
        return f"{HUGGING_FACE}{directory / text.removeprefix(HUGGING_FACE)}"
    is_file = (directory / text).is_file() or text.endswith((".json", ".gz", ".safetensors", ".onnx"))
    return str(directory / text) if is_file else text


def is_onnx(text: str) -> bool:
    """Returns whether MODEL is an ONNX file."""
    return text.endswith(".onnx") and not text.startswith(HUGGING_FACE)


def is_graph_file(text: str) -> bool:
    """Returns whether MODEL is a `gdp-graph` file."""
    if text.startswith(HUGGING_FACE):
        return False
    return (os.path.isfile(text) and not text.endswith(".onnx")) or text.endswith((".json", ".gz", ".safetensors"))


def check_no_python_file(text: str) -> None:
    """Raises InputError for a Python file, and for a module without a function, with the functions that are there."""
    path = Path(text if text.endswith(".py") else f"{text.replace('.', os.sep)}.py")
    if (os.path.isfile(text) and not text.endswith(".py")) or not os.path.isfile(path) or PAPERS.find(text) is not None:
        return
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        raise InputError(f"{text}: {path} is a Python file with an error; python {path} shows it") from None
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    there = f"; functions there: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ""
    raise InputError(
        f"{text}: {path} is a Python file; name a function in it that returns (module, example_inputs), such as "
        f"{'.'.join(path.with_suffix('').parts)}:{names[0] if names else 'function'}{there}"
    )
