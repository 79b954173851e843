"""Precision: a model converted, under autocast, or asking for a card is captured with PyTorch's types, as by hand."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.reported import at_sheets
from gdp.cluster import Cluster
from gdp.costs.op_times import op_times
from gdp.errors import InputError
from gdp.execute.equality import compare, eager_parts
from gdp.graph import Graph
from gdp.models.model import Reading
from gdp.models.pytorch import Capture, autocast, capture, capture_fn
from gdp.models.pytorch.cards import as_if_on_a_card
from gdp.models.source import ModelSource

ROWS, WIDTH, HIDDEN = 8192, 1024, 4096


class Net(nn.Module):
    """A normalisation, two products with biases, and a softmax, under autocast if `device` is given."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device or "cpu", torch.bfloat16, enabled=bool(self.device)):
            y: Tensor = self.down(functional.gelu(self.up(self.norm(x)))).softmax(-1)
            return y


def data() -> tuple[Tensor]:
    return (torch.randn(ROWS, WIDTH),)


def rows_of(graph: Graph) -> list[tuple[str, str, int]]:
    """Returns (kind, type, bytes) of each op with work."""
    columns = zip(graph.kinds, graph.dtypes, graph.bytes_accessed.tolist(), strict=True)
    return [(kind.removeprefix("aten."), dtype, num_bytes) for kind, dtype, num_bytes in columns if num_bytes]


def products(width: int) -> list[tuple[str, str, int]]:
    """Returns the two products in elements of `width` bytes: rows, weight and bias read, rows written."""
    up = (ROWS * WIDTH + WIDTH * HIDDEN + HIDDEN + ROWS * HIDDEN) * width
    down = (ROWS * HIDDEN + HIDDEN * WIDTH + WIDTH + ROWS * WIDTH) * width
    return [("addmm", "bfloat16", up), ("gelu", "bfloat16", 2 * ROWS * HIDDEN * width), ("addmm", "bfloat16", down)]


def cast(num_elements: int, to: str) -> tuple[str, str, int]:
    """Returns the cast of float32 to bfloat16, or back: one side has 4 bytes an element, the other 2."""
    return "_to_copy", to, 6 * num_elements


# rows read, scale and shift; rows written, with a mean and a deviation for each
NORM_ELEMENTS = 2 * ROWS * WIDTH + 2 * WIDTH

CONVERTED = [
    ("native_layer_norm", "bfloat16", 2 * NORM_ELEMENTS + 2 * 2 * ROWS),  # CPUs keep the means of bfloat16 in it
    *products(2),
    ("_softmax", "bfloat16", 2 * 2 * ROWS * WIDTH),
]
UP, GELU, DOWN = products(2)
CAST_UP, CAST_DOWN = (
    [cast(rows * width, "bfloat16"), cast(HIDDEN * WIDTH, "bfloat16"), cast(bias, "bfloat16")]
    for rows, width, bias in ((ROWS, WIDTH, HIDDEN), (0, 0, WIDTH))
)
MIXED = [  # weights and inputs stay float32 and are cast where they are read
    ("native_layer_norm", "float32", 4 * NORM_ELEMENTS + 2 * 4 * ROWS),
    *CAST_UP,
    UP,
    GELU,
    *CAST_DOWN[1:],
    DOWN,
]
BY_HAND = {
    "bfloat16": CONVERTED,
    "dtype": CONVERTED,
    # CUDA's list has softmax in float32, the CPU's list does not have it: it stays in the type of its input
    "autocast cuda": [*MIXED, cast(ROWS * WIDTH, "float32"), ("_softmax", "float32", 2 * 4 * ROWS * WIDTH)],
    "autocast cpu": [*MIXED, ("_softmax", "bfloat16", 2 * 2 * ROWS * WIDTH)],
}

MODULE = """
import torch
from test_precision import Net, data

def plain():
    return Net(), data()

def converted():
    return Net().bfloat16(), tuple(x.bfloat16() for x in data())

def autocast_cuda():
    return Net("cuda"), data()

def autocast_cpu():
    return Net("cpu"), data()
"""


