"""A captured JAX function computes what JAX does, in every order that the graph allows; its costs are those by hand."""

import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from torch import nn

import gdp
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.shapes import parsed_calls
from gdp.models.jax import JaxCapture, capture_jax

Struct = jax.ShapeDtypeStruct


def array(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# Models


def mlp(params: dict[str, Any], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
    return jnp.tanh(hidden @ params["second"])


MLP = {"first": {"kernel": array(6, 8), "bias": array(8, seed=1)}, "second": array(8, 5, seed=2)}


def layers_loss(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """A scan over stacked layers."""

    def layer(h: jax.Array, weights: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("layer"):
            h = jnp.tanh(h @ weights["kernel"] + weights["bias"])
        return h, h.sum()

    with jax.named_scope("embed"):
        h = x @ params["in"]
    h, sums = lax.scan(layer, h, params["layers"])
    return (h**2).mean() + sums.mean()


LAYERS = {"in": array(4, 5), "layers": {"kernel": array(3, 5, 5, seed=1), "bias": array(3, 5, seed=2)}}


@jax.jit
def momentum_step(params: Any, momentum: Any, x: jax.Array, rate: float) -> tuple[Any, Any, jax.Array]:
    loss, gradients = jax.value_and_grad(layers_loss)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - rate * m, params, momentum), momentum, loss


def late_step(params: dict[str, Any], x: jax.Array) -> tuple[Any, ...]:
    """The old value of `a` is read beside the new one, that of `b` after the new one is made, though it need not be."""
    gradients = jax.grad(lambda p: (jnp.tanh(x @ p["a"]) @ p["b"]).sum())(params)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return new, (new["a"] - params["a"]).sum(), (params["b"] ** 2).sum()


LATE = {"a": array(4, 3), "b": array(3, 2, seed=1)}


def conv_net(params: list[Any], x: jax.Array) -> jax.Array:
    for weights in params:
        x = lax.conv_general_dilated(x, weights, (2, 2), "SAME", feature_group_count=2)
        x = lax.reduce_window(jax.nn.gelu(x), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "SAME")
    return x.mean()


def attention_loss(params: dict[str, Any], tokens: jax.Array, key: jax.Array) -> jax.Array:
    """Embedding, softmax, dropout, a norm, sorting, updates of slices, a remat and a custom derivative."""

    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * (abs(x) < 1),))

    def block(x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(x @ params["qkv"], 3, -1)
        scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), q @ k.T, -1e9)
        return x + jax.nn.softmax(scores) @ v

    x = params["table"][tokens]
    x = clipped(jax.checkpoint(block)(x))
    x = x * jax.random.bernoulli(key, 0.5, x.shape)
    x = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    x = x.at[2].set(jnp.sort(x[1])).at[tokens[:2]].add(params["shift"])
    x = lax.dynamic_update_slice(x, x[:1] * 2, (tokens[0] % 2, 0))
    return x.sum() + lax.top_k(x, 2)[0].sum() + jnp.concatenate([x.T.reshape(-1), jnp.cumsum(x[0])]).max()


ATTENTION = {"qkv": array(4, 12), "table": array(7, 4, seed=1), "shift": array(4, seed=2)}


def loops(x: jax.Array, flag: jax.Array) -> Any:
    """What becomes one op, constants that the code holds, results that are views, stacks and inputs themselves."""
    table = np.arange(12, dtype="float32").reshape(3, 4)
    x = x + table + jnp.arange(4.0)
    y = lax.while_loop(lambda carry: carry[1] < 3, lambda carry: (carry[0] * 2, carry[1] + 1), (x, 0))[0]
    y = lax.cond(flag.sum() > 0, lambda a: a @ a.T @ a, lambda a: a * 2, y)
    total, sums = lax.scan(lambda c, row: (c + row, c.sum()), jnp.zeros(4), y, reverse=True)
    long, _ = lax.scan(lambda c, _: (c * 1.01, None), total, None, length=100)
    return {"t": y.T, "stack": sums, "long": long, "same": flag, "ones": jnp.ones((2, 2)), "views": sums.reshape(1, 3)}


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mlp": (mlp, (MLP, array(3, 6))),
    "momentum step of scanned layers": (momentum_step, (LAYERS, LAYERS, array(2, 4), 0.1)),
    "step that reads old weights late": (late_step, (LATE, array(2, 4))),
    "convolutions": (jax.grad(conv_net), ([array(4, 2, 3, 3)], array(2, 4, 8, 8))),
    "attention": (
        jax.value_and_grad(attention_loss),
        (ATTENTION, np.array([1, 3, 0, 6, 2], "int32"), jax.random.key(3)),
    ),
    "loops": (loops, (array(3, 4), array(3))),
}


