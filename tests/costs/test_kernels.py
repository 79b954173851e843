"""Kernels of ops: hand cases of each kind of rule, and rules or classes for all that small models do."""

import numpy as np
import pytest
import torch

from gdp.costs.kernels import CLASSES, Kernel, PricedOp, kernels_of
from gdp.costs.passes import call_bytes, is_channels_last, transposes
from gdp.costs.table import rule_of
from gdp.errors import InputError
from gdp.graph.shapes import Array, parsed_calls
from gdp.models.pytorch import capture
from tests.models.test_flop_counter import MODELS


def kernels(text: str, flops: int = 0, *, is_trained: bool = True, dtype: str = "") -> list[Kernel]:
    """Returns the kernels of an op whose calls are `text`, but for copies that processor cores make of weights."""
    calls = parsed_calls(text)
    dtype = dtype or calls[0].results[0].dtype
    op = PricedOp(calls[0].kind, "", dtype, flops, sum(map(call_bytes, calls)), calls, is_trained=is_trained)
    return [kernel for kernel in rule_of(op)[1](op) if kernel.kind != "weight_transpose"]


def moved(text: str) -> list[tuple[str, int]]:
    """Returns the class and the bytes of each kernel of `text`."""
    return [(kernel.kind, kernel.bytes) for kernel in kernels(text)]


IMAGE, LAST = "float16[2,8,4,4]", "float16[2,8,4,4]{128,1,32,8}"  # 512 bytes
HALVES = "bfloat16[2,8,4,4]{128,1,32,8}"  # as many
FORM = "(1,1) (1,1) (1,1) 0 (0,0) 1"


def test_convolution_is_a_product() -> None:
    """A convolution of 8 to 16 channels, 3 by 3, on 2 images of 4 by 4, in channels_last is one product."""
    (kernel,) = kernels(f"aten.convolution {LAST} float16[16,8,3,3]{{72,1,24,8}} - {FORM} > float16[2,16,4,4]")
    # 2 * 16 pixels by 8 * 9 by 16; bytes: input 512, weights 2,304, result 1,024
    assert kernel == ("convolution", 2 * 32 * 16 * 72, 512 + 2304 + 1024, (1, 32, 16, 72), 1.0, "")


def test_convolution_of_planes_is_transposed() -> None:
    """In NCHW, input and result are transposed; the bias is added by a kernel that reads and writes the result."""
    text = f"aten.convolution {IMAGE} float16[16,8,3,3] float16[16] {FORM} > float16[2,16,4,4]"
    copies = [("transpose", 2 * 1024), ("transpose", 2 * 512)]
    assert moved(text) == [("convolution", 3840), *copies, ("pointwise", 2 * 1024)]
    alone = kernels(text, is_trained=False)  # of a forward pass alone a class of its own
    assert alone[1:3] == [Kernel("inference_transpose", 0, 2 * 1024), Kernel("inference_transpose", 0, 2 * 512)]


def test_tf32_is_transposed_where_cards_have_it() -> None:
    """Convolutions in TF32 have their images transposed; a card without it takes no time for that."""
    image = "float32[2,8,4,4]"
    text = f"aten.convolution {image} float32[16,8,3,3] - {FORM} > float32[2,16,4,4]"
    _, *copies = kernels(text, dtype="tf32")
    assert copies == [Kernel("tf32_transpose", 0, size, launches=0) for size in (4096, 2048)]


def test_cores_copy_weights() -> None:
    """Libraries on processor cores have weights of 16 x 8 x 3 x 3 floats in a layout of their own: read and written."""
    (call,) = calls = parsed_calls(f"aten.convolution float32[2,8,4,4] float32[16,8,3,3] - {FORM} > float32[2,16,4,4]")
    op = PricedOp(call.kind, "", "tf32", 0, call_bytes(call), calls)
    assert rule_of(op)[1](op)[-1] == Kernel("weight_transpose", 0, 2 * 4 * 16 * 72, launches=0)


