"""JSON texts of many megabytes, parsed in parts: Python looks at signals between the parts, and a parser in C never.

    {"name":"x","ops":[{...},{...},   {...},{...}],"tensors":[{...}]}
                       first part     second part             third part

What is left without the parts, `{"name":"x","ops":[],"tensors":[]}`, is parsed at last.
"""

import re
from typing import Any

import orjson

PART_BYTES = 8_000_000  # parsed in about a tenth of a second
_LIST_OF_MAPPINGS = re.compile(rb'(?<=[{,])"(\w+)":\[(?=\{)')


def loads(content: bytes, part_bytes: int = PART_BYTES) -> Any:
    """Returns the document in `content`, in parts of about `part_bytes`; JSONDecodeError where it is not JSON.

    Parts are mappings in lists of the topmost mapping, without white space between them, as gdp writes them. Other
    texts are parsed at once.
    """
    if len(content) > part_bytes:
        try:
            return _loads_in_parts(content, part_bytes)
        except (orjson.JSONDecodeError, _OtherFormError):
            pass  # some text looks like the end of a part, or the whole is wrong, which its parser says best
    return orjson.loads(content)


class _OtherFormError(Exception):
    """The text is not written as parts need it."""


def _loads_in_parts(content: bytes, part_bytes: int) -> Any:
    """Returns the document; JSONDecodeError or _OtherFormError where the text cannot be parted so."""
    rest, position = bytearray(), 0
    lists: dict[str, list[Any]] = {}
    while (match := _LIST_OF_MAPPINGS.search(content, position)) is not None:
        rest += content[position : match.end()]
        orjson.loads(bytes(rest) + b"]}")  # fails unless the list is one of the topmost mapping
        end = content.find(b"}]", match.end()) + 1
        if not end:
            raise _OtherFormError
        lists[match[1].decode()] = _records(content, match.end(), end, part_bytes)
        position = end
    document = orjson.loads(bytes(rest) + content[position:])
    if not lists or any(document.get(key) != [] for key in lists):
        raise _OtherFormError
    return document | lists


def _records(content: bytes, start: int, end: int, part_bytes: int) -> list[Any]:
    """Returns the mappings between two places in `content`."""
    records: list[Any] = []
    while start < end:
        cut = content.find(b"},{", start + part_bytes, end)
        stop = end if cut < 0 else cut + 1
        records += orjson.loads(b"[" + content[start:stop] + b"]")
        start = stop + 1
    return records