def run_graph(made: JaxCapture, leaves: list[Any], choose: Callable[[int], int], step: int = 1) -> list[Any]:
    """The results of the graph's ops, one by one, each time that of the ready ones at the place that `choose` gives of
    their number; what is overwritten is gone. `step` -1: what becomes ready at once does so in reverse order."""
    graph, program = made.graph, made.program
    waits_for = [0] * graph.num_ops
    followers: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for producer, consumer in zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True):
        followers[producer].append(consumer)
        waits_for[consumer] += 1
    owners = {int(graph.groups[op]): value for op, value in program.source_values.items()}
    values: dict[int, Any] = {}
    ready = [op for op in range(graph.num_ops) if not waits_for[op]]
    num_done = 0
    while ready:
        op = ready.pop(choose(len(ready)))
        num_done += 1
        known = dict(values)
        if op in program.sources:
            leaf, part = program.sources[op]
            content = jnp.asarray(leaves[leaf])
            values[program.source_values[op]] = content if part < 0 else content[part]
        elif op in program.constants:
            values[program.source_values[op]] = jnp.asarray(program.constants[op])
        else:
            made_here = run_equations(program.equations[op], known)
            values.update(made_here)
            if graph.groups[op] >= 0:
                del values[owners[int(graph.groups[op])]]
        for follower in followers[op][::step]:
            waits_for[follower] -= 1
            if not waits_for[follower]:
                ready.append(follower)
    assert num_done == graph.num_ops
    results = []
    for views, operand in program.results:
        known = dict(values)
        run_equations(views, known)
        results.append(known[operand] if isinstance(operand, int) else operand.value)
    return results


def run_equations(equations: Any, known: dict[int, Any]) -> dict[int, Any]:
    made: dict[int, Any] = {}
    for equation in equations:
        made |= zip(equation.outputs, equation.apply(known), strict=True)
        known.update(made)
    return made


@pytest.mark.parametrize("case", CASES)
def test_any_order_has_the_bits_of_jax(case: str) -> None:
    """Ops in any order that the graph allows give the bits that JAX gives."""
    function, args = CASES[case]
    made = capture_jax(function, *args, name=case, parameters=("params", "momentum") if "momentum" in case else None)
    with jax.disable_jit():
        expected = jax.tree.leaves(function(*jax.tree.map(jnp.asarray, args)))
    leaves = jax.tree.leaves(args)
    rng = random.Random(0)
    for found in (
        run_graph(made, leaves, rng.randrange),
        run_graph(made, leaves, rng.randrange),
        run_graph(made, leaves, lambda count: count - 1),  # one result after the other, each as early as it can be
        run_graph(made, leaves, lambda count: count - 1, -1),
    ):
        parts = iter(found)
        for whole in expected:  # a stack is its parts
            first = next(parts)
            stack = [first]
            if np.shape(first) != np.shape(whole):
                stack += [next(parts) for _ in range(len(whole) - 1)]
                first = np.stack(stack)
            np.testing.assert_array_equal(np.asarray(first), np.asarray(whole))
        assert next(parts, None) is None


def by_kind(graph: Graph, phase: str | None = None) -> Counter[str]:
    chosen = [op for op in range(graph.num_ops) if phase in (None, graph.phases[op])]
    return Counter(graph.kinds[op] for op in chosen)


def flops_of(graph: Graph, *kinds: str) -> int:
    return int(sum(graph.flops[op] for op in range(graph.num_ops) if graph.kinds[op] in kinds))