def test_rows_that_share_a_place_in_the_cache() -> None:
    """Keys 4 KiB apart are read slowly on a core, once for each block of 32 queries; others are not."""
    near, apart = "float32[2,3,40,16]{1920,16,48,1}", "float32[2,3,40,16]{16,32,1024,1}"
    for key, blocks in ((near, 0), (apart, 2)):
        text = f"aten._scaled_dot_product_flash_attention_for_cpu {key} {key} {key} > {near} float32[2,3,40]"
        (*_, last) = kernels(text, 10**6)
        expected = Kernel("conflicting_read", 0, 6 * 2 * 3 * blocks * 2 * 40 * 16 * 4, launches=0)
        assert (last == expected) == (blocks > 0)
        assert len(kernels(text, 10**6)) == 1 + (blocks > 0)


def test_random_numbers_and_masks() -> None:
    """Dropout draws a number for each element; its gradient converts the mask."""
    text = "aten.native_dropout float32[8] ~ 1 > float32[8] bool[8]"
    assert moved(text) == [("random", 72)]
    assert moved("aten.native_dropout_backward float32[8] bool[8] ~ > float32[8]") == [("masked", 72)]


def test_gradients_of_a_convolution() -> None:
    """Input and weights have a kernel each, a strided one a fourth of the window for each pixel of the input."""
    gradient, weight = "float16[2,16,2,2]{64,1,32,16}", "float16[16,8,3,3]{72,1,24,8}"
    form = "(16) (2,2) (1,1) (1,1) 0 (0,0) 1 (1,1,1)"
    text = f"aten.convolution_backward {gradient} {LAST} {weight} {form} > {LAST} {weight} float16[16]"
    of_input, of_weight, of_bias = kernels(text)
    assert of_input.size == (1, 32, 8, 16 * 9 // 4)
    assert of_weight.size == (1, 16, 8 * 9, 8)  # 2 images of 2 by 2 are summed
    assert of_input.bytes == of_weight.bytes == 256 + 512 + 2304
    assert of_bias == Kernel("reduction", 0, 256)


def test_recurrent_layers_are_products_step_by_step() -> None:
    """An LSTM of 5 steps, 4 sequences, 16 inputs and 32 units: 128 rows of gates, of all steps and of each."""
    layer = "float32[5,4,16] float32[128,16] float32[128,32] float32[128] float32[128] float32[4,32] float32[4,32]"
    whole, *steps = kernels(f"aten.mkldnn_rnn_layer {layer} > float32[5,4,32]")
    assert whole == Kernel("product", 2 * 20 * 128 * 16, 4 * (20 * 128 + 20 * 16 + 128 * 16), (1, 20, 128, 16))
    # weights of the state are read again; gates are read and written besides, as are states
    step_bytes = 4 * (4 * 128 + 4 * 32 + 128 * 32 + 4 * (32 + 128))
    assert steps == [Kernel("product", 2 * 4 * 128 * 32, step_bytes, (1, 4, 128, 32))] * 5
    backward = kernels(f"aten.mkldnn_rnn_layer_backward {layer} > float32[5,4,16]")
    assert [kernel.size for kernel in backward[5:]] == [(1, 20, 16, 128), (1, 128, 16, 20), (1, 128, 32, 20)]
    assert sum(kernel.flops for kernel in backward) == 2 * 2 * 20 * 128 * (16 + 32)


def test_gradients_of_a_gru_are_summed_in_each_step() -> None:
    """oneDNN adds to the gradients of both weights of a GRU, which has three gates, in every step on a core."""
    layer = "float32[5,4,16] float32[96,16] float32[96,32] float32[96] float32[96] float32[4,32]"
    backward = kernels(f"aten.mkldnn_rnn_layer_backward {layer} > float32[5,4,16]")
    again = [kernel for kernel in backward if kernel.kind == "core_product"]
    assert [(kernel.size, kernel.launches) for kernel in again[:2]] == [((1, 96, 16, 4), 0), ((1, 96, 32, 4), 0)]
    assert len(again) == 2 * 5


def test_transposed_convolution_is_a_gradient() -> None:
    """The forward pass of a transposed convolution is the product of an input's gradient."""
    weight = "float16[8,16,2,2]{64,1,32,16}"
    text = f"aten.convolution {LAST} {weight} - (2,2) (0,0) (1,1) 1 (0,0) 1 > float16[2,16,8,8]{{1024,1,128,16}}"
    (kernel,) = kernels(text)
    assert kernel.size == (1, 2 * 64, 16, 8 * 4 // 4)


@pytest.mark.parametrize(
    ("image", "weight", "groups", "kind"),
    [
        ("float16[2,3,4,4]{48,1,12,3}", "float16[16,3,3,3]{27,1,9,3}", 1, "first_convolution"),
        (LAST, "float16[16,4,3,3]{36,1,12,4}", 2, "grouped_convolution"),
        (LAST, "float16[8,1,3,3]", 8, "depthwise_convolution_last"),
        ("float16[2,8,4,4]", "float16[8,1,3,3]", 8, "depthwise_convolution"),
        ("float32[2,8,16]", "float32[16,8,3]", 1, "convolution"),
    ],
)
def test_classes_of_convolutions(image: str, weight: str, groups: int, kind: str) -> None:
    """Convolutions of few channels and of groups are classes; so are signals and volumes convolutions."""
    text = f"aten.convolution {image} {weight} - (1,1) (1,1) (1,1) 0 (0,0) {groups} > {image}"
    assert kernels(text)[0].kind == kind


def test_odd_channels_are_padded() -> None:
    """12 channels in channels_last are copied to 16, and multiplied so."""
    image = "float16[1,12,2,2]{48,1,24,12}"
    product, *copies = kernels(f"aten.convolution {image} float16[8,12,1,1] - {FORM} > float16[1,8,2,2]{{32,1,16,8}}")
    assert product.size == (1, 4, 8, 16)
    assert copies == [Kernel("transpose", 0, 2 * 96)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # in training 3 passes of 512 bytes and 4 vectors of 32 bytes; in inference 2
        (f"native_batch_norm {IMAGE} float32[8] float32[8] - - 1 ~ ~ > {IMAGE}", [("batch_norm", 3 * 512 + 64)]),
        (
            f"native_batch_norm {IMAGE} float32[8] float32[8] - - 0 ~ ~ > {IMAGE}",
            [("evaluated_batch_norm", 2 * 512 + 64)],
        ),
        (f"native_batch_norm_backward {IMAGE} {IMAGE} > {IMAGE}", [("norm", 5 * 512)]),
        # PyTorch's own kernels in bfloat16, in channels_last
        (
            f"native_batch_norm {HALVES} float32[8] float32[8] - - 1 ~ ~ > {HALVES}",
            [("native_batch_norm_last", 3 * 512 + 64)],
        ),
        (f"native_batch_norm_backward {HALVES} {HALVES} > {HALVES}", [("native_batch_norm_backward_last", 5 * 512)]),
        ("native_layer_norm float32[4,8] (8) > float32[4,8]", [("narrow_norm", 256)]),
        ("native_layer_norm float32[2,2048] (2048) > float32[2,2048]", [("norm", 2 * 16384)]),
        ("native_layer_norm float32[4,8]{1,4} (8) > float32[4,8]", [("transposed_copy", 256), ("narrow_norm", 256)]),
        (
            "native_layer_norm_backward float32[4,8] float16[4,8] (8) > float32[4,8]",
            [("narrow_norm", 320), ("narrow_sum", 192)],
        ),
        ("native_group_norm float32[4,8] > float32[4,8]", [("norm", 128), ("norm", 256)]),
        ("_softmax float32[2,1024] -1 0 > float32[2,1024]", [("softmax", 2 * 8192)]),
        ("_softmax float32[2,2048] -1 0 > float32[2,2048]", [("softmax", 3 * 16384)]),
        ("slice_backward float32[2,4] (4,4) 0 0 2 1 > float32[4,4]", [("pointwise", 64), ("strided_copy", 64)]),
        ("add float32[4,8] float32[8] > float32[4,8]", [("strided_copy", 128 + 32 + 128)]),
        ("add float32[4,8]{0,1} float32[4,8] > float32[4,8]", [("strided_copy", 32 + 128 + 128)]),  # one row, expanded
        ("_to_copy float32[4,8] > float16[4,8]", [("copy", 192)]),
        ("clone float32[4,8]{1,4} > float32[4,8]", [("transposed_copy", 256)]),
        ("clone float32[2,4,8]{8,16,1} > float32[2,4,8]", [("strided_copy", 512)]),  # rows of 8 stay together
        ("add float32[4,8] float32[4,8] > float32[4,8]", [("pointwise", 384)]),
        ("add float32[4,8]{16,1} float32[4,8] > float32[4,8]", [("strided_copy", 384)]),  # a slice
        ("_to_copy bfloat16[4,8] > float32[4,8]", [("widening_copy", 192)]),
        (f"cat {HALVES} {HALVES} 1 > bfloat16[2,16,4,4]{{256,1,64,16}}", [("interleaved_copy", 2048)]),
        ("_softmax_backward_data float32[2,8] float32[2,8] > float32[2,8]", [("pointwise", 192), ("softmax", 192)]),
        ("cat float32[4,8] float32[4,8] > float32[8,8]", [("copy", 512)]),
        ("sum float32[4,8] (0) > float32[8]", [("narrow_sum", 160), ("reduction", 0)]),
        ("sum float32[4,8] (1) > float32[4]", [("reduction", 144)]),
        ("sum float16[2,4096] (0) > float16[4096]", [("narrow_sum", 24_576), ("reduction", 0)]),
        ("sum float16[2,4097] (0) > float16[4097]", [("reduction", 24_582), ("reduction", 0)]),
        # heads behind tokens in memory: in the order of the result they are apart
        ("stack float32[2,4,8]{8,16,1} float32[2,4,8]{8,16,1} > float32[2,2,4,8]", [("permuted_copy", 1024)]),
        ("cat float32[4,8]{1,4} float32[4,8]{1,4} 1 > float32[4,16]", [("permuted_copy", 512)]),
        (
            "new_empty float32[4,8] (4,8) > float32[4,8]; aten.bernoulli_ float32[4,8] > float32[4,8]",
            [("pointwise", 256)],
        ),
        ("max_pool2d_with_indices_backward float32[1,1,2,2] > float32[1,1,4,4]", [("pool", 2 * 80)]),
        ("embedding float32[100,8] int64[4] > float32[4,8]", [("gather", 3200 + 32 + 128)]),
        ("max_pool2d_with_indices float16[1,1,4,4] > float16[1,1,2,2] int64[1,1,2,2]", [("pool", 32 + 8 + 32)]),
    ],
)
def test_passes(text: str, expected: list[tuple[str, int]]) -> None:
    """Kernels that memory bounds read and write their tensors as often as PyTorch's."""
    assert moved(f"aten.{text}") == expected


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("add float32[4,8] float32[8]", "pointwise"),
        ("add bfloat16[4,8] float32[4,8]", "copy"),
        ("cat float32[2,8]{1,2} float32[2,8]{1,2}", "copy"),
    ],
)
def test_compiled_passes_read_several_elements_at_once(text: str, kind: str) -> None:
    """Inductor's kernels are not slower where operands are repeated or widened."""
    calls = parsed_calls(f"aten.{text} > float32[4,8]")
    op = PricedOp(calls[0].kind, "", "float32", 0, 1, calls)
    assert rule_of(op)[1](op)[0].kind != kind
    compiled = op._replace(is_compiled=True)
    assert rule_of(compiled)[1](compiled)[0].kind == kind


