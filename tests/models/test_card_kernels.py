"""Ops are captured, and cost, as a card runs them, wherever PyTorch has other code for CPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.reported import at_sheets
from gdp.cluster import Cluster
from gdp.costs.op_times import op_times
from gdp.execute.equality import compare, eager_parts
from gdp.models.pytorch import Capture, capture

IDS = torch.zeros(4, 5, dtype=torch.long)


class Calls(nn.Module):
    """A function of a parameter of this shape and the inputs."""

    def __init__(self, function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.zeros(*shape, dtype=dtype))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.weight, *inputs)


def costs(captured: Capture, kind: str) -> list[tuple[int, int]]:
    """(FLOPs, bytes) of each op of a kind."""
    graph = captured.graph
    amounts = zip(graph.kinds, graph.flops.tolist(), graph.bytes_accessed.tolist(), strict=True)
    return [(flops, num_bytes) for name, flops, num_bytes in amounts if name == f"aten.{kind}"]


@pytest.mark.parametrize(
    ("mode", "others"),
    [("sum", 2 * 32), ("mean", 2 * 32 + 160), ("max", 32 + 160 + 4 * 8 * 8)],  # sizes, bags of ids, maxima
)
def test_bags_read_rows(mode: str, others: int) -> None:
    """4 bags of 5 rows of 8 floats: 640 bytes, ids 160, offsets 32, 128 of results, and what the mode keeps."""
    bag = nn.EmbeddingBag(1000, 8, mode=mode)
    assert costs(capture(bag, (IDS,), training=False), "_embedding_bag") == [(20 * 8, 640 + 160 + 32 + 128 + others)]
    (forward,) = costs(capture(bag, (IDS,)), "_embedding_bag")
    assert forward == (20 * 8, 640 + 160 + 32 + 128 + others)


@pytest.mark.parametrize(
    ("options", "inputs", "num_bytes"),
    [
        # 4 offsets of bags, which are found by another op, 4 bags, 2 x 4 sizes and maxima, bags of 20 ids
        ({"padding_idx": 3}, (IDS,), 32 + 128 + 64 + 160),
        ({"padding_idx": 3}, (IDS.flatten(), torch.arange(0, 20, 5)), 32 + 128 + 64 + 160),
        # five offsets, the last is the end
        ({"include_last_offset": True}, (IDS.flatten(), torch.arange(0, 21, 5)), 40 + 128 + 64),
    ],
)
def test_bags_of_other_forms(options: dict[str, Any], inputs: tuple[Tensor, ...], num_bytes: int) -> None:
    """20 rows of 8 floats are 640 bytes, their ids 160, whatever is left out or wherever bags end."""
    captured = capture(nn.EmbeddingBag(1000, 8, mode="sum", **options), inputs, training=False)
    assert costs(captured, "_embedding_bag") == [(20 * 8, 640 + 160 + num_bytes)]


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_embeddings_read_rows(options: dict[str, Any]) -> None:
    """20 rows are read and written with their ids; the gradient of the table is written whole."""
    captured = capture(nn.Embedding(1000, 8, **options), (IDS,))
    assert costs(captured, "embedding") == [(0, 160 + 2 * 640)]
    assert costs(captured, "embedding_dense_backward") == [(20 * 8, 640 + 160 + 32000)]
    assert len(costs(captured, "embedding_renorm_")) == ("max_norm" in options)


def test_weighted_bags_read_rows() -> None:
    """Weights of 20 rows: a product more; their gradient reads the rows, and a norm reads and writes them."""

    def function(weight: Tensor, table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return functional.embedding_bag(ids, table, offsets, max_norm=1.0, mode="sum", per_sample_weights=weight)

    captured = capture(Calls(function, 20), (torch.zeros(1000, 8), IDS.flatten(), torch.arange(0, 20, 5)))
    rows, ids, offsets, bags = 640, 160, 32, 128
    (forward,) = costs(captured, "_embedding_bag")
    assert forward == (2 * 20 * 8, rows + ids + offsets + 80 + bags + 2 * 32)  # weights, sizes
    assert costs(captured, "embedding_renorm_") == [(3 * 20 * 8, 2 * rows + ids)]
    (backward,) = costs(captured, "_embedding_bag_per_sample_weights_backward")
    assert backward == (2 * 20 * 8, bags + rows + ids + offsets + 80)


def set_columns(table: Tensor, number: float) -> Tensor:
    table[:, IDS[0]] = number
    return table


ROWS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # of a table [1000, 8]; 5 ids are 40 bytes, a row 32
    "embedding": (lambda w: functional.embedding(IDS[0], w), 40 + 2 * 160),
    "index_select": (lambda w: w.index_select(0, IDS[0]), 40 + 2 * 160),
    "index": (lambda w: w[IDS[0]], 40 + 2 * 160),
    "gather": (lambda w: w.gather(0, IDS), 160 + 2 * 80),
    "take": (lambda w: w.take(IDS), 160 + 2 * 80),
    "put_": (lambda w: w.put_(IDS, torch.ones(4, 5)), 160 + 80 + 80),
    "index_fill_": (lambda w: w.index_fill_(0, IDS[0], 1.0), 40 + 160),
    "index_copy_": (lambda w: w.index_copy_(0, IDS[0], torch.ones(5, 8)), 40 + 2 * 160),
    "index_add_": (lambda w: w.index_add_(0, IDS[0], torch.ones(1, 8).expand(5, 8)), 40 + 32 + 2 * 160),
    "index_reduce_": (lambda w: w.index_reduce_(0, IDS[0], torch.ones(5, 8), "amax"), 40 + 3 * 160),
    "index_put_": (lambda w: w.index_put_((IDS[0],), torch.zeros(())), 40 + 4 + 160),
    "index_put_ columns": (lambda w: set_columns(w, 0.0), 40 + 4 + 4 * 1000 * 5),
    "scatter_": (lambda w: w.scatter_(0, IDS, 1.0), 160 + 80),
    "scatter_add_": (lambda w: w.scatter_add_(0, IDS, torch.ones(4, 5)), 160 + 80 + 2 * 80),
    "scatter_reduce_": (lambda w: w.scatter_reduce_(0, IDS, torch.ones(4, 5), "amax"), 160 + 80 + 2 * 80),
    "index_put_ sums": (lambda w: w.index_put_((IDS[0],), torch.ones(5, 8), accumulate=True), 40 + 160 + 2 * 160),
    "index of two dimensions": (lambda w: w[IDS[0], IDS[0]], 40 + 2 * 20),
    "gather along a dimension": (lambda w: w.take_along_dim(IDS[0, :, None], 0), 320 + 2 * 160),  # an index each
    "segment_reduce": (  # all rows, two lengths, two sums
        lambda w: torch.segment_reduce(w, "sum", lengths=torch.tensor([500, 500]), unsafe=True),
        32000 + 16 + 64,
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_gathers_and_scatters_touch_rows(case: str) -> None:
    """Ops that index a table move the rows, the indices and the values, not the table."""
    function, num_bytes = ROWS[case]
    captured = capture(Calls(lambda w: function(w.detach()), 1000, 8), training=False)
    ((_, found),) = costs(captured, case.split()[0])
    assert found == num_bytes
    assert not captured.coverage.unknown


def kinds(captured: Capture) -> list[str]:
    """The kinds of ops that compute, in order."""
    graph = captured.graph
    return [kind.removeprefix("aten.") for kind in graph.kinds if kind.startswith("aten.")]


DROPOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether it is one kernel
    "module": (nn.Dropout(0.1), True),
    "function": (lambda x: functional.dropout(x, 0.1), True),
    "all kept": (lambda x: functional.dropout(x, 0.0), False),
    "in place": (lambda x: functional.dropout(x, 0.1, inplace=True), False),  # composed on cards, too
    "of channels": (lambda x: functional.dropout1d(x.reshape(4, 4, 8), 0.1), False),
    "alpha": (lambda x: functional.alpha_dropout(x, 0.1, training=True), False),
    "of images": (lambda x: functional.dropout2d(x.reshape(1, 4, 4, 8), 0.1), False),
    "alpha of channels": (lambda x: functional.feature_alpha_dropout(x.reshape(4, 4, 8), 0.1, training=True), False),
}


@pytest.mark.parametrize("case", DROPOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_one_kernel(case: str, dtype: torch.dtype) -> None:
    """16 x 8 elements: in, out and a mask of a byte each; backward as much; channels and alpha are composed."""
    function, is_fused = DROPOUTS[case]
    model = Calls(lambda w, x: function(x @ w), 8, 8, dtype=dtype)
    captured = capture(model, (torch.zeros(16, 8, dtype=dtype),))
    size = 16 * 8 * (2 * dtype.itemsize + 1)
    assert costs(captured, "native_dropout") == ([(3 * 128, size)] if is_fused else [])
    assert costs(captured, "native_dropout_backward") == ([(128, size)] if is_fused else [])
    assert ("bernoulli_" in kinds(captured)) == (not is_fused and case != "all kept")


def test_dropout_keeps_a_byte() -> None:
    """A mask of [1024, 1024] is 1 MiB beside activations of 4 MiB, also in a layer of Transformers."""
    captured = capture(nn.Sequential(nn.Linear(1024, 1024), nn.Dropout(0.1)), (torch.zeros(1024, 1024),))
    graph = captured.graph
    op = graph.kinds.index("aten.native_dropout")
    assert sorted(graph.tensor_bytes[graph.producers == op].tolist()) == [2**20, 2**22]
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert kinds(capture(layer, (torch.zeros(2, 4, 8),))).count("native_dropout") == 3  # and one inside attention


@pytest.mark.parametrize(("share", "training"), [(0.1, False), (0.0, True), (0.0, False)])
def test_dropout_of_nothing_is_no_kernel(share: float, training: bool) -> None:
    """Dropout in evaluation, or of a share of 0, gives its input back and copies nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(share)).train(training)
    assert kinds(capture(model, (torch.zeros(4, 8),))).count("clone") == 0


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (nn.Dropout(0.1), "the model is in training mode: dropout is drawn; call .eval()"),
        (nn.Dropout(0.1).eval(), None),
        (nn.Dropout(0.0), None),
        (nn.Linear(8, 8), None),
        (nn.TransformerEncoderLayer(8, 2, 16), "dropout is drawn"),
        (nn.BatchNorm1d(4), "batch norms take the batch's statistics"),
    ],
)
def test_models_left_in_training_mode(model: nn.Module, note: str | None) -> None:
    """Inference says once that a model draws dropout or counts a batch; training does not."""
    notes = capture(nn.Sequential(model), (torch.zeros(3, 4, 8),), training=False).notes
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


