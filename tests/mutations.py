"""Changes the content of files at random, in bytes and in their own structure.

Every function takes a good content and a source of chance, and returns another content, which is mostly a bad one.
"""

import contextlib
import gzip
import json
import re
import sqlite3
import tempfile
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

_STRINGS = ("", "x" * 5000, "\x1b[2J", "[bold]b[/bold]", "[/]", "\u202eabc", "a\nb", "\x00", "gpu0", "0", "-1", "1e999")
_STRINGS += (
    "NaN",
    "9" * 400,
    "%s",
    "../../etc/passwd",
    "{",
    "\ud7ff",
    "auto",
    "cpu",
    "*",
    "(a+)+$",
    "1TB",
    "999999PiB",
)
_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**40)
_NUMBERS += (0.5, -0.0, 1e-300, 1e18, 1e308, float("inf"), float("nan"))  # type: ignore[assignment]


# values


def other_value(value: Any, document: Any, random: Random) -> Any:
    """Returns something to stand in place of `value`."""
    kind = random.randrange(7)
    if kind == 0 and type(value) in (int, float):
        return random.choice((-value, value + 1, value - 1, value * 1000, value * 10**12, str(value), value / 7))
    if kind == 1 and type(value) is str:
        return random.choice((value * 2, value[:-1], value.upper(), value + "\n", f" {value}", value[::-1]))
    if kind == 2:
        return deepcopy(random.choice(_places(document))[2])  # another part of the document
    if kind == 3:
        return random.choice(
            ([], {}, [[]], [None], {"": 0}, [deepcopy(value)], {"x": deepcopy(value)}, [deepcopy(value)] * 100)
        )
    if kind == 4:
        return random.choice((None, True, False))
    return random.choice(_STRINGS) if kind == 5 else random.choice(_NUMBERS)


def _places(document: Any) -> list[tuple[Any, Any, Any]]:
    """Returns (container, key, value) of all values."""
    places, level = [(None, None, document)], [document]
    while level:
        container = level.pop()
        keys = (
            container if isinstance(container, dict) else range(len(container)) if isinstance(container, list) else ()
        )
        for key in keys:
            places.append((container, key, container[key]))
            level.append(container[key])
    return places


def change_json(document: Any, random: Random) -> Any:
    """Changes a value, or leaves out, renames or doubles an entry; returns the document."""
    # each depth is as likely as another, or the many numbers of a graph would be all that changes
    container, key, value = document, None, document
    path = []
    while isinstance(value, dict | list) and value and random.random() < 0.85:
        container = value
        key = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        value = container[key]
        path.append((container, key))
    if not path:
        return other_value(document, document, random) if random.random() < 0.3 else document
    how = random.randrange(8)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[random.choice((str(key) + "x", "", "\x1b[1m", *_STRINGS[:4]))] = container.pop(key)
    elif how == 1 or (how == 2 and isinstance(container, list)):
        container.insert(random.randrange(len(container) + 1), value)
    elif how == 2:
        container[random.choice(_STRINGS)] = value
    else:
        container[key] = other_value(value, document, random)
    return document


def json_text(document: Any, random: Random) -> bytes:
    """Returns JSON, now and then with what a writer of JSON does not write."""
    text = json.dumps(document, ensure_ascii=random.random() < 0.5)
    how = random.randrange(20)
    if how == 0:
        depth = random.choice((100, 1000, 100_000))
        text = text.replace(":", ":" + "[" * depth + "]" * depth + ',"x":', 1)
    elif how == 1:
        text = re.sub(r'("\w+"):', r"\1:1,\1:", text, count=1)
    elif how == 2:
        text = re.sub(r"\d+", "1" * random.choice((30, 5000)), text, count=1)
    return text.encode("utf-8", "surrogatepass")