def test_calls_in_one_memory() -> None:
    """An activation in place is a kernel of its own behind the norm that it has joined."""
    text = f"aten.native_batch_norm {IMAGE} - - - - 0 ~ ~ > {IMAGE}; aten.relu_ {IMAGE} > {IMAGE}"
    assert moved(text) == [("evaluated_batch_norm", 1024), ("pointwise", 1024)]


def test_rows_that_are_added_move_no_more() -> None:
    """A gradient of looked up rows is filled with zeros; then its rows alone are written."""
    text = "aten.new_zeros float32[4,8] (1000,8) > float32[1000,8]; aten.scatter_add_ float32[1000,8] 0 int64[4,8] "
    calls = parsed_calls(f"{text}float32[4,8] > float32[1000,8]")
    op = PricedOp(calls[0].kind, "", "float32", 0, 32_000 + 512, calls)
    assert sum(kernel.bytes for kernel in rule_of(op)[1](op)) == pytest.approx(32_512, abs=2)


@pytest.mark.parametrize(
    ("form", "values", "launches"),
    [
        ("1", IMAGE.replace("float16", "bfloat16"), 3),
        ("1", HALVES, 4),
        ("0", HALVES, 3),
        ("1", IMAGE, 1),
        ("1", LAST, 1),
    ],
)
def test_batch_norms_in_bfloat16_are_several_kernels(form: str, values: str, launches: int) -> None:
    """PyTorch's own kernels are launched one by one; in float16 cuDNN has one, and so has Inductor."""
    text = f"aten.native_batch_norm {values} float32[8] float32[8] - - {form} ~ ~ > {values}"
    assert kernels(text)[0].launches == launches
    calls = parsed_calls(text)
    op = PricedOp(calls[0].kind, "", "bfloat16", 0, call_bytes(calls[0]), calls, is_compiled=True)
    assert rule_of(op)[1](op)[0].launches == 1