NORM_BYTES = 4 * 8 * 2  # of [4, 8] in a half type


@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_are_one_kernel(has_weight: bool) -> None:
    """[4, 8] in bfloat16: in and out, a float32 for each row, the weight; backward in, gradient, out, weight twice."""
    norm = nn.RMSNorm(8, elementwise_affine=has_weight, dtype=torch.bfloat16)
    captured = capture(Calls(lambda w, x: norm(x * w), 8, dtype=torch.bfloat16), (torch.zeros(4, 8).bfloat16(),))
    weight = 16 * has_weight
    assert costs(captured, "_fused_rms_norm") == [(4 * 32, 2 * NORM_BYTES + 16 + weight)]
    assert costs(captured, "_fused_rms_norm_backward") == [(9 * 32, 3 * NORM_BYTES + 16 + 2 * weight)]


LAYERS: dict[str, tuple[nn.Module, str, tuple[int, int], tuple[int, int]]] = {  # of [4, 8, 6], forward and backward
    # in and out 768 each, weight and bias 32 each, means and deviations of 4 x 2 groups; the input has no gradient
    "group norm": (nn.GroupNorm(2, 8), "native_group_norm", (8 * 192, 2 * 768 + 128), (13 * 192, 2 * 768 + 160)),
    # ... of the batch; running means and deviations are read and written; backward reads them, and writes three
    "batch norm": (
        nn.BatchNorm1d(8),
        "native_batch_norm",
        (8 * 192, 2 * 768 + 64 + 64 + 128),
        (13 * 192, 3 * 768 + 224),
    ),
    # v of 16 x 6 is 384 bytes, g and the norms of rows 64 each, w as v
    "weight norm": (
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 16)),
        "_weight_norm_interface",
        (3 * 96, 2 * 384 + 128),
        (5 * 96, 3 * 384 + 3 * 64),
    ),
    # of columns: v of 6 x 16, g and the norms 24 each
    "weight norm of columns": (
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 16), dim=1),
        "_weight_norm_interface",
        (3 * 96, 2 * 384 + 48),
        (5 * 96, 3 * 384 + 3 * 24),
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_other_norms_are_one_kernel(case: str) -> None:
    """Norms that have one kernel on CPUs and cards cost what that reads and writes."""
    layer, kind, forward, backward = LAYERS[case]
    captured = capture(layer, (torch.ones(4, 8, 6),))
    assert costs(captured, kind) == [forward]
    assert costs(captured, f"{kind}_backward") == [backward]


