"""`hf:DIR` captures models from their configs alone; a capture computes what the model computes, bit for bit."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import model_configs
from fake_cuda import has_cuda_kernel
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.model import Reading
from gdp.models.pytorch.loss import pick_loss
from gdp.models.pytorch.program import named_tensors
from gdp.models.pytorch.replacements import function_for
from gdp.models.source import ModelSource, load

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": 30, "max_position_embeddings": 8}
DECODERS = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
IMAGES = {"image_size": 16, "num_labels": 5}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "bottleneck"}
# at least 2 of everything: of a dimension of 1, fake and real tensors may have other strides, and products other bits
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}

# (architecture, or none; config; sizes beside a batch of 4)
TINY: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertForMaskedLM", {**TEXT, **WIDTHS}, ""),
    "bert bare": ("", {**TEXT, **WIDTHS}, ""),
    "bert next sentence": ("BertForPreTraining", {**TEXT, **WIDTHS}, ""),
    "bert questions": ("BertForQuestionAnswering", {**TEXT, **WIDTHS}, "&sequence=5"),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 30, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}, ""),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 30,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "n_positions": 8,
            "decoder_start_token_id": 0,
        },
        "",
    ),
    "bart": ("BartForConditionalGeneration", {**DECODERS, "max_position_embeddings": 8, "encoder_layerdrop": 0.5}, ""),
    "vit": ("ViTForImageClassification", {**WIDTHS, **IMAGES, "patch_size": 8}, ""),
    "swin": (
        "SwinForImageClassification",
        {**IMAGES, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4},
        "",
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **DECODERS,
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 8,
            "pad_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 2,
        },
        "",
    ),
    "clip": (
        "CLIPModel",
        {
            "projection_dim": 16,
            "text_config": {**TEXT, **WIDTHS, "eos_token_id": 29, "bos_token_id": 28},
            "vision_config": {**WIDTHS, "image_size": 16, "patch_size": 8},
        },
        "",
    ),
    "detr": (
        "DetrForObjectDetection",
        {
            **DECODERS,
            "num_queries": 4,
            "use_timm_backbone": False,
            "backbone_config": {**RESNET, "model_type": "resnet", "out_features": ["stage2"]},
        },
        "&image=32",
    ),
    "sam": (
        "SamModel",
        {
            "vision_config": {
                **WIDTHS,
                "output_channels": 16,
                "image_size": 32,
                "patch_size": 8,
                "window_size": 2,
                "mlp_dim": 24,
                "global_attn_indexes": [1],
                "num_pos_feats": 8,
            },
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            "mask_decoder_config": {
                "hidden_size": 16,
                "num_attention_heads": 2,
                "mlp_dim": 16,
                "iou_head_hidden_dim": 8,
            },
        },
        "",
    ),
    "llama": ("LlamaForCausalLM", {**TEXT, **WIDTHS, **GROUPED, "torch_dtype": "bfloat16"}, ""),
    "mixtral": ("MixtralForCausalLM", {**TEXT, **WIDTHS, **EXPERTS}, ""),
    "mixtral bfloat16": ("MixtralForCausalLM", {**TEXT, **WIDTHS, **EXPERTS}, "&dtype=bfloat16"),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        "&sequence=4",
    ),
    "efficientnet": (
        "EfficientNetForImageClassification",
        {"image_size": 32, "num_labels": 5, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
        "",
    ),
    "resnet": ("ResNetForImageClassification", {**RESNET, "num_labels": 5}, "&image=32"),
    "unet": (
        "",
        {
            "_class_name": "UNet2DConditionModel",
            "sample_size": 8,
            "block_out_channels": [8, 16],
            "layers_per_block": 1,
            "cross_attention_dim": 12,
            "attention_head_dim": 4,
            "norm_num_groups": 4,
            "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        },
        "&sequence=5",
    ),
}


INFERRED = ("bert", "gpt2", "t5", "whisper", "swin", "mixtral bfloat16", "mamba", "unet")
"""Without training these run other code; ops of the others are those of the forward pass of their training step."""


def write(directory: Path, content: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def model_of(name: str, directory: Path) -> str:
    """MODEL of a tiny config, written to `directory`."""
    architecture, config, sizes = TINY[name]
    if "_class_name" not in config:
        config = {"model_type": name.partition(" ")[0], **config}
    if architecture:
        config = {"architectures": [architecture], **config}
    return f"hf:{write(directory, config)}?batch=4{sizes}"


def random_order(graph: Graph, seed: int) -> list[int]:
    """A random topological order; the graph's tensors are the only constraint."""
    draw = random.Random(seed)
    waiting = np.bincount(graph.consumers, minlength=graph.num_ops).tolist()
    after: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for tensor, consumer in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        after[graph.producers[tensor]].append(consumer)
    ready, order = [op for op in range(graph.num_ops) if not waiting[op]], []
    while ready:
        op = ready.pop(draw.randrange(len(ready)))
        order.append(op)
        for consumer in after[op]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                ready.append(consumer)
    return order