# Costs


def test_costs_of_an_mlp() -> None:
    """FLOPs and bytes of an MLP are those by hand, and the FLOPs those of the same PyTorch module."""
    made = capture_jax(mlp, MLP, Struct((3, 6), "float32"), name="mlp")
    # products 2 * 3 * 6 * 8 and 2 * 3 * 8 * 5; bias and relu on [3, 8], tanh on [3, 5]
    assert made.graph.flops.sum() == 288 + 240 + 24 + 24 + 15
    number = made.graph.kinds.index("add")
    assert made.graph.bytes_accessed[number] == 4 * (24 + 8 + 24)  # the bias is read as it is, not repeated
    torch_mlp = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5, bias=False), nn.Tanh())
    same = gdp.capture(torch_mlp, (torch.ones(3, 6),), name="mlp", training=False).graph
    assert made.graph.flops.sum() == same.flops.sum()
    assert made.graph.resident_bytes.sum() == same.resident_bytes.sum() == 4 * (48 + 8 + 40)
    assert {"params.first.kernel", "params.first.bias", "params.second", "x"} < set(made.graph.op_names)
    assert by_kind(made.graph) == Counter(parameter=3, input=1, dot_general=2, add=1, max=1, tanh=1)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_flops_of_a_convolution(groups: int, stride: int) -> None:
    """FLOPs of a convolution and of its gradients are those by hand and those of PyTorch."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        padding = [(1, 1), (1, 1)]
        return lax.conv_general_dilated(x, weights, (stride, stride), padding, feature_group_count=groups).sum()

    weights, x = Struct((6, 4 // groups, 3, 3), "float32"), Struct((2, 4, 8, 8), "float32")
    graph = capture_jax(jax.grad(loss, (0, 1)), weights, x, name="conv").graph
    size = 8 // stride
    one = 2 * (2 * 6 * size * size) * (4 // groups * 9)
    # the forward result is not needed for gradients of a sum: two products remain
    assert flops_of(graph, "conv_general_dilated") == 2 * one
    conv = nn.Conv2d(4, 6, 3, stride, 1, groups=groups, bias=False)
    same = gdp.capture(conv, (torch.ones(2, 4, 8, 8, requires_grad=True),), name="conv", loss=torch.sum).graph
    assert flops_of(same, "aten.convolution", "aten.convolution_backward") == 3 * one


def test_flops_of_attention() -> None:
    """FLOPs of attention are those by hand and those of the same PyTorch module."""

    def attend(w: jax.Array, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split((x @ w).reshape(2, 5, 3, 2, 4).transpose(2, 0, 3, 1, 4), 3)
        scores = jnp.exp(q[0] @ k[0].swapaxes(-1, -2))
        return (scores / scores.sum(-1, keepdims=True)) @ v[0]

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, 24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (x @ self.w).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
            scores = (q @ k.transpose(-1, -2)).exp()
            return (scores / scores.sum(-1, keepdim=True)) @ v

    made = capture_jax(attend, Struct((8, 24), "bfloat16"), Struct((2, 5, 8), "bfloat16"), name="attend")
    pairs = 2 * 2 * 5 * 5
    # projection; two products of width 4 for each pair; exp, sum, division
    assert made.graph.flops.sum() == 2 * 2 * 5 * 8 * 24 + pairs * (2 * 4 + 2 * 4 + 3)
    same = gdp.capture(Attend(), (torch.ones(2, 5, 8),), name="attend", training=False).graph
    assert made.graph.flops.sum() == same.flops.sum()
    dtypes = {made.graph.kinds[op]: made.graph.dtypes[op] for op in range(made.graph.num_ops)}
    assert (dtypes["dot_general"], dtypes["reduce_sum"]) == ("bfloat16", "float32")  # JAX adds up in float32
    assert not made.coverage.unknown


def test_costs_of_lookups_and_sorts() -> None:
    """Lookups and slices cost the elements that they pick, sorting n log n."""

    def step(table: jax.Array, rows: jax.Array, start: jax.Array) -> Any:
        picked = table.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False)
        part = lax.dynamic_slice(table, (start, jnp.int32(0)), (2, 4))
        added = lax.dynamic_update_slice(table, part, (start, jnp.int32(0)))
        return picked, part, added, jnp.sort(picked)

    args = (Struct((1000, 4), "float32"), Struct((3,), "int32"), Struct((), "int32"))
    graph = capture_jax(step, *args, name="lookups").graph
    cost = {graph.kinds[op]: (int(graph.flops[op]), int(graph.bytes_accessed[op])) for op in range(graph.num_ops)}
    assert cost["gather"] == (0, 3 * 4 + 2 * 48)
    assert cost["dynamic_slice"] == (0, 4 + 2 * 32)
    assert cost["dynamic_update_slice"] == (0, 4 + 2 * 32)
    assert cost["sort"] == (12 * 2, 2 * 48)


@pytest.mark.parametrize(
    ("dtype", "product"), [("int8", "int8"), ("uint8", "int8"), ("int4", "int8"), ("int32", "int32"), ("bool", "int8")]
)
def test_products_of_integers(dtype: str, product: str) -> None:
    """[4, 8] @ [8, 16] of integers is 2 x 512 FLOPs; up to 8 bits at the rate of int8; buffers have their types."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 8), (8, 16))]
    graph = capture_jax(
        lambda a, b: jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32), *shapes
    ).graph
    assert graph.dtypes == (dtype, dtype, product)
    assert graph.flops.tolist() == [0, 0, 1024]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_products_of_small_floats(dtype: str) -> None:
    """[4, 8] @ [8, 16] of 8 or 4 bits run at their rate, whatever they are added up in; casts are ops beside them."""
    inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 8), (8, 16))]
    graph = capture_jax(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32), *inputs).graph
    assert (graph.kinds[-1], graph.dtypes[-1], graph.flops.tolist()) == ("dot_general", dtype, [0, 0, 1024])
    wide = [jax.ShapeDtypeStruct(item.shape, "bfloat16") for item in inputs]
    graph = capture_jax(lambda a, b: jnp.dot(a.astype(dtype), b.astype(dtype), preferred_element_type="float32"), *wide)
    assert graph.graph.kinds[2:] == ("convert_element_type", "convert_element_type", "dot_general")
    assert graph.graph.dtypes[2:] == (dtype,) * 3