CELLS: dict[str, tuple[nn.Module, list[str], int, int]] = {  # kernel, FLOPs and bytes for 4 x 32 states
    # gates of input and state 2 x 3 x 128, state, output, 5 x 128 kept, two biases of 96
    "gru": (nn.GRUCell(16, 32), ["mm", "mm", "_thnn_fused_gru_cell"], 16 * 128, 4 * (13 * 128 + 192)),
    "gru without biases": (
        nn.GRUCell(16, 32, bias=False),
        ["mm", "mm", "_thnn_fused_gru_cell"],
        16 * 128,
        4 * 13 * 128,
    ),
    # gates 2 x 4 x 128, cell, both states, 4 x 128 kept, two biases of 128
    "lstm": (nn.LSTMCell(16, 32), ["mm", "mm", "_thnn_fused_lstm_cell"], 21 * 128, 4 * (15 * 128 + 256)),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells_are_two_products_and_a_kernel(case: str) -> None:
    """Cells of recurrent nets run as on a card: the kernel adds the biases."""
    cell, expected, flops, num_bytes = CELLS[case]
    captured = capture(cell, (torch.zeros(4, 16),), training=False)
    assert [kind for kind in kinds(captured) if kind != "zeros"] == expected
    assert costs(captured, expected[-1]) == [(flops, num_bytes)]
    assert not captured.coverage.unknown


def test_log_sigmoid_keeps_its_input() -> None:
    """[4, 8]: in and out; backward the gradient, the input and its gradient; CPUs alone keep a buffer."""
    captured = capture(Calls(lambda w: functional.logsigmoid(w), 4, 8))
    assert costs(captured, "log_sigmoid_forward") == [(32, 2 * 128)]
    assert costs(captured, "log_sigmoid_backward") == [(32, 3 * 128)]


class Unrolled(nn.Module):
    """Two steps of a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x)
        hidden: Tensor = state[0] if isinstance(state, tuple) else state
        again = self.cell(x, state)
        return (hidden * (again[0] if isinstance(again, tuple) else again)).sum()


class First(nn.Module):
    """The outputs of a recurrent net."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(x.unsqueeze(1))[0]
        return output


EXECUTED: dict[str, Callable[[], nn.Module]] = {
    "rms norm": lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16)),
    "rms norm of two dimensions": lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm((4, 16))),
    "rms norm without weight": lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16, elementwise_affine=False)),
    "gru cell": lambda: Unrolled(nn.GRUCell(16, 8)),
    "gru cell without biases": lambda: Unrolled(nn.GRUCell(16, 8, bias=False)),
    "lstm cell": lambda: Unrolled(nn.LSTMCell(16, 8)),
    "lstm cell without biases": lambda: Unrolled(nn.LSTMCell(16, 8, bias=False)),
    "gru": lambda: First(nn.GRU(16, 8, 2)),
    "gru without biases": lambda: First(nn.GRU(16, 8, bias=False)),
    "rnn": lambda: First(nn.RNN(16, 8)),
    "log sigmoid": lambda: nn.Sequential(nn.Linear(16, 16), nn.LogSigmoid()),
    "embedding bag": lambda: Calls(lambda w, x: functional.embedding_bag(x.argmax(1).reshape(2, 2), w), 16, 8),
}