class Seeded(TorchDispatchMode):
    """Seeds the n-th operator that draws with n, as a program does."""

    num_draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in str(func):
            torch.manual_seed(self.num_draws)
            self.num_draws += 1
        return func(*args, **(kwargs or {}))


def real_model(text: str, reading: Reading) -> tuple[nn.Module, dict[str, Any]]:
    """The model with parameters drawn, none of them left at a tidy first value, and its inputs."""
    torch.manual_seed(3)
    model, args, kwargs = ModelSource(text, reading).build()
    assert args == ()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model, kwargs


def same(found: Any, expected: Any) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in INFERRED)) for name in TINY]
)
def test_inference_has_the_librarys_bits(name: str, tmp_path: Path) -> None:
    """Inference of a config gives the bits that Transformers gives, its ops in a random order."""
    text = model_of(name, tmp_path)
    found = ModelSource(text, Reading(training=False)).capture()
    assert not found.coverage.unknown
    assert set(found.graph.phases) == {"forward"}
    model, inputs = real_model(text, Reading(training=False))
    assert not model.training
    with torch.no_grad(), Seeded():
        expected = dict(named_tensors(model(**inputs), ""))
    assert expected
    replay = found.program.replay(model, (), inputs, random_order(found.graph, seed=1))
    assert same(replay.outputs, expected)


@pytest.mark.parametrize("name", TINY)
def test_training_has_the_librarys_bits(name: str, tmp_path: Path) -> None:
    """A training step of a config gives the bits that Transformers gives, its ops in a random order."""
    text = model_of(name, tmp_path)
    reading = Reading(optimizer="sgd", precision="pure-bf16" if "bfloat16" in str(TINY[name]) else "float32")
    found = ModelSource(text, reading).capture()
    assert not found.coverage.unknown
    functions = {function_for(call.func, torch.device("cuda")) for calls in found.program.calls for call in calls}
    assert not [func for func in functions if isinstance(func, OpOverload) and not has_cuda_kernel(func)]
    model, inputs = real_model(text, reading)
    assert model.training
    replay = found.program.replay(model, (), inputs, random_order(found.graph, seed=2))
    update = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    with Seeded():
        loss = pick_loss(model(**inputs), None, name)
        loss.backward()
    gradients = {path: tensor.grad.clone() for path, tensor in model.named_parameters() if tensor.grad is not None}
    assert torch.equal(replay.loss, loss.detach())
    assert same(replay.gradients, gradients)
    update.step()
    assert all(torch.equal(replay.state[path], tensor) for path, tensor in model.named_parameters())


def test_flops_of_grouped_products(tmp_path: Path) -> None:
    """4 x 8 tokens with 2 of 4 experts each: 64 rows, 16 to 48 and 24 to 16 wide, in 2 layers; backward twice that."""
    forward = 2 * 64 * (16 * 48 + 24 * 16) * 2
    for name in ("mixtral", "mixtral bfloat16"):
        graph = ModelSource(model_of(name, tmp_path)).whole().graph
        found = {"forward": 0, "backward": 0}
        for kind, phase, flops in zip(graph.kinds, graph.phases, graph.flops.tolist(), strict=True):
            if "grouped_mm" in kind:
                found[phase] += flops
        assert found == {"forward": forward, "backward": 2 * forward}


@pytest.mark.parametrize("name", ["bert", "clip", "sam", "unet", "whisper"])
def test_a_micro_batch_is_a_part_of_every_input(name: str, tmp_path: Path) -> None:
    """A quarter of a batch of 4: the same inputs with 1 in place of 4."""
    text = model_of(name, tmp_path)
    _, whole = real_model(text, Reading())
    _, _, part = ModelSource(text).build(4)
    assert part.keys() == whole.keys()
    tensors = {key: tensor for key, tensor in whole.items() if isinstance(tensor, Tensor)}
    assert {key: tuple(part[key].shape) for key in tensors} == {
        key: (1, *tensor.shape[1:]) for key, tensor in tensors.items()
    }
    assert ModelSource(text, Reading(microbatches=4)).whole().graph.num_ops > 0