def test_scaled_products() -> None:
    """[2, 4, 64] and [2, 16, 64] with a scale of 32 elements each: 2 x 2 x 4 x 16 x 64 FLOPs in float8."""
    operands = [jnp.ones((2, rows, 64), jnp.float8_e4m3fn) for rows in (4, 16)]
    scales = [jnp.ones((2, rows, 2), jnp.float8_e8m0fnu) for rows in (4, 16)]
    captured = capture_jax(lambda *args: jax.nn.scaled_matmul(*args), *operands, *scales)
    assert (captured.graph.flops[-1], captured.graph.dtypes[-1]) == (2 * 2 * 4 * 16 * 64, "float8_e4m3fn")
    assert not captured.coverage.unknown


def test_registered_formulas() -> None:
    """A primitive without a formula is named, and a registered function gives its FLOPs."""

    def solve(a: jax.Array) -> jax.Array:
        return lax.linalg.hessenberg(a @ a)[0]

    first = capture_jax(solve, Struct((4, 4), "float32"), name="reduced")
    assert set(first.coverage.unknown) == {"hessenberg"}
    from gdp.models.pytorch import flops

    @gdp.register_flops("hessenberg")
    def hessenberg(a: Any, out_val: Any, **params: Any) -> int:
        return 4 * int(a.shape[-1]) ** 3 // 3

    try:
        second = capture_jax(solve, Struct((4, 4), "float32"), name="reduced")
    finally:
        del flops._registered["hessenberg"]
    assert not second.coverage.unknown
    assert flops_of(second.graph, "hessenberg") == 4 * 64 // 3