@pytest.mark.parametrize("case", EXECUTED)
def test_cpus_compute_what_cards_do(case: str) -> None:
    """A captured step has the bits of the model's own as on a card, and is close to the one of plain PyTorch."""
    torch.manual_seed(0)
    model, x = EXECUTED[case](), torch.randn(4, 16)
    captured = capture(model, (x,), loss=weighted)
    replayed = captured.program.replay(model, (x,))
    assert compare(replayed, eager_parts(captured.program, model, [((x,), {})], weighted)).is_exact
    loss = weighted(model(x))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(replayed.loss, loss.detach())
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(replayed.gradients[name], gradient, rtol=1e-4, atol=1e-5)


def weighted(output: Tensor) -> Tensor:
    return (output * torch.arange(output.numel()).reshape(output.shape)).mean()


M, K, N = 64, 128, 256
FP8, BF16, INT8 = torch.float8_e4m3fn, torch.bfloat16, torch.int8


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def ends() -> Tensor:
    return torch.zeros(4, dtype=torch.int32)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones(())
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=BF16)


def scaled_rows(a: Tensor, b: Tensor) -> Tensor:
    by_row = functional.ScalingType.RowWise
    return functional.scaled_mm(
        a, b.t(), torch.ones(M, 1), by_row, torch.ones(1, N), by_row, output_dtype=torch.bfloat16
    )