def test_sizes_and_type_of_a_config(tmp_path: Path) -> None:
    """Sizes and type come from the config unless options give them."""
    config = {"model_type": "bert", **WIDTHS, "vocab_size": 30, "max_position_embeddings": 600}
    text = f"hf:{write(tmp_path, {**config, 'dtype': 'bfloat16'})}"
    with FakeTensorMode():
        model, _, inputs = ModelSource(text).build()
        assert (tuple(inputs["input_ids"].shape), model.dtype) == ((8, 512), torch.bfloat16)
        model, _, inputs = ModelSource(f"{text}?batch=3&sequence=600&dtype=float64").build()
        assert (tuple(inputs["input_ids"].shape), model.dtype) == ((3, 600), torch.float64)


@pytest.mark.parametrize(
    ("dtype", "precision", "types"),
    [
        (None, "", "bf16 weights and gradients, float32 master weights and moments"),
        ("float16", "", "float16 weights and gradients, float32 master weights and moments"),
        ("bfloat16", "float32", "float32 weights, gradients and moments"),
        ("float32", "pure-bf16", "bf16 weights, gradients and moments"),
    ],
)
def test_configs_are_trained_in_mixed_precision(dtype: str | None, precision: str, types: str, tmp_path: Path) -> None:
    """A config's type is that of its file: training is mixed, unless a precision or a type in MODEL says otherwise."""
    text = f"hf:{write(tmp_path, {**BERT, **({'dtype': dtype} if dtype else {})})}?batch=2&sequence=8"
    each = ParameterBytes.of(ModelSource(text, Reading(precision=precision)).whole().graph)
    assert each is not None
    assert (each.types, each.total) == (types, 8.0 if precision == "pure-bf16" else 16.0)


def test_types_in_model_win_over_mixed_precision(tmp_path: Path) -> None:
    """`?dtype=float32` is trained in float32, and contradicts a precision in bfloat16."""
    text = f"hf:{write(tmp_path, BERT)}?batch=2&sequence=8&dtype=float32"
    assert ModelSource(text).reading.precision == ""
    with pytest.raises(InputError, match="weights in bfloat16 or float16, and the dtype is float32"):
        ModelSource(text, Reading(precision="mixed"))


# a kind of model each; others are long, half a minute of building
BUILT = ("bert-base", "t5-base", "swin-tiny", "clip-vit-b-32", "mamba-130m", "sd-1.5-unet")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in BUILT)) for name in model_configs.names()]
)
def test_configs_of_benchmarks(name: str, tmp_path: Path) -> None:
    """The configs of the benchmarks have the parameters of the published models."""
    with FakeTensorMode():
        model, _, _ = ModelSource(model_configs.write_model(name, tmp_path)).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == model_configs.get(name).num_parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("vit-base", 17.58),  # torchvision's tables
        pytest.param("swin-tiny", 4.49, marks=pytest.mark.long),
        pytest.param("efficientnet-b0", 0.386, marks=pytest.mark.long),
        ("llama-7b", 512 * 6.607),  # a multiply-add a token for each weight, but for those of the embedding
        pytest.param("mixtral-8x7b", 512 * 12.75, marks=pytest.mark.long),  # of 2 of 8 experts
    ],
)
def test_published_multiply_adds(name: str, billions: float, tmp_path: Path) -> None:
    """What is more is normalisation, activation and, of the language models, attention."""
    graph = load(model_configs.write_model(name, tmp_path), training=False)
    assert 1 <= graph.flops.sum() / (8 * 2e9 * billions) < 1.1


def test_a_decision_by_content_is_refused(tmp_path: Path) -> None:
    """BART's classifier reads the token at each sample's end mark, of which there may be any number."""
    config = {"model_type": "bart", **DECODERS, "max_position_embeddings": 8}
    text = f"hf:{write(tmp_path, {**config, 'architectures': ['BartForSequenceClassification']})}"
    for training in (True, False):
        with pytest.raises(InputError, match="depends on a tensor's content, which a capture does not have"):
            ModelSource(text, Reading(training)).capture()


BERT = {"model_type": "bert", **TEXT, **WIDTHS}