def test_scans_across_the_order_of_memory() -> None:
    """A thread goes through a column of 2,048 elements alone, for 370 ns each, and not through a row."""
    across, along = (kernels(f"aten.cumsum int64[2048,8] {dim} > int64[2048,8]")[0] for dim in (0, 1))
    assert across.size == (1, 370 * 2048)
    assert along.size == ()


def test_memory_formats() -> None:
    """Strides say whether an image is in channels_last; where one pixel leaves it open, it is not, as in PyTorch."""
    for size in ((2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 1, 4, 4), (8, 4, 1, 1)):
        tensor = torch.empty(size)
        last = torch.channels_last if len(size) == 4 else torch.channels_last_3d
        for each in (tensor, tensor.to(memory_format=last)):
            is_last = torch._prims_common.suggest_memory_format(each) is last
            assert is_channels_last(Array("float32", size, each.stride())) == is_last


def test_transposing_needs_two_long_dimensions() -> None:
    """Permuting a dimension of one element moves nothing."""
    (call,) = parsed_calls("aten.clone float32[4,1,8]{8,1,1} > float32[4,1,8]{8,8,1}")
    assert not transposes(call)


def test_all_ops_of_small_models_have_kernels() -> None:
    """Each op has a rule, or a class by its name, and moves at least what it must; some gradients read no weights."""
    for model, size in MODELS.values():
        graph = capture(model(), torch.randn(size)).graph
        found = kernels_of(graph, rule_of)
        is_moving = graph.bytes_accessed > 0
        assert (found.counts[is_moving] > 0).all()
        is_moving &= np.array(graph.kinds) != "aten.convolution_backward"
        assert (found.summed(found.bytes) >= graph.bytes_accessed)[is_moving].all()
        assert found.kinds.max() < len(CLASSES)
        assert np.isfinite(found.sizes).all()


