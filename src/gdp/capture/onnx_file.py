"""Reading ONNX files: checked, without weights. What comes out of here holds the content of small tensors only."""

import math
import mmap
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.errors import InputError

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

DEFAULT_DOMAINS = ("", "ai.onnx")
SMALL = 1024
"""Elements of a tensor whose content is kept: shapes, axes and sizes are smaller, weights that matter larger."""

_CONTENT_FIELDS = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

# name and bits of an element, by `TensorProto.DataType`; names as NumPy, ml_dtypes and PyTorch have them
_DTYPES: dict[int, tuple[str, int]] = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16), 6: ("int32", 32),
    7: ("int64", 64), 8: ("string", 64), 9: ("bool", 8), 10: ("float16", 16), 11: ("float64", 64),
    12: ("uint32", 32), 13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128), 16: ("bfloat16", 16),
    17: ("float8_e4m3fn", 8), 18: ("float8_e4m3fnuz", 8), 19: ("float8_e5m2", 8), 20: ("float8_e5m2fnuz", 8),
    21: ("uint4", 4), 22: ("int4", 4), 23: ("float4_e2m1fn", 4), 24: ("float8_e8m0fnu", 8), 25: ("uint2", 2),
    26: ("int2", 2), 27: ("float6_e2m3fn", 6), 28: ("float6_e3m2fn", 6),
}  # fmt: skip
FLOAT, INT32, INT64, BOOL = 1, 6, 7, 9


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor: its type and shape. Of a sequence, the type and shape of all of it together."""

    code: int  # TensorProto.DataType
    shape: tuple[int, ...]
    is_sequence: bool = False

    @property
    def dtype(self) -> str:
        """`float32`, `int4`, ...; `float32` if this version does not know the type."""
        return _DTYPES.get(self.code, _DTYPES[FLOAT])[0]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Types below a byte are packed; a string is taken to be 8 bytes."""
        return -(-self.numel * _DTYPES.get(self.code, _DTYPES[FLOAT])[1] // 8)


def read_model(path: Path) -> tuple["ModelProto", bool]:
    """The model in `path` with local functions inlined and the content of large tensors left out; and whether what
    comes of it depends on that file alone.

    External data is not opened, except for small integer tensors, on which shapes may depend, if the file is there.
    `path` and such files may be links. InputError, without the path, for what is no ONNX model, newer than the
    installed `onnx`, or names data outside of its directory.
    """
    try:
        import onnx
    except ImportError:
        raise InputError("reading ONNX files needs onnx; pip install 'gdp-placement[onnx]'") from None
    model = _parse(path)
    if not model.HasField("graph") or not model.ir_version:
        raise InputError("holds no ONNX model; export it again")
    remedy = f"pip install --upgrade onnx (this is {onnx.__version__}) or export for an older version"
    if model.ir_version > onnx.IR_VERSION:
        raise InputError(f"has IR version {model.ir_version}, onnx here knows up to {onnx.IR_VERSION}; {remedy}")
    opset, newest = default_opset(model), onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise InputError(f"has opset {opset}, onnx here knows 1 to {newest}; {remedy}")
    _check_text(model)
    directory = path.parent  # of a link its own, as for ONNX Runtime and onnx.load
    is_alone = not [tensor for tensor in _tensors(model) if _keep_small(tensor, directory)]
    if model.functions:
        from onnx.inliner import inline_local_functions

        try:
            model = inline_local_functions(model)
        except Exception as error:
            raise InputError(f"its local functions cannot be inlined ({first_line(error)}); export it again") from None
    return model, is_alone


def default_opset(model: "ModelProto") -> int:
    """The version of ONNX's own operators that the model uses; 1 where it does not say."""
    return max((item.version for item in model.opset_import if item.domain in DEFAULT_DOMAINS), default=1)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _parse(path: Path) -> "ModelProto":
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    model = ModelProto()
    try:
        with open(path, "rb") as file:
            if not file.seek(0, 2):
                raise InputError("is empty; an ONNX model is expected")
            # mapped, and without weights, so that a large file is never in memory as a whole; the map is closed with
            # the last view of it, which an exception may hold
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        lean = b"".join(_without_content(memoryview(content), _PATH))
        if len(lean) < 2**31:
            model.ParseFromString(lean)
    except FileNotFoundError:
        raise InputError("no such file; check the path") from None
    except IsADirectoryError:
        raise InputError("is a directory; name a file") from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror}); check its permissions") from None
    except (DecodeError, UnicodeDecodeError, _DamagedError):
        raise InputError("is no ONNX model, or a damaged one; export or copy it again") from None
    if len(lean) >= 2**31:
        raise InputError("is 2 GiB or more without weights, which protobuf cannot read; save constants as initializers")
    return model


# Protobuf's wire format: https://protobuf.dev/programming-guides/encoding/


class _DamagedError(Exception):
    pass


_PATH = (7, 5)  # the graph in a model, an initializer in a graph
_CONTENT = frozenset({4, 5, 6, 7, 9, 10, 11})  # the fields of an initializer that hold its content
_LARGE = 16 * SMALL  # bytes: no tensor of SMALL elements has as many, of whatever type