def test_sizes_of_random_keys() -> None:
    """Random keys have the size of their words."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    graph = capture_jax(lambda key: jax.random.normal(key, (4,)), key, name="draw").graph
    op = graph.op_names.index("key")
    assert graph.tensor_bytes[graph.producers == op].tolist() == [8]  # two 32-bit words


# Structure


def unrolled_loss(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """`layers_loss` as a loop of Python's over a list of layers."""
    with jax.named_scope("embed"):
        h = x @ params["in"]
    sums = []
    for weights in params["layers"]:
        with jax.named_scope("layer"):
            h = jnp.tanh(h @ weights["kernel"] + weights["bias"])
        sums.append(h.sum())
    return (h**2).mean() + jnp.stack(sums).mean()


def test_unrolled_scans() -> None:
    """An unrolled scan is the graph of the Python loop."""
    listed = {"in": LAYERS["in"], "layers": [jax.tree.map(lambda a, i=i: a[i], LAYERS["layers"]) for i in range(3)]}
    x = Struct((2, 4), "float32")
    scanned = capture_jax(layers_loss, LAYERS, x, name="scan").graph
    loop = capture_jax(unrolled_loss, listed, x, name="loop").graph

    def profile(graph: Graph) -> Counter[Any]:
        return Counter(
            (
                graph.kinds[op],
                int(graph.flops[op]),
                int(graph.bytes_accessed[op]),
                int(graph.resident_bytes[op]),
                graph.phases[op],
                sum(len(graph.consumers_of(t)) for t in np.flatnonzero(graph.producers == op)),
            )
            for op in range(graph.num_ops)
            if graph.kinds[op] not in ("stack", "concatenate")
        )

    assert profile(scanned) == profile(loop)
    assert scanned.num_tensors == loop.num_tensors
    assert "params.layers.kernel[1]" in scanned.op_names
    backward = capture_jax(jax.grad(layers_loss), LAYERS, x, name="scan").graph
    assert flops_of(backward, "dot_general") == 3 * 3 * (2 * 2 * 5 * 5) + 2 * (2 * 2 * 4 * 5)


def test_shapes_of_products() -> None:
    """A product has the shapes of PyTorch's call of its parts, m, n and k, in whatever order its dimensions are."""
    operands = Struct((2, 5, 4, 8), "bfloat16"), Struct((2, 7, 4, 8), "bfloat16")
    graph = capture_jax(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), *operands, name="scores").graph
    (shapes,) = filter(None, graph.shapes)
    assert parsed_calls(shapes)[0].kind == "aten.bmm"
    sizes = [array.size for array in (*parsed_calls(shapes)[0].arrays, *parsed_calls(shapes)[0].results)]
    assert sizes in ([(8, 5, 8), (8, 8, 7), (8, 5, 7)], [(8, 7, 8), (8, 8, 5), (8, 7, 5)])  # JAX may swap operands


def test_scans_beyond_the_limit() -> None:
    """A scan beyond the limit is one op of all its iterations."""
    x = Struct((2, 4), "float32")
    whole = capture_jax(layers_loss, LAYERS, x, name="scan", unroll_limit=2)
    parts = capture_jax(layers_loss, LAYERS, x, name="scan")
    assert by_kind(whole.graph)["scan"] == 1
    assert "params.layers.kernel" in whole.graph.op_names
    assert whole.graph.flops.sum() == parts.graph.flops.sum()
    assert not parts.notes
    assert len(whole.notes) == 1
    assert "scan of 3 iterations" in whole.notes[0]


def test_costs_of_while_and_cond() -> None:
    """A while loop counts its body once, with a note, and a cond its most expensive branch."""
    made = capture_jax(loops, Struct((3, 4), "float32"), Struct((3,), "float32"), name="loops", parameters=())
    assert flops_of(made.graph, "while") == 1 + (12 + 1)  # condition; product, counter
    assert flops_of(made.graph, "cond") == 2 * (2 * 3 * 4 * 3)
    assert flops_of(made.graph, "scan") == 100 * 4
    assert len(made.notes) == 3
    assert made.coverage.open_loops == {"while": 1}