@pytest.mark.parametrize(
    ("optimizer", "passes", "launches"),
    [  # passes over 4 bytes of each of 17 * 16 elements of a linear layer
        ("sgd-momentum,for-loop", 2 + 3 + 3, 3),  # momentum, gradient, step
        ("sgd-momentum", 2 + 3 + 3, 3 / 48),
        ("sgd-momentum,fused", 5, 1 / 48),
        ("adamw", 2 + 3 + 2 + 3 + 2 + 2 + 2 + 4, 8 / 48),  # decay, mean, square 5, root, correction, epsilon, step
        ("adam,fused", 7, 1 / 48),
    ],
)
def test_optimizers_by_implementation(optimizer: str, passes: int, launches: float) -> None:
    """A loop has its calls for each parameter, `foreach` as many for 48, and one fused kernel reads and writes once."""
    graph = capture(torch.nn.Linear(16, 16), torch.randn(2, 16), optimizer=optimizer).graph
    found, is_update = kernels_of(graph, rule_of), graph.is_in_phase("update")
    assert found.summed(found.bytes)[is_update].sum() == passes * 4 * 17 * 16
    assert found.counts[is_update] == pytest.approx([launches, launches])


@pytest.mark.parametrize("optimizer", ["adam,quick", "adafactor,fused", "adam,"])
def test_unknown_implementations(optimizer: str) -> None:
    """What torch.optim does not have is refused."""
    with pytest.raises(InputError, match="behind the comma, one of foreach, fused, for-loop of adam, adamw"):
        capture(torch.nn.Linear(2, 2), torch.randn(2, 2), optimizer=optimizer)
