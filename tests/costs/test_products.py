"""Products and fused attention as kernels, and their times by hand and in properties."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.cluster.achieved import figures_of_kind
from gdp.costs.attention import attention_ns
from gdp.costs.kernels import CLASSES, Kernel, Kernels, PricedOp
from gdp.costs.products import Multiprocessors, product, tiled_ns, together_ns
from gdp.costs.rates import kernel_times, memory_times
from gdp.costs.table import class_of, rule_of
from gdp.graph.shapes import parsed_calls


def kernels(text, flops, num_bytes=1000, dtype="bfloat16"):
    """Returns the kernels of an op of one call."""
    op = PricedOp(text.split(" ")[0], "forward", dtype, flops, num_bytes, parsed_calls(text))
    return rule_of(op)[1](op)


def times_ns(sizes, kind="product", card="a100-sxm-80g", dtype="bfloat16", num_bytes=0.0):
    """Returns the ns of products of `sizes` alone on `card`."""
    sizes = np.array(sizes, np.float64)
    flops = 2 * sizes.prod(axis=1)
    zeros = np.zeros(len(sizes), np.int64)
    kinds = zeros + CLASSES.index(kind)
    padded = np.pad(sizes, ((0, 0), (0, 3)))
    rows = Kernels(
        zeros, zeros, kinds, flops, zeros + num_bytes, padded, np.ones(len(sizes)), (dtype,), zeros, ("r",), zeros
    )
    (device,) = Cluster.parse(card).devices
    return kernel_times(rows, device)


@pytest.mark.parametrize(
    ("text", "flops", "size"),
    [
        ("aten.mm bfloat16[4,8] bfloat16[8,2]{1,8} > bfloat16[4,2]", 128, (1, 4, 2, 8)),
        ("aten.addmm bfloat16[2] bfloat16[4,8] bfloat16[8,2] > bfloat16[4,2]", 136, (1, 4, 2, 8)),
        ("aten.bmm bfloat16[3,4,8] bfloat16[3,8,2] > bfloat16[3,4,2]", 384, (3, 4, 2, 8)),
        ("aten.linear bfloat16[3,4,8] bfloat16[2,8] > bfloat16[3,4,2]", 384, (1, 12, 2, 8)),
        ("aten.mv float32[4,8] float32[8] > float32[4]", 64, (1, 4, 1, 8)),
        ("aten._scaled_mm float8_e4m3fn[4,8] float8_e4m3fn[8,2] > bfloat16[4,2]", 128, (1, 4, 2, 8)),
        ("aten._weight_int4pack_mm bfloat16[4,16] int32[2,2,32,4] 32 ~ > bfloat16[4,8]", 1024, (1, 4, 8, 16)),
        # 12 rows of 3 experts; the gradient of their weights
        ("aten._grouped_mm bfloat16[12,8] bfloat16[3,8,2] int32[3] > bfloat16[12,2]", 384, (3, 4, 2, 8)),
        ("aten._grouped_mm bfloat16[8,12] bfloat16[12,2] int32[3] > bfloat16[3,8,2]", 384, (3, 8, 2, 4)),
    ],
)
def test_sizes(text, flops, size):
    """Every kind of product is one kernel of parts, m, n and k, whatever the strides of its operands."""
    assert kernels(text, flops) == [Kernel("product", flops, 1000, size)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("aten.addmm", "product"),
        ("MatMul", "product"),
        ("QLinearMatMul", "product"),
        ("QLinearConv", "convolution"),
        ("convert_element_type", "pointwise"),
        ("DequantizeLinear", "pointwise"),
        ("select_n", "pointwise"),
        ("gdp.adafactor_", "optimizer"),
        ("aten.lgamma", "pointwise"),
        ("upsample_bilinear2d", "pool"),
    ],
)
def test_classes(kind, expected):
    """Names of products are told from others that have parts of theirs."""
    assert class_of(kind) == expected


def test_summand():
    """addmm copies a summand of two dimensions to the result first, but not a bias, nor one that it works in."""
    rest = "bfloat16[4,8] bfloat16[8,2] > bfloat16[4,2]"
    # 8 elements of 2 bytes are read, and as many written
    assert kernels(f"aten.addmm bfloat16[4,2] {rest}", 136)[1] == Kernel("pointwise", 0, 32)
    assert len(kernels(f"aten.addmm bfloat16[2] {rest}", 136)) == 1
    assert len(kernels(f"aten.addmm_ bfloat16[4,2] {rest}", 136)) == 1


@pytest.mark.parametrize(
    ("size", "count", "bytes_per_ns", "expected_ns"),
    [
        # a tile of 32 x 16 takes 2 x 32 x 16 / 1,024 = 1 ns a step of k
        ((1, 32, 16, 64), 1, np.inf, 64),
        ((1, 32, 16, 72), 1, np.inf, 96),  # k in steps of 32
        ((1, 32, 16, 65), 1, np.inf, 96 / 0.45),  # rows of halves that are not aligned
        ((1, 32, 64, 64), 4, np.inf, 64),  # four tiles on four multiprocessors
        ((1, 32, 80, 64), 4, np.inf, 128),  # the fifth takes a wave of its own
        ((5, 32, 16, 64), 4, np.inf, 128),  # of a batch too
        ((1, 32, 16, 64), 1, 48.0, 384),  # (32 + 16) x 2 bytes a step at 48 bytes/ns are 2 ns, also of 128 more steps
        ((1, 32, 16, 4096), 4, np.inf, 1124),  # four splits of 1,024, and 100 ns until a second kernel adds them
    ],
)
def test_tiles(size, count, bytes_per_ns, expected_ns):
    """Tiles, waves, steps and splits of k, and operands take what they take by hand."""
    processors = Multiprocessors(count, np.array([1024.0]), bytes_per_ns, 100.0)
    assert tiled_ns(np.array([size], np.float64), np.array([2.0]), processors) == pytest.approx([expected_ns])


def test_odd_rows():
    """Rows of halves of 50,257 take as much longer as the card tells; Inductor fills them up, and not short ones."""
    size, halves = np.array([(1, 32, 16, 65)], np.float64), np.array([2.0])
    processors = Multiprocessors(1, np.array([1024.0]), np.inf, 100.0, odd_pace=0.125)
    assert tiled_ns(size, halves, processors) == pytest.approx([96 / 0.125])
    text = "aten.mm bfloat16[4,7] bfloat16[7,50257] > bfloat16[4,50257]"
    calls = parsed_calls(text)
    op = PricedOp(calls[0].kind, "", "bfloat16", 2 * 4 * 7 * 50257, 1, calls)
    assert product(op)[0].size == (1, 4, 50257, 7)
    assert product(op._replace(is_compiled=True))[0].size == (1, 4, 50264, 7)


@pytest.mark.parametrize(("kind", "floor_ns"), [("function", 1400), ("narrow_norm", 5500), ("product_bytes", 0)])
def test_floors_of_passes(kind, floor_ns):
    """Kernels that move no bytes take what passes between kernels and, on an H100, a floor: longer if they add up."""
    assert times_ns([(0, 0, 0, 0)], kind, "h100-sxm-80g") == pytest.approx([700 + floor_ns])
    assert times_ns([(0, 0, 0, 0)], kind) == pytest.approx([1500])


@pytest.mark.parametrize(("blocks", "expected_ns"), [(64, 1000), (8 * 132 * 3, 3000)])
def test_blocks_of_passes(blocks, expected_ns):
    """Passes take no less than their thread blocks, eight at once on each of the 132 multiprocessors of an H100."""
    assert times_ns([(blocks, 1000, 0, 0)], "narrow_norm", "h100-sxm-80g") == pytest.approx([6200 + expected_ns])


def test_tf32():
    """What only cards with TF32 transpose takes no time on others."""
    assert times_ns([(0, 0, 0, 0)], "tf32_transpose", "v100-sxm-32g") == 0
    assert times_ns([(0, 0, 0, 0)], "tf32_transpose", "a100-sxm-80g") > 0


def test_together():
    """Reading memory hides behind multiplying, except where both take as long: 2^(1/3) of it."""
    both = together_ns(np.array([100.0, 100.0, 0.0]), np.array([100.0, 10.0, 0.0]))
    assert both == pytest.approx([125.99, 100.03, 0.0], abs=0.01)


@pytest.mark.parametrize("card", ["a100-sxm-80g", "l40s-48g", "v100-sxm-32g", "mi300x-192g"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_bounds(card, dtype):
    """No product is quicker than its FLOPs at the achieved rate, nor slower than a fiftieth of the device and 1 ms."""
    sizes = [
        (1, 1, 1, 1),
        (1, 1, 4096, 4096),
        (1, 32, 32, 10**6),
        (10**6, 1, 1, 64),
        (1, 10**6, 3, 3),
        (7, 513, 77, 1001),
    ]
    (device,) = Cluster.parse(card).devices
    rates = device.flops_per_second
    rate = rates.get(dtype, rates["float32"]) * figures_of_kind(card).achieved["product"]
    ideal = 2 * np.array(sizes, np.float64).prod(axis=1) / rate * 1e9
    times = times_ns(sizes, card=card, dtype=dtype)
    assert np.isfinite(times).all()
    assert (times >= ideal).all()
    assert times[3] < 50e6  # a million products of vectors
    assert (times[[0, 1, 2, 4, 5]] < 1e6 + 50 * ideal[[0, 1, 2, 4, 5]]).all()


def test_monotone():
    """A larger m, n or k is never more than a tenth quicker, if rows are aligned."""
    rng = np.random.default_rng(0)
    sizes = np.concatenate([np.ones((500, 1)), 8 * np.exp(rng.uniform(0, 7.5, (500, 3))).round()], axis=1)
    before = times_ns(sizes)
    for axis in (1, 2, 3):
        larger = sizes.copy()
        larger[:, axis] = 8 * np.ceil(larger[:, axis] / 8 * rng.uniform(1, 2, 500))
        assert (times_ns(larger) > 0.9 * before).all()


@pytest.mark.parametrize("m", [0, 4])
def test_empty(m):
    """Products without rows, and without a k, have a size of no work."""
    (kernel,) = kernels(f"aten.mm float32[{m},0] float32[0,2] > float32[{m},2]", 0)
    assert kernel == Kernel("product", 0, 1000, (1, m, 2, 0))


def test_attention():
    """Causal attention computes the pairs that it sees; its gradient sums and rounds in two more kernels."""
    shape = "bfloat16[2,4,8,16]"
    name = "aten._scaled_dot_product_flash_attention"
    full = kernels(f"{name} {shape} {shape} {shape} ~ 0 > {shape}", 6400)
    assert full == [Kernel("attention", 6400, 1000, (8, 1, 8, 8, 16, 0, 0))]
    # a bias of each head, a mask of all, and one that is expanded over them
    for mask, is_masked in (("[2,4,8,8]", 1), ("[2,1,8,8]", 0), ("[2,4,8,8]{64,0,8,1}", 0)):
        (masked,) = kernels(f"{name}_for_cpu {shape} {shape} {shape} ~ 0 bfloat16{mask} > {shape}", 6400)
        assert masked == Kernel("attention", 6400, 1000, (8, 1, 8, 8, 16, 0, is_masked))
    (causal,) = kernels(f"{name} {shape} {shape} {shape} ~ 1 > {shape}", 6400)
    assert causal.flops == 3600  # 36 of 64 pairs
    sums = "float32[2,4,8]"
    backward = f"{name}_for_cpu_backward {shape} {shape} {shape} {shape} {shape} {sums} ~ 1 > {shape} {shape} {shape}"
    gradient, summed, rounded = kernels(backward, 16000)
    assert (gradient.kind, gradient.flops) == ("attention_backward", 9000)
    assert summed == Kernel("pointwise", 0, 1024 * 4 + 4 * 64)  # two tensors of 1,024 halves, and 64 sums
    assert rounded == Kernel("pointwise", 0, 1024 * 6)


def test_attention_of_packed_sequences():
    """24 tokens in 3 sequences attend as 3 of 8 do: causal, 36 of 64 pairs; pages hold no more than the longest."""
    packed, ends = "bfloat16[24,4,16]", "int32[4]"
    name, shared = "torch_attn._varlen_attn", f"{packed} {packed} {packed}"
    (causal,) = kernels(f"{name} {shared} {ends} {ends} 9 9 1 > {packed}", 6400)
    assert causal == Kernel("attention", 3600, 1000, (12, 1, 8, 8, 16, 1, 0))
    gradient, *_ = kernels(
        f"{name}_backward {packed} {shared} {packed} float32[4,24] {ends} {ends} 9 9 0 > {packed}", 64
    )
    assert gradient == Kernel("attention_backward", 64, 1000, (12, 1, 8, 8, 16, 0, 0))
    pages = "bfloat16[10,16,2,16]"
    (decoded,) = kernels(f"{name} bfloat16[3,4,16] {pages} {pages} {ends} {ends} 1 40 1 > bfloat16[3,4,16]", 64)
    assert decoded == Kernel("attention", 64, 1000, (6, 2, 1, 40, 16, 1, 0))


def test_attention_with_a_window():
    """Of 8 causal queries with a window of 3 the first two see 1 and 2 keys, the others 3: 21 pairs, about 3 keys each.
    A window of all keys hides none."""
    array, cut = "bfloat16[2,4,8,16]", "bfloat16[2,2,8,16]"
    for window, flops, keys, is_causal in ((3, 2400, 3, 0), (8, 3600, 8, 1), (0, 3600, 8, 1)):
        (found,) = kernels(f"served.fused_attention {array} {cut} {cut} 1 {window} - ~ - > {array}", 6400)
        assert found == Kernel("attention", flops, 1000, (4, 2, 8, keys, 16, is_causal, 0))


def test_attention_time():
    """Blocks of queries take waves, and only the keys that they see; one token's are split among multiprocessors."""
    sizes = np.array([(3, 1, 256, 256, 64, 1, 0), (3, 1, 256, 256, 64, 0, 0), (2, 8, 1, 4096, 64, 0, 0)], np.float64)
    # 1 FLOP a pair: a block of 128 queries takes 128 / 128 = 1 ns a key
    flops = np.array([3 * 256 * 257 / 2, 3 * 256 * 256, 2 * 8 * 4096])
    processors = Multiprocessors(4, np.full(3, 128.0), np.inf, 100.0)
    spent = attention_ns(sizes, flops, np.ones(3, np.bool_), processors)
    # 6 blocks on 4 multiprocessors: two waves of 2,500 ns and 192 keys, or all 256. Two tokens' blocks are each split
    # in two: 2,500 ns, 2,048 keys of 20 ns, and 100 ns until a second kernel adds them
    assert spent == pytest.approx([2 * 2692, 2 * 2756, 43560])
    sizes[:, 6] = 1  # with a bias each key takes twice as long, but for one query, which waits for memory
    masked = attention_ns(sizes, flops, np.ones(3, np.bool_), processors)
    assert masked == pytest.approx([2 * (2500 + 2 * 192), 2 * (2500 + 2 * 256), 43560])