def test_the_librarys_class_wins_over_code(tmp_path: Path) -> None:
    """Code beside a config is not run, and the class of Transformers is placed."""
    text = f"hf:{write(tmp_path, {**BERT, 'auto_map': {'AutoConfig': 'evil.Config', 'AutoModel': 'evil.Model'}})}"
    (tmp_path / "evil.py").write_text("raise SystemExit('this was run')\n")
    model = ModelSource(text, Reading(training=False)).whole()
    assert model.notes == (
        f"{text}: its config names code of its own (auto_map), which is not run; the class is Transformers'",
    )
    assert ModelSource(f"hf:{write(tmp_path, BERT)}", Reading(training=False)).whole().notes == ()
    assert any(".layer.0." in path for path in model.graph.modules)


BAD: dict[str, tuple[Any, str, str]] = {
    "no JSON": ('{"model_type": "bert",', "", "not valid JSON .*; mend the file"),
    "no object": ([1], "", "is a list; a JSON object is expected"),
    "code of its own": (
        {"model_type": "evil", "auto_map": {"AutoModel": "evil.Model"}},
        "",
        "'evil' is unknown .*; its auto_map names code, which is never run from a directory: give it as module:f",
    ),
    "quantised": ({**BERT, "quantization_config": {"bits": 4}}, "", "quant_method '', which is not modelled"),
    "no type": (WIDTHS, "", "has no model_type; add "),
    "unknown type": ({"model_type": "berd"}, "", "model_type 'berd' is unknown .*; did you mean bert"),
    "unknown class": ({**BERT, "architectures": ["BertForAll"]}, "", "'BertForAll', no model class .*; correct it"),
    "no model": ({**BERT, "architectures": ["BertConfig"]}, "", "'BertConfig', no model class"),
    "another's class": ({**BERT, "architectures": ["LlamaModel"]}, "", "LlamaModel, which takes LlamaConfig, but"),
    "no list": ({**BERT, "architectures": "BertModel"}, "", "architectures is 'BertModel'; a list"),
    "wrong value": ({**BERT, "hidden_size": "many"}, "", "makes no model .*hidden_size.*; correct config.json"),
    "no sense": ({**BERT, "num_attention_heads": 3}, "", "makes no model .*; correct config.json"),
    "no dtype": ({**BERT, "torch_dtype": "int8"}, "", "dtype is 'int8'; float32, "),
    "a dtype of weights only": ({**BERT, "dtype": "float8_e4m3fn"}, "", "dtype is 'float8_e4m3fn'; float32, "),
    "no name": ({"_class_name": ["UNet2DModel"]}, "", r"_class_name is \['UNet2DModel'\], no model of Diffusers"),
    "Diffusers": ({"_class_name": "Unheard"}, "", "_class_name is 'Unheard', no model of Diffusers"),
    "no query": (BERT, "?", "'' is no size; NAME=VALUE"),
    "no size": (BERT, "?batches=2", "'batches=2' is no size; NAME=VALUE with batch, sequence, image, dtype, "),
    "twice": (BERT, "?batch=2&batch=2", "batch is given twice"),
    "no number": (BERT, "?batch=0", "batch is '0'; an integer of at least 1"),
    "too long": (BERT, "?sequence=9", "sequence is 9; the model has 8 positions"),
    "no images": (BERT, "?image=9", "image is given, but the model reads input_ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configs(case: str, tmp_path: Path) -> None:
    """A bad config is one line with the remedy."""
    content, query, message = BAD[case]
    with pytest.raises(InputError, match=message) as raised:
        ModelSource(f"hf:{write(tmp_path, content)}{query}").capture()
    assert "\n" not in str(raised.value)


def test_paths_without_a_config(tmp_path: Path) -> None:
    """A path that is no directory with a config is an input error."""
    with pytest.raises(InputError, match="names no directory"):
        ModelSource("hf:").build()
    with pytest.raises(InputError, match="nowhere: no such directory; "):
        ModelSource("hf:nowhere").build()
    with pytest.raises(InputError, match=r"has no config\.json; name a directory"):
        ModelSource(f"hf:{tmp_path}").build()
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(InputError, match=r"but model_index\.json; name its unet or transformer directory"):
        ModelSource(f"hf:{tmp_path}").build()


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    """A config that names its own code is refused, and the code is not run."""
    write(tmp_path, {**BERT, "architectures": ["BertModel"]})
    for name in ("modeling_bert.py", "configuration_bert.py", "__init__.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('run')")
    assert load(f"hf:{tmp_path}?batch=2").num_ops > 0


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Transformers the error names the extra to install."""
    text = f"hf:{write(tmp_path, BERT)}"
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"needs Transformers; pip install 'gdp-placement\[hf\]'"):
        ModelSource(text).build()
