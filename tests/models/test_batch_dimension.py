"""The batch dimension of inputs: found by two sizes of it, refused where it is time or a sequence, and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._subclasses.fake_tensor import FakeTensorMode

import gdp
from gdp.errors import InputError
from gdp.models.example import with_batch
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.search.batch_parts import Parts


class Loop(nn.Module):
    """A cell over the dimension `dim` of its input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cell, self.dim = nn.GRUCell(8, 8), dim

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unbind(self.dim)
        h = torch.zeros_like(steps[0])
        for step in steps:
            h = self.cell(step, h)
        return h


class Attention(nn.Module):
    """Attention of an input to itself."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]  # type: ignore[no-any-return]


class Scan(nn.Module):
    """A recurrence by PyTorch's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.linear(state) + row)
            return state, state.clone()

        return scan(step, torch.zeros(x.shape[1], 8), x)[1]  # type: ignore[no-any-return]


class Decay(nn.Module):
    """A recurrence without weights, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for step in self.before(x):
            h = torch.tanh(0.5 * h + step)
        return self.after(h)  # type: ignore[no-any-return]


class Samples(nn.Module):
    """A loop over samples, whose losses are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for sample in x:
            loss = loss + self.layers(sample).square().mean()
        return loss


class Recurrent(nn.Module):
    """A recurrent layer and a head; `swaps`: the input has the batch first, and the layer time."""

    def __init__(self, layer: nn.Module, swaps: bool = False) -> None:
        super().__init__()
        self.layer, self.head, self.swaps = layer, nn.Linear(8, 4), swaps

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = self.layer(x.transpose(0, 1) if self.swaps else x)[0]
        return self.head(hidden)  # type: ignore[no-any-return]


class Pairs(nn.Module):
    """A contrastive loss over all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return torch.nn.functional.cross_entropy(y @ y.T, torch.arange(len(x)))


class Messages(nn.Module):
    """A layer over the edges of a graph [2, E], or of a batch of graphs [batch, E], whose nodes are rows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        y = self.linear(x)
        if x.dim() == 3:
            ends = edges[:, :, None].expand(-1, -1, x.shape[2])
            return torch.zeros_like(x).scatter_add(1, ends, y.gather(1, ends))
        return torch.zeros_like(x).index_add(0, edges[1], y[edges[0]])


