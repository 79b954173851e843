"""Layouts: words to a layout and back, one line for what makes no sense."""

import pytest

from gdp.errors import InputError
from gdp.parallel.layout import Layout


@pytest.mark.parametrize(
    "text",
    [
        "data=4",
        "data=3,microbatches=3:1:1",
        "stages=2,microbatches=8,recompute=blocks",
        "data=2,zero=1,recompute=a.b:c",
        "data=2,recompute=auto",
        "data=2,zero=1,offload=auto",
        "data=2,offload=a.b:c",
        "data=2,tensor=4,sequence=off,overlap=on",
        "data=16,expert=8,microbatches=2,zero=1",
    ],
)
def test_words_and_documents_come_back(text: str) -> None:
    """A layout is what its words and its document are read as."""
    layout = Layout.parse(text)
    assert str(layout) == text
    assert Layout.of_document(layout.document()) == layout


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("dp=4", "data=4"),
        ("ddp=4,tp=1,ga=2", "data=4,microbatches=2"),
        ("fsdp=8", "data=8,zero=3"),
        ("ep=4", "data=4,expert=4"),
        ("pp=2,microbatches=8,ac=full", "stages=2,microbatches=8,recompute=blocks"),
    ],
)
def test_words_of_other_tools_are_understood(text: str, meant: str) -> None:
    """What users of other tools call a key means that key."""
    assert str(Layout.parse(text)) == meant


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("none", "is no KEY=VALUE"),
        ("data=0", "data is 0"),
        ("data=x", "whole number"),
        ("data=1025", "1 to 1,024"),
        ("zero=1", "there is one; add data=2"),
        ("data=2,zero=4", "0, 1, 2 or 3"),
        ("data=3,microbatches=2:1", "2 numbers for 3 replicas"),
        ("data=2,microbatches=2:1,zero=3", "as many micro-batches"),
        ("data=2,data=2", "given twice"),
        ("dta=2", "did you mean data"),
        ("tensor=0", "tensor is 0; 1 to 64 ranks"),
        ("tensor=0:0", "a share of at least 1 for each card"),
        ("tp=2,tensor=2", "tensor is given twice"),
        ("dp=2,data=2", "data is given twice"),
        ("fsdp=8,zero=2", "zero is given twice"),
        ("zero=2,fsdp=8", "zero is given twice; fsdp=N is data=N,zero=3"),
        ("ep=4,data=6", "on as many of data=6 replicas; take a multiple of 4 for data, or add tensor=4"),
        ("ep=8,tensor=4", "let it divide tensor=4"),
        ("ep=2,cp=2", "leave context out"),
        ("ep=2,data=2,zero=1", "replicas of 2 ranks, and there is one; add data=4 or more"),
        ("sequence=on", "add tensor=2 or more"),
        ("tensor=2,sequence=maybe", "on, off or auto"),
        ("overlap=on", "add tensor=2 or more"),
        ("tensor=2,overlap=auto", "overlap is 'auto'; on or off"),
        ("HSDP=4", "hsdp: parameters are cut over all replicas; take data=N,zero=3"),
        ("offload=selective", "whole blocks wait on a CPU; take offload=blocks or auto"),
        ("microbatches=0", "microbatches is 0"),
        ("stages=0", "stages is 0"),
        ("offload=blocks,recompute=auto", "take one of them"),
        ("data=2,zero=3,offload=auto", "take zero=2 or less"),
    ],
)
def test_nonsense_is_refused(text: str, problem: str) -> None:
    """One line says what makes no sense, and what would."""
    with pytest.raises(InputError, match=problem) as error:
        Layout.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"microbatches": 1.5}, {"data": True}, {"zero": "1"}, {"sharding": 2}])
def test_bad_documents_are_refused(change: dict[str, object]) -> None:
    """Other keys, and values of other types, are refused."""
    document = Layout((1, 1), zero=1).document()
    assert Layout.of_document(document) == Layout((1, 1), zero=1)
    with pytest.raises(InputError, match="layout: "):
        Layout.of_document(document | change)


def test_words_in_any_case() -> None:
    """Other tools' words are understood in capitals, and selective recomputation is written as it is read."""
    assert Layout.parse("DP=4,AC=selective") == Layout.parse("data=4,recompute=selective")
    assert str(Layout.parse("data=4,recompute=selective")) == "data=4,recompute=selective"
