"""A cache of captured graphs. The name of an entry changes with all that its graph depends on, including the code that
captures. A second run starts at once, without importing PyTorch."""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gdp import cache, files
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.models.model import GGUF, HUGGING_FACE, TIMM, Model, Reading
from gdp.models.serving import ServedStep

FORMAT, VERSION = "gdp-captured", 4

_MODELS = Path(__file__).parent
_GRAPH = _MODELS.parent / "graph"


def model_entry(text: str, reading: Reading, num_microbatches: int) -> Path | None:
    """Returns the file that keeps the graph of a workload, a Transformers directory or a model of timm. None for a
    user's function, which may have changed, and where the caller has registered FLOPs, which are functions."""
    formulas = sys.modules.get("gdp.models.pytorch.flops")
    if formulas is not None and formulas.has_registered():
        return None
    source: tuple[object, ...] = ()
    if text.startswith(HUGGING_FACE):
        path = Path(text.removeprefix(HUGGING_FACE).partition("?")[0])
        config = path if path.suffix == GGUF else path / "config.json"
        if not os.path.isfile(config):  # unreadable, a name too long: the reader says so
            return None
        # a .gguf file has all weights in it: it is known by its size and time
        stat = os.stat(config)
        content = files.read_bytes(config) if config != path else (str(path.resolve()), stat.st_size, stat.st_mtime_ns)
        source = (content, *map(_installed, ("transformers", "diffusers", "gguf")))
    elif text.startswith(TIMM):
        source = (_installed("timm"),)
    elif ":" in text:
        return None
    update = (reading.optimizer, reading.precision, str(reading.lora))
    others = str(reading.serving), reading.batch, str(reading.shards)
    options = (reading.training, *update, reading.dtype, num_microbatches, *others)
    depends_on = (FORMAT, VERSION, text, source, *options, version("torch"))
    return cache.entry("graphs", text, depends_on, _code("pytorch", "hugging_face", "gguf", "papers"))


def onnx_entry(path: Path, dims: Mapping[str, int]) -> Path | None:
    """Returns the file that keeps the graph of the ONNX file `path` with these sizes of symbolic dimensions."""
    depends_on = (FORMAT, VERSION, files.digest(path), sorted(dims.items()), _installed("onnx"))
    return cache.entry("graphs", path.name, depends_on, _code("onnx"))


def read(path: Path | None) -> Model | None:
    """Returns the model kept in `path`; None if there is none, or a damaged one."""
    content = cache.read(path, FORMAT, VERSION)
    unknown = {} if content is None else content.get("unknown")
    if content is None or type(unknown) is not dict or not all(map(files.is_size, unknown.values())):
        return None
    with contextlib.suppress(InputError, KeyError, TypeError, ValueError):
        graph = Graph.from_columns(content["graph"])
        notes = tuple(map(str, content.get("notes", ())))
        served = None if content.get("served") is None else ServedStep.from_document(content["served"])
        captured, seconds = bool(content.get("captured")), float(content.get("seconds", 0.0))
        return Model(graph, content["unknown"], captured, notes=notes, served=served, captured_s=seconds)
    return None


def write(path: Path | None, model: Model) -> None:
    """Keeps `model` in `path`, if that can be done."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "graph": model.graph.to_columns(),
        "unknown": dict(model.unknown_costs),
        "captured": model.is_captured,
        "seconds": model.seconds,
        "notes": list(model.notes),
        "served": None if model.served is None else asdict(model.served),
    }
    cache.write(path, document)


def _code(*rooms: str) -> list[Path]:
    """Returns the files of code that graphs read by these packages depend on."""
    directories = [_GRAPH, *(_MODELS / room for room in rooms), _MODELS / "pytorch" / "shards"]
    names = "names serving experts lora shards stored_weights textbook_flops"
    shared = [_MODELS / "operators.toml", *(_MODELS / f"{name}.py" for name in names.split())]
    return [*shared, *(file for directory in directories for file in directory.glob("*.py"))]


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
