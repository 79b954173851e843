"""Fused kernels of compiled steps against the regions that PyTorch finds in the same models."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from gdp.cluster import Cluster
from gdp.costs.fusion import fused
from gdp.costs.op_times import op_times
from gdp.graph import Graph
from gdp.models.pytorch import capture

regions = pytest.importorskip("torch._inductor.fx_passes.fusion_regions")

PRODUCTS = ("mm", "addmm", "bmm", "convolution", "scaled_dot_product", "linear", "matmul", "conv2d")
Kernel = tuple[frozenset[int], frozenset[int]]
"""The products that a fused kernel reads, and those that read it, by number."""


class Perceptron(nn.Module):
    """A block of a transformer's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's answer."""
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's answer."""
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(y)))


class Attention(nn.Module):
    """Attention written out, with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs, self.outputs = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's answer."""
        q, k, v = self.inputs(self.norm(x)).view(4, 16, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        shares = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
        return x + self.outputs((shares @ v).transpose(1, 2).reshape(4, 16, 32))


class SqueezeExcite(nn.Module):
    """Channels weighed by what all pixels say."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's answer."""
        y = functional.silu(self.conv(x))
        weights = self.up(functional.relu(self.down(y.mean((2, 3), keepdim=True))))
        return x + y * torch.sigmoid(weights)


def is_product(name: str) -> bool:
    """Returns whether an op of this kind is a kernel of its own."""
    return any(name.removeprefix("aten.").split(".")[0].lstrip("_").startswith(each) for each in PRODUCTS)


def of_pytorch(model: nn.Module, x: Tensor) -> Counter[Kernel]:
    """Returns the kernels of PyTorch's regions, with single ops as further ones."""
    from torch._inductor.decomposition import select_decomp_table

    with torch.no_grad():
        module = make_fx(model, select_decomp_table())(x)
    nodes = list(module.graph.nodes)
    region_of = regions.build_fusion_regions(module)
    found, rest = {id(group): group for group in region_of.values()}, [n for n in nodes if n not in region_of]
    groups = [*found.values(), *({n} for n in rest if regions.is_fusible_node(n) and not regions.is_view_node(n))]
    label = {n: number for number, group in enumerate(groups) for n in group}
    edges = [(source, n) for n in nodes for source in n.all_input_nodes]
    return _kernels(nodes, edges, label, {n for n in nodes if n.op == "call_function" and is_product(str(n.target))})


def of_gdp(graph: Graph) -> Counter[Kernel]:
    """Returns the kernels of `fused`."""
    fusion, ops = fused(graph), range(graph.num_ops)
    label = {op: int(fusion.region[op]) for op in ops if fusion.is_fused[op]}
    edges = list(zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True))
    return _kernels(ops, edges, label, {op for op in ops if is_product(graph.kinds[op])})


def _kernels(
    nodes: Iterable[Any], edges: list[tuple[Any, Any]], label: dict[Any, int], products: set[Any]
) -> Counter[Kernel]:
    """Returns each kernel by its neighbours; what is neither in a kernel nor a product, as views, passes on."""
    number = {node: place for place, node in enumerate(n for n in nodes if n in products)}
    after: dict[Any, list[Any]] = {}
    for source, target in edges:
        after.setdefault(source, []).append(target)

    def reached(node: Any) -> set[Any]:
        ends = set()
        for target in after.get(node, ()):
            ends |= {target} if target in label or target in products else reached(target)
        return ends

    reads: dict[int, set[int]] = {each: set() for each in label.values()}
    feeds: dict[int, set[int]] = {each: set() for each in label.values()}
    for node in nodes:
        for end in reached(node):
            if node in products and end in label:
                reads[label[end]].add(number[node])
            elif node in label and end in products:
                feeds[label[node]].add(number[end])
    return Counter((frozenset(reads[each]), frozenset(feeds[each])) for each in reads)