def _without_content(view: memoryview, path: tuple[int, ...]) -> list[bytes | memoryview]:
    """Parts of a message that make it up, without large contents of the tensors at the end of `path`.

    _DamagedError if that is what it is.
    """
    parts: list[bytes | memoryview] = []
    start = copied = 0
    while start < len(view):
        tag, at = _varint(view, start)
        kind, end = tag & 7, 0
        if kind == 2:
            size, at = _varint(view, at)
            end = at + size
        elif kind == 0:
            end = _varint(view, at)[1]
        elif kind in (1, 5):
            end = at + (8 if kind == 1 else 4)
        if not start < end <= len(view):
            raise _DamagedError(start)
        is_dropped = not path and tag >> 3 in _CONTENT and kind == 2 and end - at > _LARGE
        if is_dropped or (path and tag == path[0] << 3 | 2):
            parts.append(view[copied:start])
            copied = end
            if not is_dropped:
                inner = _without_content(view[at:end], path[1:])
                parts += [bytes([tag]), _as_varint(sum(map(len, inner))), *inner]
        start = end
    return [*parts, view[copied:]]


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number there and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            break
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _DamagedError(at)


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _check_text(message: Any) -> None:
    """InputError if some name is no text, which protobuf lets pass."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            if any(isinstance(item, bytes) for item in ([value] if isinstance(value, (str, bytes)) else value)):
                raise InputError(f"has a damaged name ({field.name}, {value!r:.80}); export or copy it again")
        elif field.type == field.TYPE_MESSAGE:
            for item in [value] if hasattr(value, "ListFields") else value:
                _check_text(item)


# All tensors of a model


def _tensors(model: "ModelProto") -> Iterator["TensorProto"]:
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: "GraphProto") -> Iterator["TensorProto"]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator["TensorProto"]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("sparse_tensor"):
                yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)
            for graph in subgraphs(attribute):
                yield from _graph_tensors(graph)


def subgraphs(holder: Any) -> list["GraphProto"]:
    """The graphs in an attribute, or in all attributes of a node."""
    if not hasattr(holder, "attribute"):
        return [*([holder.g] if holder.HasField("g") else []), *holder.graphs]
    return [graph for attribute in holder.attribute for graph in subgraphs(attribute)]


def _keep_small(tensor: "TensorProto", directory: Path) -> bool:
    """Drop what the tensor holds if that is large; read it if it is few integers in a file beside the model, and say
    so."""
    if any(dim < 0 for dim in tensor.dims):
        raise InputError(f"tensor {tensor.name!r} has shape {list(tensor.dims)}; the file is damaged, export it again")
    from onnx import TensorProto

    is_small = math.prod(tensor.dims) <= SMALL
    is_read = False
    if tensor.data_location == TensorProto.EXTERNAL:
        is_read = is_small and tensor.data_type in (INT32, INT64, BOOL)
        content = _external(tensor, directory, is_read)
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT
        if content:
            tensor.raw_data = content
    if not is_small:
        for field in _CONTENT_FIELDS:
            tensor.ClearField(field)
    return is_read


def _external(tensor: "TensorProto", directory: Path, is_wanted: bool) -> bytes:
    """The content of a tensor in another file if it is wanted and there, else b""; InputError for a bad location."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    remedy = "have the data in files beside the model"
    if not location or "\0" in location:
        raise InputError(f"tensor {tensor.name!r}: its external data has no location; {remedy}")
    parts = location.replace("\\", "/").split("/")
    if posixpath.isabs(location) or ".." in parts or ":" in parts[0]:
        raise InputError(f"tensor {tensor.name!r}: external data in {location!r}, outside the directory; {remedy}")
    # Links are followed, as ONNX Runtime does: in a Hugging Face cache the model and its data are links to ../../blobs.
    # onnx.checker refuses them, and hard links too, since whoever gets the loaded model gets what a link in an unpacked
    # archive leads to. Here nobody does: weights are not opened, and the few integers below become sizes alone.
    file = directory / location
    if not is_wanted or not os.path.isfile(file):
        return b""
    value = Value(tensor.data_type, tuple(tensor.dims))
    try:
        with open(file, "rb") as data:
            data.seek(int(entries.get("offset", "0")))
            content = data.read(value.num_bytes)
    except (OSError, ValueError, OverflowError):
        return b""
    return content if len(content) == value.num_bytes else b""


# Names that graphs within nodes read from outside


def reads(node: "NodeProto") -> list[str]:
    """The names that a node reads: its inputs, and what its graphs take from around them; each once, in order."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        names.extend(captured(graph))
    return list(dict.fromkeys(names))


def captured(graph: "GraphProto") -> list[str]:
    """The names that a graph reads but does not define."""
    defined = {item.name for item in (*graph.input, *graph.initializer)}
    defined.update(item.values.name for item in graph.sparse_initializer)
    names: list[str] = []
    for node in graph.node:
        defined.update(node.output)
        names.extend(reads(node))
    names.extend(item.name for item in graph.output)
    return [name for name in dict.fromkeys(names) if name not in defined]
