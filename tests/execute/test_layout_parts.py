"""The parts of a layout's execution: chunks of tensors, places in rings, refusals, memory that is overwritten late."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from execute.random_layouts import OPTIMIZERS
from execute.test_layouts import MODELS, assert_equal, assert_near, captured, cpus, drawn, marked
from gdp.errors import InputError
from gdp.execute.backends import ExchangedRows
from gdp.execute.host_executor import ThreadExecutor
from gdp.execute.layouts.cut import Cut, RingPlaces
from gdp.execute.layouts.exchange_routines import Member, RowExchange, RowProgress
from gdp.execute.layouts.step_program import step_program
from gdp.execute.layouts.updates import UpdateOfPiece, updates_of
from gdp.models.pytorch import Program, Replay, capture
from gdp.parallel.layout import Layout
from gdp.parallel.rings import Rings
from gdp.parallel.step import Step
from tiny_models import REPEATED

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], Cut]:
    """Sizes of tensors, and a cut of them."""
    sizes, inner, outer = draw(SIZES), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["joined", "each", "spans"]))
    if kind == "joined":
        return sizes, Cut.joined(sizes, inner, outer)
    if kind == "each":
        return sizes, Cut.each(sizes, inner * outer)
    chosen = draw(st.permutations(range(len(sizes))))  # a buffer of pieces that were cut elsewhere
    whole = Cut.joined(sizes, inner, outer)
    return [sizes[member] for member in chosen], Cut(tuple(whole.spans[member] for member in chosen))


@given(cuts())
def test_pieces_tile_each_tensor(case: tuple[list[int], Cut]) -> None:
    """The pieces of all chunks tile each tensor."""
    sizes, cut = case
    for member, size in enumerate(sizes):
        end = 0
        for chunk, place, first, last in cut.places[member]:
            assert first == end < last
            assert cut.pieces[chunk][place] == (member, first, last)
            end = last
        assert end == size
    lengths = [sum(last - first for _, first, last in pieces) for pieces in cut.pieces]
    assert max(lengths, default=0) == cut.chunk_elements


@given(cuts())
def test_chunks_after_a_copy(case: tuple[list[int], Cut]) -> None:
    """Chunks are where their tensors are, and whole after a copy."""
    sizes, cut = case
    rows = list(torch.randn(sum(sizes)).split(sizes))
    chunks = [cut.chunk(number, rows) for number in range(cut.num_chunks)]
    joined = ExchangedRows(tuple(chunks), cut.chunk_elements, torch.float32).joined()
    assert len(joined) == cut.num_chunks * cut.chunk_elements
    exchange = RowExchange(-1, cut, torch.float32, (), 0)
    copies = [torch.full_like(row, torch.nan) for row in rows]
    exchange.copy_chunks(RowProgress(cut.split(joined, range(cut.num_chunks)), copies))
    for copy, row in zip(copies, rows, strict=True):
        assert torch.equal(copy, row)
    for chunk in chunks:
        for row in chunk:
            row.zero_()
    assert not any(row.any() for row in rows)


@given(st.data())
def test_rings_cover_all_chunks(data: st.DataObject) -> None:
    """The hops of a replica take each chunk but one; its last sum is of the chunk that it owns, and sends first."""
    num_hosts, per_host = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    count = num_hosts * per_host
    ring = data.draw(st.permutations(range(count)))
    hosts = data.draw(st.permutations([host for host in range(num_hosts) for _ in range(per_host)]))
    over_hosts = data.draw(st.booleans())
    places = RingPlaces.of(Rings.of(count, ring, hosts if over_hosts else None))
    assert places.num_replicas == count
    assert sorted(places.owned(replica) for replica in range(count)) == list(range(count))
    whole = list(range(count))

    def taken(replica: int, num_chunks: int, is_sum: bool, *, is_inside: bool) -> list[range]:
        """Returns the chunks of each hop of a ring, and those of one more."""
        return [places.taken(replica, turn, is_sum=is_sum, is_inside=is_inside) for turn in range(num_chunks)]

    def joined(chunks: list[range]) -> list[int]:
        return sorted(one for chunk in chunks for one in chunk)

    for replica, is_sum in product(range(count), (True, False)):
        own = places.owned(replica)
        last = -2 if is_sum else -1
        if not over_hosts:
            hops = taken(replica, count, is_sum, is_inside=False)
            assert joined(hops) == whole
            assert list(hops[last % count]) == [own]
            continue
        hops = taken(replica, places.num_inner, is_sum, is_inside=True)
        assert joined(hops) == whole
        if num_hosts == 1:  # nothing goes round between hosts
            continue
        inner = list(hops[last % places.num_inner])
        outer = taken(replica, places.num_outer, is_sum, is_inside=False)
        assert joined(outer) == inner
        assert list(outer[last % places.num_outer]) == [own]


# -- refusals, and what is no reason for one --------------------------------------------------------------------------


class Shared(nn.Module):
    """Two parameters with one gradient, one whose gradient other ops read as well, and parameters of two types."""

    def __init__(self, *, is_flat: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 6))
        self.second = nn.Parameter(torch.randn(24) if is_flat else torch.randn(4, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.bias = nn.Parameter(torch.randn(1, 4))  # of a sample: its gradient is that of the sum, if there is one

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x + self.narrow(x.bfloat16()).float()
        y = x @ (self.first + self.second.view(4, 6)).t() + self.bias
        return y.square().mean()


def trained(model: nn.Module, args: tuple[Tensor, ...], layout: str, optimizer: str = "adam") -> tuple[Replay, Program]:
    """Returns the results of one step of a layout, each replica on a device."""
    parsed = Layout.parse(layout)
    part = tuple(tensor[: len(tensor) // parsed.num_parts] for tensor in args)
    found = capture(model, part, name="model", optimizer=optimizer)
    step = Step.of(found.graph, parsed, bucket_bytes=100)
    program = step_program(found.program, step)
    order = [np.flatnonzero(step.replica == replica) for replica in range(parsed.data)]
    content = program.bind(model, args, {})
    with ThreadExecutor(program, order, cpus(parsed.data)) as executor:
        executor.load(content)
        return executor.results(executor.step(content, retain=True)), program


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("zero", range(4))
def test_gradients_of_several_readers(zero: int, is_flat: bool) -> None:
    """Also where parameters of two types are gathered together."""
    torch.manual_seed(0)
    model, batch = Shared(is_flat=is_flat), torch.randn(2, 6)
    results, _ = trained(model, (batch,), f"data=2,zero={zero}", "sgd-momentum")
    for part in batch.split(1):
        (model(part) / 2).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_equal(dict(results.gradients), gradients)
    OPTIMIZERS["sgd-momentum"](model).step()
    after = {name: tensor for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    assert_near({name: results.state[name] for name in after}, after, 1e-6)  # of bfloat16, kernels round pieces anew


class Linear(nn.Module):
    """One layer, whose weight may have gaps in memory."""

    def __init__(self, *, has_gaps: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12)[:, ::2] if has_gaps else torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).square().mean()


REFUSALS: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "Adafactor": (Linear, "data=2,zero=1", "adafactor", "an optimizer with gdp.adafactor_.default needs whole"),
    "Adafactor, parameters cut": (Linear, "data=2,zero=3", "adafactor", "needs whole parameters"),
    "gaps": (lambda: Linear(has_gaps=True), "data=2,zero=2", "adam", "'weight' has gaps in its memory, or shares it"),
    "gaps, parameters cut": (lambda: Linear(has_gaps=True), "data=2,zero=3", "adam", "'weight' has gaps"),
}


@pytest.mark.parametrize(("make", "layout", "optimizer", "message"), REFUSALS.values(), ids=REFUSALS)
def test_uncut_updates(make: Callable[[], nn.Module], layout: str, optimizer: str, message: str) -> None:
    """Updates that cannot be cut are refused."""
    with pytest.raises(InputError, match=message) as caught:
        trained(make(), (torch.randn(2, 6),), layout, optimizer)
    assert "\n" not in str(caught.value)
    assert "place with zero=0" in str(caught.value)


def test_a_step_of_the_users_own_is_refused() -> None:
    """What the optimizer does with its parameters is not known."""
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss

    found = capture(step, (torch.randn(2, 6),), name="own")
    with pytest.raises(InputError, match="read by no update of one parameter, so it cannot be cut; place with zero=0"):
        step_program(found.program, Step.of(found.graph, Layout.parse("data=2,zero=1")))


# -- updates of pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "sgd-momentum"])
def test_updates_of_pieces(optimizer: str) -> None:
    """But for the last bit: kernels compute what is left over by vectors in another way."""
    model = nn.Linear(7, 5)
    program = capture(model, (torch.randn(2, 7),), name="linear", optimizer=optimizer).program
    update = next(update for update in updates_of(program).values() if update.name == "weight")
    whole = model.weight.detach().clone()
    gradient, pieces = torch.randn(35), whole.clone()
    value, number = program.tensor_values[update.weight], 100
    spans = [(0, 9), (9, 9), (9, 35)]
    private: list[dict[int, Any]] = [{} for _ in spans]
    state = {own: program.layouts[own] for own in program.private.get(update.op, ())}
    held_private: dict[int, Any] = {}
    gradient_tensor = next(t for t in program.inputs_of[update.op] if program.tensor_values[t] == update.gradient[0])
    for _ in range(3):
        inputs = {update.weight: whole, gradient_tensor: gradient.view(5, 7)}
        program.run(update.op, inputs, held_private)
        for own, span in zip(private, spans, strict=True):
            spec = UpdateOfPiece(
                program.calls[update.op],
                Member(update.weight, update.layout),
                value,
                number,
                update.gradient[0],
                state,
                frozenset(),
                span,
                is_cut=False,
                kept=None,
            )
            spec(None).run({update.weight: pieces, number: gradient[slice(*span)].clone()}, own)
        torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-8)


# -- order ------------------------------------------------------------------------------------------------------------


def unordered_overwrites(program: Program) -> list[tuple[str, str]]:
    """Returns (reader, writer) of memory on what may be two devices, neither of which waits for the other."""
    graph = program.graph
    base = np.where(graph.view_of >= 0, graph.view_of, np.arange(graph.num_tensors)).tolist()
    writers: dict[int, set[int]] = {}
    for op, calls in enumerate(program.calls):
        old = {value for call in calls for value, _ in call.writes}
        for tensor in program.inputs_of[op]:
            if program.tensor_values[tensor] in old:
                writers.setdefault(base[tensor], set()).add(op)
    readers: dict[int, set[int]] = {tensor: set() for tensor in writers}
    followers: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for tensor, op in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        followers[int(graph.producers[tensor])].append(op)
        if base[tensor] in readers:
            readers[base[tensor]].add(op)
    bits = {op: 1 << place for place, op in enumerate({op for ops in writers.values() for op in ops})}
    later = [0] * graph.num_ops  # the writers that come after each op, as bits
    for op in reversed(range(graph.num_ops)):
        for follower in followers[op]:
            later[op] |= later[follower] | bits.get(follower, 0)
    reached = {op: set[int]() for op in bits}  # the readers that come after each writer, where that matters
    found = []
    for tensor, ops in writers.items():
        for reader in readers[tensor]:
            for writer in ops - {reader}:
                same_device = graph.groups[reader] >= 0 and graph.groups[reader] == graph.groups[writer]
                if not (
                    later[reader] & bits[writer] or same_device or _comes_after(followers, writer, reader, reached)
                ):
                    found.append((graph.op_names[reader], graph.op_names[writer]))
    return found


def _comes_after(followers: list[list[int]], op: int, other: int, reached: dict[int, set[int]]) -> bool:
    if not reached[op]:
        pending = [op]
        while pending:
            new = [follower for follower in followers[pending.pop()] if follower not in reached[op]]
            reached[op].update(new)
            pending += new
    return other in reached[op]


@pytest.mark.parametrize("name", [marked(name, is_long=name in REPEATED) for name in MODELS])
def test_readers_come_before_overwriting(name: str) -> None:
    """Devices of one process read each other's memory: an update waits for each copy that reads the parameter."""
    found = captured(name, "sgd-momentum")
    for seed in range(2):
        case = drawn(name, seed)
        assert not unordered_overwrites(case.program(found)), case
