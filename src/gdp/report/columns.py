"""Packs the numbers of a page: a JSON header and little-endian columns, gzip, base64.

    "GDP1" | uint32 length of the header | header | zeros to a multiple of 8 | column | zeros | column | ...

The header is `{"columns": {name: [type, offset in bytes from the first column, number of values]}, ...}`.
"""

import base64
import gzip
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

_MAGIC = b"GDP1"
_LARGE_BYTES = 2**25  # more is packed less tightly, three times as fast
_TYPES = {"f8": "<f8", "i4": "<i4", "u1": "u1"}


def pack(header: Mapping[str, Any], columns: Mapping[str, tuple[str, npt.ArrayLike]]) -> str:
    """Returns the text of `header` and of columns by name: (type "f8", "i4" or "u1", values)."""
    body = bytearray()
    places: dict[str, tuple[str, int, int]] = {}
    for name, (kind, values) in columns.items():
        array = np.ascontiguousarray(values).astype(_TYPES[kind])
        places[name] = (kind, len(body), array.size)
        body += array.tobytes()
        body += bytes(-len(body) % 8)
    head = orjson.dumps({**header, "columns": places})
    start = _MAGIC + struct.pack("<I", len(head)) + head
    level = 6 if len(body) < _LARGE_BYTES else 1
    packed = gzip.compress(start + bytes(-len(start) % 8) + bytes(body), compresslevel=level, mtime=0)
    return base64.b64encode(packed).decode()


def unpack(text: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Returns (header, columns by name) of a packed text."""
    content = gzip.decompress(base64.b64decode(text))
    length = struct.unpack_from("<I", content, 4)[0]
    header = orjson.loads(content[8 : 8 + length])
    start = 8 + length + -(8 + length) % 8
    columns = {
        name: np.frombuffer(content, _TYPES[kind], size, start + offset)
        for name, (kind, offset, size) in header.pop("columns").items()
    }
    return header, columns