def change_bytes(content: bytes, random: Random) -> bytes:
    """Changes bytes: some, or a word of 4 or 8, or leaves out, adds or doubles a part."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        where, size = random.randrange(len(data) + 1), random.choice((1, 2, 4, 8, 100, 5000))
        how = random.randrange(7)
        if how == 0:
            del data[where:]
        elif how == 1:
            del data[where : where + size]
        elif how == 2:
            data[where:where] = random.randbytes(size)
        elif how == 3:
            data[where:where] = data[where : where + size]
        elif how == 4:
            width = random.choice((4, 8))
            number = random.choice((0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))
            data[where : where + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
        elif how == 5:
            data[where : where + 1] = random.randbytes(1)
        elif where < len(data):
            data[where] ^= 1 << random.randrange(8)
    return bytes(data)


# files


def json_file(content: bytes, random: Random) -> bytes:
    if random.random() < 0.15:
        return change_bytes(content, random)
    document = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        document = change_json(document, random)
    return json_text(document, random)


def gzip_file(content: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return change_bytes(content, random)
    if random.random() < 0.003:  # a GiB of blanks
        return gzip.compress(b" " * 2**20, 9) * 1024
    return gzip.compress(json_file(gzip.decompress(content), random), 1)


def kept_file(content: bytes, random: Random) -> bytes:
    """Changes what is below the line with the digest."""
    digest, _, text = gzip.decompress(content).partition(b"\n")
    return gzip.compress(digest + b"\n" + json_file(text, random), 1)


def yaml_file(content: bytes, random: Random) -> bytes:
    import yaml

    if random.random() < 0.15:
        return change_bytes(content, random)
    document = yaml.safe_load(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        document = change_json(document, random)
    try:
        text = yaml.safe_dump(document, allow_unicode=True, default_flow_style=random.choice((None, False)))
    except yaml.YAMLError:
        return json_text(document, random)
    extra = (
        "&a [*a]", "!!python/object/apply:os.system [ls]", "!!binary x", "!!timestamp 2001-13-45", "[" * 3000, "? {}",
        "<<: 1", "1:2:3", "0x", "2001-01-01", "!!int x", "!!float .", "!!set {a}", "0b", "*b", ".inf", "1_000", "%YAML",
        "&a [&b [*b, *b], *b]", "!!omap [a]", "{? [a] : b}", "= ", "!!null x", "!!bool x", "-.nan", "190:20:30.15",
    )  # fmt: skip
    if random.random() < 0.3:
        lines = text.splitlines()
        number = random.randrange(len(lines)) if lines else 0
        lines[number : number + 1] = [
            re.sub(r": .*|$", lambda _: f": {random.choice(extra)}", "".join(lines[number:][:1]), count=1)
        ]
        text = "\n".join(lines)
    return text.encode("utf-8", "surrogatepass")


def tensor_file(content: bytes, random: Random) -> bytes:
    """Changes the header of a safetensors file, gdp's own header in it, or bytes."""
    if random.random() < 0.2:
        return change_bytes(content, random)
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    how = random.randrange(3)
    if how == 0:
        own = change_json(json.loads(header["__metadata__"]["gdp"]), random)
        header["__metadata__"]["gdp"] = json_text(own, random).decode("utf-8", "surrogatepass")
    elif how == 1:
        header = change_json(header, random)
    else:
        places = bytearray(data)
        for _ in range(random.choice((1, 4))):
            entry = random.choice([entry for name, entry in header.items() if name != "__metadata__"])
            first, end = entry["data_offsets"]
            if end > first:
                where = random.randrange(first, end)
                width = min(random.choice((1, 4, 8)), end - where)
                places[where : where + width] = random.choice((b"\0" * 8, b"\xff" * 8, random.randbytes(8)))[:width]
        data = bytes(places)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def onnx_file(content: bytes, random: Random) -> bytes:
    """Changes fields of the protocol buffer, or bytes."""
    import onnx

    if random.random() < 0.2:
        return change_bytes(content, random)
    proto = onnx.ModelProto.FromString(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        message = proto
        while True:
            fields = [(field, value) for field, value in message.ListFields()]
            if not fields:
                break
            field, value = random.choice(fields)
            is_list, is_message = not hasattr(value, "ListFields") and hasattr(value, "extend"), field.message_type
            if is_list and random.random() < 0.15:
                number = random.randrange(len(value))
                if random.random() < 0.5:
                    del value[number]
                else:
                    value.append(value[number])
                break
            if is_message:
                message = random.choice(value) if is_list else value
                if random.random() < 0.05:
                    message.Clear()
                    break
                continue
            old = random.choice(value) if is_list else value
            names = [name for node in proto.graph.node for name in (*node.input, *node.output, node.op_type)]
            new: Any = random.choice((*_STRINGS, *names)) if isinstance(old, str) else random.choice(_NUMBERS)
            if isinstance(old, bytes):
                new = change_bytes(old, random)
            with contextlib.suppress(ValueError, TypeError, UnicodeEncodeError):
                if is_list:
                    value[random.randrange(len(value))] = new
                else:
                    setattr(message, field.name, new)
            break
    return proto.SerializeToString()


def times_file(content: bytes, random: Random) -> bytes:
    """Changes entries of the database, or bytes."""
    if random.random() < 0.4:
        return change_bytes(content, random)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "t.db"
        path.write_bytes(content)
        with contextlib.suppress(sqlite3.Error, OverflowError), contextlib.closing(sqlite3.connect(path)) as base, base:
            columns = ("median_ns", "spread_ns", "num_samples", "signature", "library", "device_kind")
            value = random.choice((*_STRINGS, *_NUMBERS, b"\xff", None))
            base.execute(
                random.choice(
                    (
                        f"UPDATE op_times SET {random.choice(columns)} = ? WHERE random() % 3 = 0",
                        f"UPDATE op_times SET {random.choice(columns)} = ?",
                    )
                ),
                (value,),
            )
            if random.random() < 0.3:
                base.execute(
                    random.choice(
                        (
                            f"PRAGMA user_version = {random.choice((0, 2, 99))}",
                            "DROP TABLE op_times",
                            f"ALTER TABLE op_times DROP COLUMN {random.choice(columns[:3])}",
                            "CREATE VIEW v AS SELECT 1",
                            "DELETE FROM op_times",
                        )
                    )
                )
        return path.read_bytes()


def option_text(content: bytes, random: Random) -> bytes:
    """Changes an option's text, which a command line has in place of a file."""
    text = content.decode()
    for _ in range(random.choice((1, 1, 2))):
        where, size = random.randrange(len(text) + 1), random.choice((0, 1, 1, 2, 5))
        pieces = (
            *"0x+@()=,:?&%.-*[] ",
            "-1",
            "99",
            "9" * 30,
            "é",
            "\u202e",
            "\x1b[2J",
            "1e9",
            "0",
            "nan",
            "cpu",
            "[b]",
        )
        text = text[:where] + random.choice(("", *pieces)) + text[where + size :]
    return text.replace("\0", "").encode()