def test_fori_loops_count_every_turn() -> None:
    """With numbers as bounds it is a scan: 10 turns of x * 2 and a counter."""

    def with_numbers(x: jax.Array) -> jax.Array:
        return lax.fori_loop(2, 12, lambda i, c: c * 2, x)

    x = Struct((4,), "float32")
    unrolled, scan = capture_jax(with_numbers, x, name="m"), capture_jax(with_numbers, x, name="m", unroll_limit=0)
    assert by_kind(unrolled.graph) == Counter(input=1, mul=10)
    assert flops_of(unrolled.graph, "mul") == 40
    assert flops_of(scan.graph, "scan") == 10 * (4 + 1)
    assert not any(made.coverage.open_loops for made in (unrolled, scan))


def test_loops_of_unknown_length() -> None:
    """A loop of unknown length is named wherever it is, and counted once."""

    def halves(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c.max() > 1, lambda c: c / 2, x)

    def bounded(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n, lambda i, c: c / 2, x)

    @jax.jit
    def sampler(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (halves(c), None), x, None, length=100)[0]

    x = Struct((4,), "float32")
    alone, given = capture_jax(halves, x, name="m"), capture_jax(bounded, x, Struct((), "int32"), name="m")
    assert flops_of(alone.graph, "while") == 4 + 1 + 4
    for made in (alone, given):
        assert made.coverage.open_loops == {"while": 1}
        (note,) = made.notes
        assert "the trip count of a while loop is unknown; its body is counted once" in note
    inside = capture_jax(lambda x: sampler(x) * 2, x, name="m")
    assert inside.coverage.open_loops == {"while": 1}
    assert any(note.startswith("sampler: the trip count of a while loop is unknown") for note in inside.notes)
    assert flops_of(inside.graph, "scan") == 100 * (4 + 1 + 4)


def test_phases_and_updates_in_place() -> None:
    """A step has forward and backward ops, and updates in place beside their parameters."""
    made = capture_jax(
        momentum_step, LAYERS, LAYERS, Struct((2, 4), "float32"), 0.1, name="step", parameters=["params", 1]
    )
    graph = made.graph
    assert set(graph.phases) == {"forward", "backward", "update"}
    assert {"embed", "layer"} < set(graph.modules)
    arrays = 2 * (1 + 3 + 3)  # weights and momentum, in parts
    assert by_kind(graph)["parameter"] == arrays
    assert sorted(Counter(graph.groups.tolist()).items()) == [(-1, graph.num_ops - 2 * arrays)] + [
        (group, 2) for group in range(arrays)
    ]
    assert by_kind(graph, "update") == Counter(mul=14, add=7, sub=7)
    # nothing but what is computed on the way is allocated: new weights are where the old ones were
    fresh = graph.is_kept & ~graph.is_resident
    assert [graph.tensor_bytes[t] for t in np.flatnonzero(fresh)] == [4]  # the loss
    many = gdp.accumulated(graph, 3)
    assert int(many.flops.sum()) < 3 * int(graph.flops.sum())
    gradients = capture_jax(jax.grad(layers_loss), LAYERS, Struct((2, 4), "float32"), name="gradients").graph
    assert set(gradients.groups.tolist()) == {-1}  # gradients look like weights and are none