CASES = {
    "perceptron": (Perceptron, (4, 16, 32)),
    "residual": (Residual, (2, 8, 6, 6)),
    "attention": (Attention, (4, 16, 32)),
    "squeeze-excite": (SqueezeExcite, (2, 8, 6, 6)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch imports
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_those_of_pytorch(name: str) -> None:
    """As many fused kernels lie between the same products, but where the two are known to differ."""
    build, sizes = CASES[name]
    torch.manual_seed(0)
    model, x = build().eval(), torch.ones(sizes)
    ours, theirs = of_gdp(capture(model, (x,), training=False).graph), of_pytorch(model, x)
    del theirs[frozenset(), frozenset()]  # nodes beside the products, such as `detach` of what nobody reads
    between = Counter({(frozenset({0}), frozenset({1})): 1})
    if name == "residual":  # regions are of nodes in a row: the norm's end at its views, Inductor's kernels do not
        assert ours - theirs == between
        assert theirs - ours == Counter({(frozenset({0}), frozenset()): 1, (frozenset(), frozenset({1})): 1})
    else:
        assert ours == theirs


class Projections(nn.Module):
    """Products of one tensor with several weights, one of them in a module of its own."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4096, width, bias=False) for width in widths)
        self.gate = nn.Sequential(nn.Linear(4096, 1024, bias=False))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Returns all products."""
        y = functional.silu(x)
        return [self.gate(y), *(part(y) for part in self.parts)]


def test_servers_join_products_of_one_tensor() -> None:
    """Queries, keys and values take as long as one product of all columns; eager steps and compiled ones join none."""
    cut, whole = (
        capture(Projections(*widths).bfloat16(), (torch.ones(8, 4096, dtype=torch.bfloat16),), training=False).graph
        for widths in ((1024, 128, 128), (1280,))
    )
    is_product = [np.flatnonzero([kind == "aten.mm" for kind in graph.kinds]) for graph in (cut, whole)]
    assert fused(cut, with_siblings=True).part[is_product[0]].tolist() == [1.0, 0.8, 0.1, 0.1]
    assert fused(cut).part.tolist() == [1.0] * cut.num_ops
    times = {}
    for runtime in ("eager", "compile", "cuda-graphs"):
        cluster = Cluster.parse(f"a100-sxm-80g:{runtime}")
        times[runtime] = [op_times(graph, cluster)[ops, 0] for graph, ops in zip((cut, whole), is_product, strict=True)]
    served, joined = times["cuda-graphs"]
    assert served[1:].sum() == pytest.approx(joined[1], rel=0.02)
    assert served[0] == joined[0] == times["eager"][0][0]
    assert times["compile"][0][1:].sum() == times["eager"][0][1:].sum() > 1.2 * served[1:].sum()


def test_a_batch_is_read_again_behind_its_statistics() -> None:
    """Of 2 x 8 x 16 floats the norm reads 1,024 bytes twice, in two kernels, and the activation writes as many; in the
    backward pass the gradient and the batch are read twice."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(functional.relu(self.norm(x)))

    x = torch.randn(2, 8, 16, requires_grad=True)
    for training, expected in ((True, (2 * 1024, 2)), (False, (1024, 1))):
        graph = capture(Normed().train(training), (x,), training=training).graph
        kernels, op = fused(graph), next(op for op, kind in enumerate(graph.kinds) if "native_batch_norm" in kind)
        of_region = kernels.region == kernels.region[op]
        assert kernels.launches[of_region].sum() == expected[1]
        assert 0 <= kernels.bytes[op] - expected[0] < 1024


def test_a_fused_lookup_reads_its_rows_alone() -> None:
    """Three rows of a table of 1,000 are read and written, and their numbers read."""
    table = nn.Embedding(1000, 8)

    class Lookup(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return table(ids) + 1.0

    graph = capture(Lookup(), (torch.tensor([1, 2, 3]),), training=False).graph
    kernels = fused(graph)
    bytes_of = dict(zip(graph.kinds, kernels.bytes.tolist(), strict=True))
    assert bytes_of["aten.embedding"] == 2 * 3 * 8 * 4 + 3 * 8