@pytest.fixture(autouse=True)
def _module(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the models of the tests."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (workplace / "nets_of_types.py").write_text(MODULE)


def test_four_ways_to_bfloat16() -> None:
    """Products have the bytes and the rate of bfloat16 in each way; the casts and the softmax are PyTorch's."""
    ways = {
        "bfloat16": ModelSource("nets_of_types:converted", Reading(training=False)).whole(),
        "dtype": ModelSource("nets_of_types:plain", Reading(training=False, dtype="bfloat16")).whole(),
        "autocast cuda": ModelSource("nets_of_types:autocast_cuda", Reading(training=False)).whole(),
        "autocast cpu": ModelSource("nets_of_types:autocast_cpu", Reading(training=False)).whole(),
    }
    assert ways["bfloat16"].graph.fingerprint == ways["dtype"].graph.fingerprint
    for way, model in ways.items():
        assert sorted(rows_of(model.graph)) == sorted(BY_HAND[way]), way
        times_ns = op_times(model.graph, at_sheets(Cluster.parse("1xa100-sxm-80g")))[:, 0]
        # 2 x 8192 x 1024 x 4096 FLOPs and 8192 x 4096 sums at 312 TFLOP/s take 220.4 us, more than their 92.3 MB at
        # 2039 GB/s (45.3 us); 5 us to launch. The second product has a fourth of the sums
        first, second = (time for time, kind in zip(times_ns.tolist(), model.graph.kinds, strict=True) if "mm" in kind)
        assert first == 5_000 + -(-(2 * ROWS * WIDTH * HIDDEN + ROWS * HIDDEN) // 312_000), way
        assert second == 5_000 + -(-(2 * ROWS * WIDTH * HIDDEN + ROWS * WIDTH) // 312_000), way


class Autocast(nn.Module):
    """A model under autocast."""

    def __init__(self, model: nn.Module, device: str) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, **inputs: Any) -> Any:
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(**inputs)


def test_five_ways_to_a_llama_in_bfloat16() -> None:
    """Config, option and method differ in buffers alone, which Transformers keeps in float32; under autocast weights
    are float32 as well, and products have the types and bytes of the others."""
    pytest.importorskip("transformers")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    for name, dtype in {"plain": "float32", "half": "bfloat16"}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    sizes = "?batch=2&sequence=16"
    pure = Reading(precision="pure-bf16")
    by_config = ModelSource(f"hf:half{sizes}", pure).whole().graph
    assert ModelSource(f"hf:plain{sizes}", pure).whole().graph.fingerprint == by_config.fingerprint

    def converted_by(convert: Callable[[nn.Module], nn.Module]) -> Graph:
        def made() -> Any:
            from gdp.models.hugging_face import build

            model, args, inputs = build.builder(f"hf:plain{sizes}")()
            return convert(model), args, inputs

        return capture_fn(made, name="made").graph

    def of_products(graph: Graph) -> list[tuple[str, str, int]]:
        return [row for row in rows_of(graph) if row[0] in ("mm", "bmm", "addmm") or "attention" in row[0]]

    by_method = converted_by(lambda model: model.bfloat16())
    # the rotary angles are a product in float32 in all: the model casts for it, outside of autocast
    assert of_products(by_method) == of_products(by_config)
    # the head width is 8: 4 frequencies in each of two buffers, of 2 bytes instead of 4
    assert by_config.resident_bytes.sum() - by_method.resident_bytes.sum() == 2 * 4 * (4 - 2)
    for device in ("cuda", "cpu"):
        mixed = converted_by(lambda model, device=device: Autocast(model, device))  # type: ignore[misc]
        assert of_products(mixed) == of_products(by_config), device
        # parameters and their two moments have 4 bytes instead of 2, buffers have the same
        buffers = 2 * 4 * 4
        assert mixed.resident_bytes.sum() - buffers == 2 * (by_config.resident_bytes.sum() - buffers), device
    with pytest.raises(InputError, match="dtype is given twice"):
        ModelSource(f"hf:plain{sizes}&dtype=float16", Reading(dtype="bfloat16")).whole()


def test_lists_of_autocast() -> None:
    """The lists are those in the header that comes with PyTorch, and no operator of CUDA's autocast is left over."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def listed(macro: str) -> set[str]:
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", header)
        assert body is not None
        return set(re.findall(r"_\((\w+)", body[1]))

    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    short = {name.removeprefix("aten::").partition(".")[0] for name in registered}
    assert listed("FP32") == autocast.FLOAT32 & short  # older versions lack some
    assert listed("FP32_SET_OPT_DTYPE") == autocast.FLOAT32_RESULT
    assert listed("PROMOTE") == autocast.WIDEST
    lower = short - (autocast.FLOAT32 | autocast.FLOAT32_RESULT | autocast.WIDEST | {"norm", "binary_cross_entropy"})
    more = {
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "_cudnn_rnn",
    }  # the last one is listed by newer versions
    assert lower | more == listed("LOWER_PRECISION_FP") | more


HALF = torch.bfloat16
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "mm of float64": lambda x: x.double() @ x.double(),
    "softmax": lambda x: x.to(HALF).softmax(-1),
    "softmax, type given": lambda x: x.softmax(-1, dtype=torch.float16),
    "sum of half": lambda x: x.to(HALF).sum(0),
    "mean of half": lambda x: x.to(HALF).mean(),
    "norm": lambda x: torch.ops.aten.norm.Scalar(x.to(HALF)),
    "norm over a dimension": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x.to(HALF), 2, [0]),
    "power": lambda x: x.to(HALF) ** 2,
    "layer norm": lambda x: functional.layer_norm(x.to(HALF), (4,)),
    "gelu": lambda x: functional.gelu(x.to(HALF)),
    "addcmul of halves": lambda x: torch.addcmul(x.to(HALF), x.to(HALF), x.to(HALF)),
    "addcmul of both": lambda x: torch.addcmul(x.to(HALF), x, x.to(HALF)),
    "cross entropy": lambda x: functional.cross_entropy(x.to(HALF), torch.zeros(4, dtype=torch.int64, device=x.device)),
    "cat of both": lambda x: torch.cat([x, x.to(HALF)]),
}


def test_types_under_autocast() -> None:
    """PyTorch's own autocast works on fake tensors of a card: the same functions give the same types here."""

    def types(device: str) -> dict[str, torch.dtype]:
        with FakeTensorMode():
            x = torch.empty(4, 4, device=device)
            with torch.autocast("cuda", HALF):
                return {name: function(x).dtype for name, function in FUNCTIONS.items()}

    with (
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.cuda, "is_bf16_supported", lambda: True),
    ):
        expected = types("cuda")
    with as_if_on_a_card():
        assert types("cpu") == expected
    assert {torch.float16, torch.float64, torch.bfloat16} <= set(expected.values())


class Tied(nn.Module):
    """An embedding whose table is the weight of the product as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.table(tokens) + torch.ones(4, device=self.head.weight.device))
        return y


def _default_device() -> Any:
    torch.set_default_device("cuda")
    return Tied(), torch.zeros(3, dtype=torch.int64)


def _device_context() -> Any:
    with torch.device("cuda:0"):
        return Tied(), torch.zeros(3, dtype=torch.int64)


CARDS: dict[str, Callable[[], Any]] = {
    "cuda()": lambda: (Tied().cuda(), torch.zeros(3, dtype=torch.int64).cuda(non_blocking=True)),
    "to(name)": lambda: (Tied().to("cuda"), torch.zeros(3, dtype=torch.int64).to("cuda:1")),
    "to(number)": lambda: (Tied().to(0), torch.zeros(3, dtype=torch.int64).pin_memory().to(device=1)),
    "to(device)": lambda: (Tied().to(torch.device("cuda")), torch.zeros(3, dtype=torch.int64, device="cuda")),
    "default": _default_device,
    "context": _device_context,
}


@pytest.mark.parametrize("way", CARDS)
def test_models_that_ask_for_a_card(way: str) -> None:
    """Every way to name a card gives the graph of the plain model, and leaves the default device as it was."""

    def build(make: Callable[[], Any]) -> Capture:
        def pair() -> Any:
            model, tokens = make()
            return model, (tokens,)

        return capture_fn(pair, name="tied")

    plain = build(lambda: (Tied(), torch.zeros(3, dtype=torch.int64)))
    assert build(CARDS[way]).graph.fingerprint == plain.graph.fingerprint
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double"])
def test_tied_weights_stay_tied(convert: str) -> None:
    """A table of 10 x 4 that is tied stays one parameter, with its moments, in the new type."""
    captured = capture_fn(lambda: (getattr(Tied(), convert)(), (torch.zeros(3, dtype=torch.int64),)), name="tied")
    width = {"bfloat16": 2, "half": 2, "double": 8}[convert]
    parameters = [op for op, kind in enumerate(captured.graph.kinds) if kind == "parameter"]
    assert [int(captured.graph.resident_bytes[op]) for op in parameters] == [3 * 40 * width]


class Checkpointed(nn.Module):
    """A part that runs again in the backward pass, under autocast; `lead` is a trainable layer before it."""

    def __init__(self, use_reentrant: bool, lead: bool = True) -> None:
        super().__init__()
        self.lead = nn.Linear(8, 8) if lead else nn.Identity()
        self.part, self.use_reentrant = nn.Linear(8, 8), use_reentrant

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return checkpoint(self.part, self.lead(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_under_autocast(use_reentrant: bool) -> None:
    """Two products forward, three backward (the input gets no gradient), and the last again, none in float32.

    Without re-entrance it stops before that product: its input and weight are all that the backward pass reads.
    """
    captured = capture(Checkpointed(use_reentrant), (torch.randn(2, 8),), name="again")
    types = [dtype for kind, dtype in zip(captured.graph.kinds, captured.graph.dtypes, strict=True) if "mm" in kind]
    assert types == ["bfloat16"] * (6 if use_reentrant else 5)


class ByDevice(nn.Module):
    """A norm in the type of the region that the device of its input is in, as timm's and Transformers' code asks."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            device = x.device.type
            x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
            with torch.autocast(device_type=device, enabled=False):
                x = nn.functional.layer_norm(x, (8,))
            return x @ x.mT


def test_code_that_asks_for_the_device_under_autocast() -> None:
    """A region of the device of a tensor is one of the card in a region of the card, and none elsewhere."""
    graph = capture(ByDevice(), (torch.randn(4, 8),), training=False).graph
    assert [dtype for kind, dtype in zip(graph.kinds, graph.dtypes, strict=True) if "norm" in kind] == ["bfloat16"]
    assert torch.is_autocast_enabled("cuda") is torch.is_autocast_enabled("cpu") is False


def test_checkpoints_that_cut_gradients() -> None:
    """A checkpoint that cuts off all gradients is named."""
    with pytest.raises(InputError, match=r"use_reentrant=True.* gets no input that requires a gradient"):
        capture(Checkpointed(True, lead=False), (torch.randn(2, 8),), name="cut")


class Flex(nn.Module):
    """Attention with a bias by distance and a causal mask, made by flex_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu")
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (j - i), block_mask=mask)


class Small(nn.Module):
    """A product on a card, under autocast of the device of its input, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to("cuda")
        with torch.autocast(x.device.type, torch.bfloat16):
            y: Tensor = self.norm(self.linear(x))
        assert y.dtype is torch.float32, "autocast of a card has layer norms in float32, that of the CPU has not"
        return y.square().mean()


@pytest.mark.parametrize(("model", "x"), [(Small(), torch.randn(4, 8)), (Flex(), torch.randn(2, 32, 16))])
def test_results_as_on_a_card(model: nn.Module, x: Tensor) -> None:
    """`gdp run` executes it on the CPU, and compares it with the model's own step: bit for bit."""
    captured = capture(model, (x,), name="step")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as `eager_parts` does: more threads add in another order
    try:
        replayed = captured.program.replay(model, (x,))
    finally:
        torch.set_num_threads(num_threads)
    equality = compare(replayed, eager_parts(captured.program, model, [((x,), {})]))
    assert equality.is_exact, equality


def test_notes() -> None:
    """One note for each: fusion, replicas, the LSTM kernel of CPUs, flex_attention; a plain model has none."""
    x = torch.randn(2, 8)
    models = {
        "torch.compile": (torch.compile(nn.Linear(8, 8), backend="eager"), x),
        "nn.DataParallel": (nn.DataParallel(nn.Linear(8, 8)), x),
        "nn.GRU or nn.RNN is one op": (nn.LSTM(8, 4), torch.randn(3, 2, 8)),
        "whole matrix of scores": (Flex(), torch.randn(2, 32, 16)),
    }
    for words, (model, example) in models.items():
        (note,) = capture(model, (example,), name="noted").notes  # type: ignore[arg-type]
        assert words in note
    assert capture(nn.Linear(8, 8), (x,), name="plain").notes == ()


@pytest.mark.parametrize(
    ("dtype", "text", "words"),
    [
        ("int4", "nets_of_types:plain", "dtype is 'int4'; one of float32, bfloat16"),
        ("bfloat16", "graph.json.gz", "graph.json.gz is a graph, whose ops have their types"),
        ("bfloat16", "net.onnx", "net.onnx has its types in it"),
    ],
)
def test_bad_types(dtype: str, text: str, words: str) -> None:
    """A type that the model cannot have is refused."""
    with pytest.raises(InputError, match=re.escape(words)):
        ModelSource(text, Reading(dtype=dtype)).whole()