def test_caches_are_written_in_place() -> None:
    """A step of decoding writes a row of its cache [6, 4] in place; a product like its first argument is a new array.

    Weights and cache are 64 + 96 bytes, resident; the row and the scores [1, 6] are made, and the scores kept.
    """

    def decode(weight: jax.Array, cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = lax.dynamic_update_slice(cache, x @ weight, (2, 0))
        return x @ cache.T, cache

    args = Struct((4, 4), "float32"), Struct((6, 4), "float32"), Struct((1, 4), "float32")
    graph = capture_jax(decode, *args, parameters=("weight", "cache")).graph
    write = graph.kinds.index("dynamic_update_slice")
    assert graph.groups.tolist() == [0 if op in (graph.op_names.index("cache"), write) else -1 for op in range(6)]
    assert graph.resident_bytes.sum() == 64 + 96
    assert graph.tensor_bytes[graph.is_kept & ~graph.is_resident].tolist() == [4 * 6]
    square = capture_jax(lambda weight, x: weight @ x, args[0], args[0]).graph
    assert square.tensor_bytes[square.is_kept & ~square.is_resident].tolist() == [64]


def test_an_op_that_makes_two_weights_is_beside_both() -> None:
    """A step that is skipped by `cond` where the loss is not finite has both new weights in place, in one group."""

    def step(params: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        loss, gradients = jax.value_and_grad(lambda p: ((x @ p["a"]) @ p["b"]).sum())(params)
        stepped = jax.tree.map(lambda old, gradient: old - gradient, params, gradients)
        return lax.cond(jnp.isfinite(loss), lambda: stepped, lambda: params)

    params = {"a": Struct((4, 3), "float32"), "b": Struct((3, 2), "float32")}
    graph = capture_jax(step, params, Struct((2, 4), "float32")).graph
    assert [graph.kinds[op] for op in np.flatnonzero(graph.groups >= 0)] == ["parameter", "parameter", "cond"]
    assert (graph.groups[graph.groups >= 0] == 0).all()


def test_weights_needed_later_are_kept() -> None:
    """Weights that are needed with their new values are not overwritten."""
    graph = capture_jax(late_step, LATE, Struct((2, 4), "float32"), name="late").graph
    groups = {name: int(graph.groups[graph.op_names.index(f"params.{name}")]) for name in "ab"}
    assert groups["a"] == -1
    assert groups["b"] >= 0
    fresh = graph.is_kept & ~graph.is_resident
    assert sorted(graph.tensor_bytes[fresh].tolist()) == [4, 4, 4 * 4 * 3]


def test_new_values_of_another_type() -> None:
    """A new value of another type is noted, and takes no other argument's place."""

    def step(params: Any, average: Any, x: jax.Array) -> tuple[Any, Any]:
        gradients = jax.grad(lambda p: (x @ p).sum().astype("float32"))(params)
        return params - 0.1 * gradients.astype("float32"), average * 0.9 + gradients

    half = Struct((4, 3), "bfloat16")
    args = (half, Struct((4, 3), "float32"), Struct((2, 4), "bfloat16"))
    made = capture_jax(step, *args, name="step", parameters=("params", "average"))
    assert made.notes == ("a result has the structure of params with other shapes or types: params is not replaced",)
    assert [int(made.graph.groups[made.graph.op_names.index(name)]) for name in ("params", "average")] == [-1, 0]


def test_large_models_take_no_memory() -> None:
    """The capture of a model of 70 billion parameters takes no memory."""
    width, depth, hidden, vocabulary = 8192, 80, 28672, 128256

    def llama(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            x = x + (x @ w["v"]) @ w["o"]
            return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

        x, _ = lax.scan(layer, params["table"][tokens], params["layers"])
        return x @ params["table"].T

    def weights(*shape: int) -> Struct:
        return Struct(shape, "bfloat16")

    shapes = {"v": (width, width), "o": (width, width), "gate": (width, hidden), "up": (width, hidden)}
    layers = {name: weights(depth, *shape) for name, shape in shapes.items()} | {"down": weights(depth, hidden, width)}
    params = {"table": weights(vocabulary, width), "layers": layers}
    tracemalloc.start()
    graph = capture_jax(llama, params, Struct((1, 128), "int32"), name="llama", unroll_limit=80).graph
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert graph.resident_bytes.sum() == 2 * (vocabulary * width + depth * (2 * width * width + 3 * width * hidden))
    assert graph.resident_bytes.max() < 3e9  # a layer is a device's, not all layers


def test_a_captured_step_is_placed() -> None:
    """A captured step is placed within memory."""
    made = capture_jax(momentum_step, LAYERS, LAYERS, Struct((2, 4), "float32"), 0.1, name="s", parameters=(0, 1))
    plan = gdp.place(made.graph, gdp.Cluster.parse("2xp100-pcie-16g"), budget="200sims")
    assert plan.status == "ok"
    assert Graph.from_document(made.graph.to_document()).fingerprint == made.graph.fingerprint


# Bad input


def needs_values(x: jax.Array) -> jax.Array:
    return x if x.sum() > 0 else -x


def test_bad_functions_and_arguments() -> None:
    """Bad functions and arguments are named in one line."""
    x = Struct((3,), "float32")
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: capture_jax(needs_values, x, name="m"), "depends on an array's content"),
        (lambda: capture_jax(lambda x: np.asarray(x), x, name="m"), "depends on an array's content"),
        (lambda: capture_jax(lambda x: x[x > 0], x, name="m"), "depends on an array's content"),
        (lambda: capture_jax(mlp, MLP, name="m"), "missing a required argument: 'x'"),
        (lambda: capture_jax(mlp, MLP, x, name="m"), "the function failed (TypeError: dot_general requires"),
        (lambda: capture_jax(lambda x: "text", x, name="m"), "the function returns str"),
        (lambda: capture_jax(lambda x: None, x, name="m"), "the function returns no arrays"),
        (lambda: capture_jax(mlp, MLP, x, name="m", parameters="parms"), "did you mean params?"),
        (lambda: capture_jax(mlp, MLP, x, name="m", parameters=2), "parameters has 2, which is no argument"),
        (lambda: capture_jax(lambda x: x, torch.ones(3), name="m"), "which JAX does not know"),
        (lambda: capture_jax(3, x, name="m"), "function is a int"),  # type: ignore[arg-type]
    ]
    for call, expected in cases:
        with pytest.raises(InputError) as error:
            call()
        assert expected in str(error.value)
        assert "\n" not in str(error.value)


def test_without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without JAX the error names the remedy."""
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(InputError, match=r"pip install 'gdp-placement\[jax\]'"):
        capture_jax(lambda x: x, np.ones(3), name="m")


@pytest.mark.parametrize("axes", [{"a"}, {"b"}, {"a", "b"}])
def test_a_map_over_a_part_of_a_mesh_counts_its_shards(axes: set[str]) -> None:
    """On 2 x 4 devices a map over `a` has 2 shards of x [8, 4], one over `b` 4, both 8: of 32 elements together."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    specs = jax.sharding.PartitionSpec(*(axis if axis in axes else None for axis in "ab"))
    mapped = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=axes)
    graph = capture_jax(mapped, Struct((8, 4), "float32"), name="m").graph
    assert flops_of(graph, "shard_map") == 32