def scaled_groups(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(a, b.mT, torch.ones(M), torch.ones(4, N), offs=offs, out_dtype=BF16)


def scaled_groups_by_name(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    by_row = functional.ScalingType.RowWise
    return functional.scaled_grouped_mm(
        a, b.mT, torch.ones(M), by_row, torch.ones(4, N), by_row, offs=offs, output_dtype=BF16
    )


def fp4(a: Tensor, b: Tensor) -> Tensor:
    return torch._scaled_mm(
        a, b.t(), scale_a=zeros(128 * 8, dtype=FP8), scale_b=zeros(256 * 8, dtype=FP8), out_dtype=BF16
    )


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {  # and the type of the arithmetic
    "mm": (torch.mm, (zeros(M, K), zeros(K, N)), "bfloat16"),
    "mm int8": (torch.mm, (zeros(M, K, dtype=INT8), zeros(K, N, dtype=INT8)), "int8"),
    "mm of halves": (torch.inner, (zeros(M, K, dtype=torch.half), zeros(N, K, dtype=torch.half)), "float16"),
    "bmm": (lambda a, b: torch.einsum("mk,kn->mn", a, b), (zeros(M, K), zeros(K, N)), "bfloat16"),
    "mm wide": (lambda a, b: torch.mm(a, b, out_dtype=torch.float32), (zeros(M, K), zeros(K, N)), "bfloat16"),
    "_scaled_mm": (scaled, (zeros(M, K, dtype=FP8), zeros(N, K, dtype=FP8)), "float8_e4m3fn"),
    "_scaled_mm e5m2": (scaled, (zeros(M, K, dtype=torch.float8_e5m2), zeros(N, K, dtype=FP8)), "float8_e5m2"),
    "_scaled_mm fp4": (
        fp4,
        tuple(torch.empty(n, K // 2, dtype=torch.float4_e2m1fn_x2) for n in (M, N)),
        "float4_e2m1fn_x2",
    ),
    "_scaled_mm_v2": (scaled_rows, (zeros(M, K, dtype=FP8), zeros(N, K, dtype=FP8)), "float8_e4m3fn"),
    "_scaled_grouped_mm": (scaled_groups, (zeros(M, K, dtype=FP8), zeros(4, N, K, dtype=FP8), ends()), "float8_e4m3fn"),
    "_scaled_grouped_mm_v2": (
        scaled_groups_by_name,
        (zeros(M, K, dtype=FP8), zeros(4, N, K, dtype=FP8), ends()),
        "float8_e4m3fn",
    ),
    "_grouped_mm": (
        lambda a, b, offs: functional.grouped_mm(a, b, offs=offs),
        (zeros(M, K), zeros(4, K, N), ends()),
        "bfloat16",
    ),
    "_int_mm": (torch._int_mm, (zeros(M, K, dtype=INT8), zeros(K, N, dtype=INT8)), "int8"),
    "_weight_int8pack_mm": (torch._weight_int8pack_mm, (zeros(M, K), zeros(N, K, dtype=INT8), zeros(N)), "bfloat16"),
    "_weight_int4pack_mm": (
        lambda a, b, s: torch._weight_int4pack_mm(a, b, 32, s),
        (zeros(M, K), zeros(N // 8, K // 128, 32, 4, dtype=torch.int32), zeros(K // 32, N, 2)),
        "bfloat16",
    ),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_run_at_the_rate_of_their_operands(case: str) -> None:
    """[64, 128] @ [128, 256] is 2 x 64 x 128 x 256 FLOPs in the type of what is multiplied, not of the result."""
    function, inputs, dtype = PRODUCTS[case]
    captured = capture(Calls(lambda _, *args: function(*args), 1), inputs, training=False)
    graph = captured.graph
    op = graph.kinds.index(f"aten.{case.split()[0]}")
    assert (graph.flops[op], graph.dtypes[op]) == (2 * M * K * N, dtype)
    assert not captured.coverage.unknown


def test_wide_sums_and_lists_of_products() -> None:
    """Two products of 2 MKN FLOPs and MN sums; of lists, one op each; types of the operands throughout."""
    batch = zeros(2, M, K), zeros(2, K, N)
    captured = capture(Calls(lambda _, c, a, b: torch.addbmm(c, a, b), 1), (zeros(M, N), *batch), training=False)
    assert [flops for flops, _ in costs(captured, "addbmm")] == [2 * 2 * M * K * N + M * N]
    wide = zeros(M, N, dtype=torch.float32)
    if hasattr(torch.ops.aten.baddbmm, "dtype"):
        for function, name in ((torch.addmm, "addmm"), (torch.baddbmm, "baddbmm")):
            inputs = (wide, *(item[0] for item in batch)) if name == "addmm" else (wide.expand(2, M, N), *batch)
            model = Calls(lambda _, c, a, b, f=function: f(c, a, b, out_dtype=torch.float32), 1)
            captured = capture(model, inputs, training=False)
            count = 1 if name == "addmm" else 2
            assert [flops for flops, _ in costs(captured, name)] == [count * (2 * M * K * N + M * N)]
            assert captured.graph.dtypes[captured.graph.kinds.index(f"aten.{name}")] == "bfloat16"
    captured = capture(Calls(lambda _, a, b: torch.bmm(a, b, out_dtype=torch.float32), 1), batch, training=False)
    assert captured.graph.dtypes[captured.graph.kinds.index("aten.bmm")] == "bfloat16"
    if not hasattr(torch.ops.aten, "_foreach_mm"):
        return  # PyTorch 2.10 has none
    lists = [zeros(M, K)] * 2, [zeros(K, N)] * 2
    captured = capture(Calls(lambda _: torch.ops.aten._foreach_mm(*lists), 1), training=False)
    assert [flops for flops, _ in costs(captured, "_foreach_mm")] == [2 * M * K * N] * 2


def test_integers_have_their_types() -> None:
    """Buffers and ops without floats have the type of their elements."""
    inputs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.bool)
    graph = capture(Calls(lambda _, a, b, c: ((a + a, b + b), c & (a > 0)), 1), inputs, training=False).graph
    names = dict(zip(graph.op_names, graph.dtypes, strict=True))
    assert sorted(names.values()) == ["bool"] * 3 + ["float32"] + ["int32"] * 2 + ["uint8"] * 2


def test_small_products_take_the_time_of_their_rate() -> None:
    """8192 cubed on an H100: 2 x 8192 ** 3 / 1,979 T a second, 0.556 ms; INT8 on an A100 at 624 T, 1.762 ms."""
    size = 8192
    fp8 = zeros(size, size, dtype=FP8)
    int8 = zeros(size, size, dtype=INT8)
    cases: list[tuple[Any, Tensor, str, int]] = [
        (scaled, fp8, "h100-sxm-80g", 1979),
        (torch._int_mm, int8, "h100-sxm-80g", 1979),
        (torch._int_mm, int8, "a100-sxm-80g", 624),
        (scaled, fp8, "l4-24g", 242),
    ]
    for function, operand, card, tera in cases:
        graph = capture(Calls(lambda _, a, b, f=function: f(a, b), 1), (operand, operand), training=False).graph
        times = op_times(graph, at_sheets(Cluster.parse(card)))
        assert times.max() == pytest.approx(2 * size**3 / tera / 1000, rel=0.03)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], torch.dtype, int, int]] = {  # gates, and ops of a layer each
    "lstm": (lambda: nn.LSTM(16, 32, 2), torch.float32, 4, 2),
    "lstm without biases": (lambda: nn.LSTM(16, 32, 2, bias=False), torch.float32, 4, 2),
    "lstm both ways": (lambda: nn.LSTM(16, 32, bidirectional=True), torch.float32, 4, 2),
    "lstm in a half type": (lambda: nn.LSTM(16, 32, 2, batch_first=True), torch.bfloat16, 4, 2),
    "lstm in float64": (lambda: nn.LSTM(16, 32), torch.float64, 4, 1),
    "gru": (lambda: nn.GRU(16, 32), torch.float32, 3, 1),
    "gru in a half type": (lambda: nn.GRU(16, 32, 2), torch.float16, 3, 2),
    "gru both ways": (lambda: nn.GRU(16, 32, bidirectional=True), torch.float32, 3, 2),
    "rnn": (lambda: nn.RNN(16, 32, batch_first=True), torch.float32, 1, 1),
    "rnn with relu": (lambda: nn.RNN(16, 32, nonlinearity="relu", bias=False), torch.bfloat16, 1, 1),
}


@pytest.mark.parametrize("case", NETWORKS)
@pytest.mark.parametrize("is_trained", [False, True])
def test_layers_are_one_op(case: str, is_trained: bool) -> None:
    """First layers on 4 x 6 steps multiply by 16 + 32 inputs for each gate of 32 units; backward is twice that.

    So they do where their input requires a gradient.
    """
    build, dtype, gates, num_ops = NETWORKS[case]
    network = nn.Sequential(nn.Linear(16, 16), build()).to(dtype) if is_trained else build().to(dtype)
    captured = capture(network, (torch.zeros(4, 6, 16, dtype=dtype),), loss=lambda out: out[0].float().mean())
    forward, backward = costs(captured, "mkldnn_rnn_layer"), costs(captured, "mkldnn_rnn_layer_backward")
    assert len(forward) == len(backward) == num_ops
    assert forward[0][0] == 2 * 24 * (16 + 32) * 32 * gates
    assert [flops for flops, _ in backward[::-1]] == [2 * flops for flops, _ in forward]
    assert not captured.coverage.unknown


GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and bytes of indices and the gradient of rows
    "index_put": (lambda w: w[IDS[0]], 40 + 3 * 160),
    "index_add": (lambda w: w.index_select(0, IDS[0]), 40 + 3 * 160),
    "scatter_add": (lambda w: w.gather(0, IDS), 160 + 3 * 80),
    "put": (lambda w: w.take(IDS), 160 + 3 * 80),
    "scatter": (lambda w: w.topk(1, 1)[0], 8000 + 2 * 4000),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_of_rows_are_written_to_zeros(case: str) -> None:
    """The gradient of a table [1000, 8] is 32,000 bytes of zeros to which rows are added; no second one is made."""
    function, num_bytes = GRADIENTS[case]
    model = Calls(lambda w: (function(w) ** 2).sum(), 1000, 8)
    captured = capture(model)
    graph = captured.graph
    ((_, found),) = [cost for name in (case, f"{case}_") for cost in costs(captured, name)]
    assert found == 32000 + num_bytes
    is_backward = [graph.phases[op] == "backward" for op in graph.producers.tolist()]
    assert (graph.tensor_bytes[is_backward] == 32000).sum() == 1
    replayed = captured.program.replay(model)
    assert compare(replayed, eager_parts(captured.program, model, [((), {})])).is_exact
