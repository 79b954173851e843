"""Reading ONNX files: checked, without weights. Only the content of small tensors is kept."""

import math
import mmap
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnx.inliner import inline_local_functions

from gdp.errors import InputError, first_line
from gdp.models.names import element_bits

DEFAULT_DOMAINS = ("", "ai.onnx")
SMALL = 1024
"""Elements of a tensor whose content is kept: shapes, axes and sizes are smaller, weights that matter larger."""

_CONTENT_FIELDS = ("raw_data", "float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

# by `TensorProto.DataType`, as NumPy, ml_dtypes and PyTorch call them
_DTYPES = (
    *("undefined", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16"),
    *("float64", "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "uint4", "int4", "float4_e2m1fn", "float8_e8m0fnu"),
    *("uint2", "int2", "float6_e2m3fn", "float6_e3m2fn"),
)
FLOAT, INT32, INT64, BOOL = 1, 6, 7, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The type and shape of a tensor; of a sequence, the type and shape of all its elements together."""

    code: int  # TensorProto.DataType
    shape: tuple[int, ...]
    is_sequence: bool = False

    @property
    def dtype(self) -> str:
        """The type's name: `float32`, `int4`, ...; `float32` if this version does not know the type."""
        return _DTYPES[self.code if 0 < self.code < len(_DTYPES) else FLOAT]

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements: types below a byte are packed, a string counts as 8 bytes."""
        return -(-self.numel * (element_bits(self.dtype) or 64) // 8)


def read_model(path: Path) -> tuple[ModelProto, bool]:
    """Returns the model in `path` with local functions inlined and without the content of large tensors. Also returns
    whether the result depends on that file alone. External data is not opened, except for small integer tensors, on
    which shapes may depend, if the file is there. `path` and these files may be links. InputError, without the path,
    for a file that is no ONNX model, is newer than the installed `onnx`, or names data outside of its directory."""
    model = _parse(path)
    if not model.HasField("graph") or not model.ir_version:
        raise InputError("holds no ONNX model; export it again")
    remedy = f"pip install --upgrade onnx (this is {onnx.__version__}) or export for an older version"
    if model.ir_version > onnx.IR_VERSION:
        raise InputError(f"has IR version {model.ir_version}, onnx here knows up to {onnx.IR_VERSION}; {remedy}")
    opset = max((item.version for item in model.opset_import if item.domain in DEFAULT_DOMAINS), default=1)
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise InputError(f"has opset {opset}, onnx here knows 1 to {newest}; {remedy}")
    for message in _messages(model):
        _check_text(message)
    directory = path.parent  # of a link its own, as for ONNX Runtime and onnx.load
    tensors = (message for message in _messages(model) if isinstance(message, TensorProto))
    is_alone = not [tensor for tensor in tensors if _keep_small(tensor, directory)]
    if model.functions:
        try:
            model = inline_local_functions(model)
        except Exception as error:
            raise InputError(f"its local functions cannot be inlined ({first_line(error)}); export it again") from None
    return model, is_alone


def _parse(path: Path) -> ModelProto:
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
_LARGE = 16 * SMALL  # bytes; a tensor of SMALL elements has fewer


def _without_content(view: memoryview, path: tuple[int, ...]) -> list[bytes | memoryview]:
    """Returns a message in parts, without large contents of tensors at `path`. Raises _DamagedError."""
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
    """Returns the number at `at` and its end."""
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


def _messages(message: Any) -> Iterator[Any]:
    """Yields a message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for item in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(item)


def _check_text(message: Any) -> None:
    """Raises InputError if a name is not text, which protobuf allows."""
    for field, value in message.ListFields():
        texts = ([value] if isinstance(value, (str, bytes)) else value) if field.type == field.TYPE_STRING else ()
        if any(isinstance(text, bytes) for text in texts):
            raise InputError(f"has a damaged name ({field.name}, {value!r:.80}); export or copy it again")


def subgraphs(holder: Any) -> list[GraphProto]:
    """Returns the graphs in an attribute, or in all attributes of a node."""
    if not hasattr(holder, "attribute"):
        return [*([holder.g] if holder.HasField("g") else []), *holder.graphs]
    return [graph for attribute in holder.attribute for graph in subgraphs(attribute)]


def _keep_small(tensor: TensorProto, directory: Path) -> bool:
    """Drops the content of a large tensor; reads a small integer one beside the model. True if it was read."""
    if any(dim < 0 for dim in tensor.dims):
        raise InputError(f"tensor {tensor.name!r} has shape {list(tensor.dims)}; the file is damaged, export it again")
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


def _external(tensor: TensorProto, directory: Path, is_wanted: bool) -> bytes:
    """Returns the content of a tensor in another file, b"" if not wanted or there; InputError for a bad location."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    remedy = "have the data in files beside the model"
    if not location or "\0" in location:
        raise InputError(f"tensor {tensor.name!r}: its external data has no location; {remedy}")
    parts = location.replace("\\", "/").split("/")
    if posixpath.isabs(location) or ".." in parts or ":" in parts[0]:
        raise InputError(f"tensor {tensor.name!r}: external data in {location!r}, outside the directory; {remedy}")
    # Links are followed, as ONNX Runtime does: in a Hugging Face cache the model and its data are links to ../../blobs.
    # onnx.checker refuses them, and hard links too, since a link in an unpacked archive could put any file into the
    # loaded model. Here it cannot: weights are not opened, and the few integers below become sizes alone.
    file = directory / location
    if not is_wanted or not os.path.isfile(file):
        return b""
    value = TensorInfo(tensor.data_type, tuple(tensor.dims))
    try:
        with open(file, "rb") as data:
            data.seek(int(entries.get("offset", "0")))
            content = data.read(value.num_bytes)
    except (OSError, ValueError, OverflowError):
        return b""
    return content if len(content) == value.num_bytes else b""


# Names that graphs within nodes read from outside


def reads(node: NodeProto) -> list[str]:
    """Returns the names that a node reads: its inputs, and outer names that its graphs read; each once, in order."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node):
        names.extend(captured(graph))
    return list(dict.fromkeys(names))


def captured(graph: GraphProto) -> list[str]:
    """Returns the names that a graph reads but does not define."""
    defined = {item.name for item in (*graph.input, *graph.initializer)}
    defined.update(item.values.name for item in graph.sparse_initializer)
    names: list[str] = []
    for node in graph.node:
        defined.update(node.output)
        names.extend(reads(node))
    names.extend(item.name for item in graph.output)
    return [name for name in dict.fromkeys(names) if name not in defined]