def test_shardings_are_left_out_with_one_note() -> None:
    """A constraint, shardings of a jit and a sharded argument give the graph without them, and say so once."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def loss(w: Any, x: Any) -> Any:
        return (x @ w).sum()

    def constrained(w: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, split).sum()

    w, x = Struct((8, 8), "float32"), Struct((4, 8), "float32")
    plain = capture_jax(loss, w, x, name="net", parameters=())
    assert plain.notes == ()
    for function, argument in (
        (constrained, x),
        (jax.jit(loss, in_shardings=(split, split)), x),
        (loss, Struct((4, 8), "float32", sharding=split)),
    ):
        made = capture_jax(function, w, argument, name="net", parameters=())
        assert made.graph.num_ops == plain.graph.num_ops
        (note,) = made.notes
        assert "the graph is the unsharded program" in note


def _sent(x: jax.Array) -> jax.Array:
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.device_put(x * 2, pinned) + 1


def _offloaded(x: jax.Array) -> jax.Array:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["a"], offload_src="device", offload_dst="pinned_host"
    )

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.sin(jnp.sin(x)), "a")).sum()

    return jax.grad(jax.checkpoint(loss, policy=policy))(x)


@pytest.mark.parametrize(
    ("function", "is_noted"),
    [
        (_sent, True),
        (lambda x: jax.device_put(x * 2, jax.memory.Space.Host) + 1, True),
        (_offloaded, True),
        (lambda x: jax.device_put(x * 2, jax.devices()[0]) + 1, False),
    ],
)
def test_arrays_on_the_host_are_noted(function: Callable[[jax.Array], jax.Array], is_noted: bool) -> None:
    """Memory kinds are left out, with one note, where an array goes to the host's memory."""
    notes = capture_jax(function, jnp.ones(4)).notes
    assert len(notes) == is_noted
    assert not is_noted or "stay on the card" in notes[0]
