"""JSON in parts: the same document, or the same error, as at once."""

from collections.abc import Callable
from functools import partial

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gdp.json_parts import _loads_in_parts, loads

# texts that look like the ends of parts and lists
TEXT = st.text(st.sampled_from('{}[],:"\\ax \n'), max_size=12) | st.sampled_from(['},{"', '}],"ops":[{', '"ops":[{"'])
RECORD = st.dictionaries(TEXT, TEXT | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=3), max_size=3)
VALUE = st.lists(RECORD, max_size=6) | TEXT | st.lists(st.lists(RECORD, max_size=2), max_size=2) | RECORD
DOCUMENT = st.dictionaries(st.sampled_from(["ops", "tensors", "name"]) | TEXT, VALUE, max_size=4) | VALUE


@given(DOCUMENT, st.integers(1, 60), st.booleans())
def test_parts_give_the_document_of_the_whole(document: object, part_bytes: int, is_indented: bool) -> None:
    """Reading JSON in parts of any size gives the original document."""
    content = orjson.dumps(document, option=orjson.OPT_INDENT_2 if is_indented else None)
    assert loads(content, part_bytes) == document


@given(DOCUMENT, st.integers(1, 60), st.data())
def test_what_is_wrong_is_said_as_of_the_whole(document: object, part_bytes: int, data: st.DataObject) -> None:
    """A text that lost a character is refused where the whole is, with the same place."""
    content = orjson.dumps(document)
    at = data.draw(st.integers(0, len(content) - 1))
    content = content[:at] + content[at + 1 :]
    assert outcome(partial(loads, part_bytes=part_bytes), content) == outcome(orjson.loads, content)


def outcome(parse: Callable[[bytes], object], content: bytes) -> object:
    """Returns the document, or the message and the place of the error."""
    try:
        return parse(content)
    except orjson.JSONDecodeError as error:
        return error.msg, error.pos


def test_graphs_as_gdp_writes_them_are_parted() -> None:
    """Without falling back to the whole."""
    document = {"name": "x", "ops": [{"name": f"op{n}", "time_ns": {"gpu": n}} for n in range(50)], "tensors": [{}] * 9}
    assert _loads_in_parts(orjson.dumps(document), 40) == document