def test_what_was_written_last_is_in_the_cache_of_some_cards():
    """Of 16 MiB that a kernel moves an A100 finds half in its cache, and a Hopper card none."""
    zeros = np.zeros(1, np.int64)
    kinds = zeros + CLASSES.index("pointwise")
    rows = Kernels(
        zeros, zeros, kinds, zeros, zeros + 2**24, np.zeros((1, 7)), np.ones(1), ("bfloat16",), zeros, ("r",), zeros
    )
    ampere, hopper = (Cluster.parse(name).devices[0] for name in ("a100-sxm-80g", "h100-sxm-80g"))
    without = replace(ampere, achieved={**ampere.achieved, "cache_share": 0.0})
    assert memory_times(rows, without) == pytest.approx(2 * memory_times(rows, ampere))
    whole_ns = 2**24 * 1e9 / (hopper.achieved["pointwise"] * hopper.memory_bytes_per_second)
    assert memory_times(rows, hopper) == pytest.approx([whole_ns])


def test_keys_of_few_queries_are_split():
    """Two queries to 8,192 keys take about as long as one, not as long as a block that goes through all of them; the
    gradient splits none."""
    (device,) = Cluster.parse("a100-sxm-80g").devices
    name, key = "aten._scaled_dot_product_flash_attention", "bfloat16[1,8,8192,128]"
    times = {}
    for count in (1, 2, 64, 4096):
        query = f"bfloat16[1,32,{count},128]"
        for end, others in (("", ""), ("_backward", f"{query} ")):
            text = f"{name}{end} {others}{query} {key} {key} ~ 0 > {query}"
            rows = kernels(text, 4 * 32 * count * 8192 * 128, 2 * 2**24)[:1]
            sizes = np.array([rows[0].size], np.float64)
            zeros = np.zeros(1, np.int64)
            kinds, flops = zeros + CLASSES.index(rows[0].kind), np.array([float(rows[0].flops)])
            found = Kernels(
                zeros, zeros, kinds, flops, zeros + 2.0**25, sizes, np.ones(1), ("bfloat16",), zeros, ("r",), zeros
            )
            times[count, end] = float(kernel_times(found, device)[0])
    assert times[1, ""] <= times[2, ""] < 2 * times[1, ""]
    assert times[2, ""] <= times[64, ""] < times[4096, ""]
    assert times[2, "_backward"] > 4 * times[2, ""]