class Shuffled(nn.Module):
    """Mixes each sample with another one, and asks a table for words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(100, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear(self.words(tokens))
        return (x + x[torch.randperm(len(x))])[:, torch.tensor([0, 2])]


def seq2seq(batch_first: bool) -> tuple[Any, ...]:
    sizes = [(4, 32, 16), (4, 16, 16)] if batch_first else [(32, 4, 16), (16, 4, 16)]
    return nn.Transformer(16, 2, 1, 1, 32, batch_first=batch_first), tuple(map(torch.randn, sizes))


def encoder(batch_first: bool) -> tuple[Any, ...]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), (
        torch.randn((4, 32, 16) if batch_first else (32, 4, 16)),
    )


def decoder(batch_first: bool) -> tuple[Any, ...]:
    sizes = [(4, 32, 16), (4, 16, 16)] if batch_first else [(32, 4, 16), (16, 4, 16)]
    return nn.TransformerDecoderLayer(16, 2, 32, batch_first=batch_first), tuple(map(torch.randn, sizes))


X = torch.randn(16, 4, 8)
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    # a step has a product with weights and a kernel that adds biases: 2 * 16 ops in a row, of half of the time 2 * 8
    "cell": (lambda: (Loop(0), (X,)), "16 ops with weights follow one another, not 32"),
    "decay": (lambda: (Decay(), (X,)), "follow one another"),
    "lstm": (lambda: (Recurrent(nn.LSTM(8, 8)), (X,)), "8 time steps, not 16"),
    "gru": (lambda: (Recurrent(nn.GRU(8, 8, 2)), (X,)), "time"),
    "lstm with projections": (lambda: (Recurrent(nn.LSTM(8, 16, proj_size=8)), (X,)), "8 time steps, not 16"),
    "scan": (lambda: (Scan(), (X,)), "8 ops with weights follow one another, not 16"),
    "attention": (lambda: (Attention(False), (torch.randn(32, 4, 16),)), "as if a sequence were cut"),
    "decoder": (lambda: decoder(False), "as if a sequence were cut"),
    "seq2seq": (lambda: seq2seq(False), "inputs of other lengths are not cut"),
    "encoder": (lambda: encoder(False), "as if a sequence were cut"),
}
BATCHES: dict[str, Callable[[], Any]] = {
    "cell": lambda: (Loop(1), (X,)),
    "lstm": lambda: (Recurrent(nn.LSTM(8, 8, batch_first=True)), (X,)),
    "swapped": lambda: (Recurrent(nn.LSTM(8, 8), swaps=True), (X,)),
    "gru": lambda: (Recurrent(nn.GRU(8, 8, batch_first=True)), (X,)),
    "samples": lambda: (Samples(), (torch.randn(16, 8),)),
    "pairs": lambda: (Pairs(), (torch.randn(16, 64),)),
    "seq2seq": lambda: seq2seq(True),
    "attention": lambda: (Attention(True), (torch.randn(4, 32, 16),)),
    "decoder": lambda: decoder(True),
    "encoder": lambda: encoder(True),
    "graphs": lambda: (Messages(), (torch.randn(4, 16, 64), torch.zeros(4, 40).long())),
    "shuffled": lambda: (Shuffled(), (torch.zeros(16, 4).long(),)),
}


def source_of(make: Callable[[], Any], **reading: Any) -> ModelSource:
    return ModelSource.of_example(make(), Reading(**reading))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_other_dimensions(name: str) -> None:
    """Parts of time or of a sequence are refused in one line with the remedy, and the second dimension is taken."""
    make, reason = OTHERS[name]
    parts = Parts.of(source_of(make))
    with pytest.raises(InputError, match=reason) as caught:
        parts.exact(2)
    assert "dimension 0 of input.0" in str(caught.value)
    assert "--batch-dim 1" in str(caught.value)
    assert parts.counts(1) == [1]
    for dim, size in ((0, len(make()[1][0])), (1, 4)):  # said: not checked
        named = Parts.of(source_of(make, batch_dim=dim))
        assert named.batch_size == size
        assert named.exact(2).num_ops > 0


def test_nodes_of_a_graph_are_no_batch() -> None:
    """Edges ask for all nodes, so parts of the nodes are refused; of several graphs in one input they are not."""
    x, edges = torch.randn(16, 64), torch.zeros(2, 40).long()
    with pytest.raises(InputError, match=r"index_0 looks up as many rows, of fewer, as edges of a graph do"):
        Parts.of(source_of(lambda: (Messages(), (x, edges)))).exact(2)
    assert Parts.of(source_of(lambda: (Messages(), (x, edges)), batch_dim=0)).exact(2).num_ops > 0


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    """A batch is none of these: loops over samples, recurrences inside, and losses over pairs may be cut."""
    parts = Parts.of(source_of(BATCHES[name]))
    assert parts.exact(2).num_ops > 0
    assert not parts.misread


@pytest.mark.parametrize(("count", "steps"), [(4, "2 time steps, not 4"), (16, "1 time steps, not 2")])
def test_microbatches(count: int, steps: str) -> None:
    """Micro-batches of time are refused, also of one step each, which another size is compared with."""
    with pytest.raises(InputError, match=steps):
        source_of(OTHERS["lstm"][0], microbatches=count).whole()
    assert source_of(OTHERS["lstm"][0], microbatches=4, batch_dim=1).whole().graph.num_ops > 0


def test_batch_dim_is_as_batch_first() -> None:
    """A part along dimension 1 costs what the same part of the model with its batch first does."""
    one, other = (
        Parts.of(source_of(lambda dim=dim: (Loop(dim), (X if dim == 0 else X.transpose(0, 1),)), batch_dim=1 - dim))
        for dim in (0, 1)
    )
    assert one.batch_size == other.batch_size == 4
    assert one.exact(2).flops.sum() == other.exact(2).flops.sum()


def test_inputs_beside_the_batch() -> None:
    """Inputs of one dimension are cut with a batch that is dimension 1, and others of its size are not."""
    from gdp.models.example import splitter

    lengths, mask = torch.zeros(4), torch.zeros(4, 3)
    split = splitter((nn.Identity(), (X, lengths, mask)), 2, "model", 1)
    assert [tuple(split(x).shape) for x in (X, lengths, mask)] == [(16, 2, 8), (2,), (4, 3)]


def test_place_offers_no_parts_of_time() -> None:
    """`place` answers with op placement, and refuses a layout that is asked for; with batch_dim it has replicas."""
    model, devices = (Loop(0), (X,)), "2xl4-24g"
    assert gdp.place(model, devices, budget="20sims").layout is None
    with pytest.raises(InputError, match="--batch-dim 1"):
        gdp.place(model, devices, parallel="data=2", budget="20sims")
    plan = gdp.place(model, devices, parallel="data=2", batch_dim=1, budget="20sims")
    assert plan.layout is not None
    assert plan.layout["batch"] == 4


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Reading(batch_dim=-1), "--batch-dim is -1"),
        (lambda: ModelSource("rnnlm-2", Reading(batch_dim=1)).whole(), "--batch-dim: it is known where rnnlm-2"),
        (lambda: gdp.place(gdp.capture(*OTHERS["cell"][0]()).graph, "2xl4-24g", batch_dim=1), "batch_dim: it is that"),
        (lambda: Parts.of(source_of(OTHERS["cell"][0]), 1), "batch_dim is 1; it is that of a MODEL"),
    ],
)
def test_batch_dim_where_there_is_none(act: Callable[[], Any], message: str) -> None:
    """A dimension that makes no sense is refused."""
    with pytest.raises(InputError, match=message):
        act()


def test_a_batch_of_any_size_is_made_at_once() -> None:
    """`--batch` repeats samples in order, along their dimension; a billion of them are no list of copies."""
    rows = torch.arange(6).reshape(2, 3)
    for dim, expected in ((0, torch.cat([rows] * 3)[:5]), (1, torch.cat([rows] * 2, 1)[:, :5])):
        _, (found,), _ = with_batch((nn.Identity(), (rows,)), 5, "rows", dim)
        assert torch.equal(found, expected)
    with FakeTensorMode():
        _, (found,), _ = with_batch((nn.Identity(), (torch.zeros(2, 3),)), 10**9, "rows")
    assert found.shape == (10**9, 3)
