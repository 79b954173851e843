"""The steps that `benchmarks.card` measures, and the makers of their models."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EXAMPLE = tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor], int]  # module, inputs, loss, size
Make = Callable[[int], EXAMPLE]  # of a number of samples


@dataclass(frozen=True, slots=True)
class StepCase:
    """A step as it is measured: how many samples, in which numbers and memory format, and how it is run."""

    model: str
    phase: str  # train, infer
    batch: int  # samples
    precision: str  # mixed (autocast to bfloat16), bfloat16, float32 (with TF32)
    memory_format: str  # nchw, nhwc; "" for text
    runtime: str  # eager, compile, cuda-graphs
    optimizer: str = ""  # sgd (with momentum), adamw-loop, adamw-foreach, adamw-fused


def image_model(name: str, size: int = 224) -> Make:
    """Returns a maker of timm's model of that name, with images of `size`."""

    def make(batch: int) -> EXAMPLE:
        import timm

        images = torch.randn(batch, 3, size, size, device="cuda")
        classes = torch.randint(0, 1000, (batch,), device="cuda")
        return timm.create_model(name), (images,), lambda out: functional.cross_entropy(out.float(), classes), size

    return make


class Logits(nn.Module):
    """A Transformers model that takes token ids and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


def text_model(config: str, num_tokens: int, head: str, **sizes: Any) -> Make:
    """Returns a maker of the Transformers model of a config class with these sizes, with fused attention."""

    def make(batch: int) -> EXAMPLE:
        import transformers

        described = getattr(transformers, config)(**sizes)
        model = getattr(transformers, head).from_config(described, attn_implementation="sdpa")
        model.config.use_cache = False
        ids = torch.randint(0, model.config.vocab_size, (batch, num_tokens), device="cuda")
        return Logits(model), (ids,), partial(_token_loss, ids), num_tokens

    return make


class Lstm(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 1024)
        self.lstm = nn.LSTM(1024, 1024, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(1024, 10_000)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.lstm(self.embedding(ids))[0])
        return logits


def lstm(batch: int) -> EXAMPLE:
    """Makes `Lstm` with 64 tokens a sample."""
    ids = torch.randint(0, 10_000, (batch, 64), device="cuda")
    return Lstm(), (ids,), partial(_token_loss, ids), 64


def mlp(batch: int) -> EXAMPLE:
    """Makes 16 linear layers of 4,096 with ReLU."""
    model = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(4096, 4096), nn.ReLU())])
    return model, (torch.randn(batch, 4096, device="cuda"),), lambda out: out.float().square().mean(), 4096


def _token_loss(ids: Tensor, logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


_CAUSAL = "AutoModelForCausalLM"
_BERT_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
}
_QWEN: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
_QWEN |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
_GPT_NEOX: dict[str, Any] = _BERT_LARGE | {"vocab_size": 50_304}
_OPT: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096}
_MISTRAL: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 8}
_GEMMA: dict[str, Any] = {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "head_dim": 256}
_GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262_144}
TEXTS = {
    "hf:gpt2": text_model("GPT2Config", 1024, _CAUSAL),
    "hf:llama-1.1b": text_model("LlamaConfig", 2048, _CAUSAL, num_key_value_heads=4, vocab_size=32_000, **_LLAMA),
    "hf:bert-large": text_model("BertConfig", 512, "AutoModelForMaskedLM", **_BERT_LARGE),
    "hf:qwen3-0.6b": text_model("Qwen3Config", 1024, _CAUSAL, tie_word_embeddings=True, **_QWEN),
}
FURTHER_TEXTS = {
    "hf:pythia-410m": text_model("GPTNeoXConfig", 2048, _CAUSAL, **_GPT_NEOX),
    "hf:opt-350m": text_model("OPTConfig", 1024, _CAUSAL, **_OPT),
    "hf:roberta-base": text_model("RobertaConfig", 512, "AutoModelForMaskedLM", max_position_embeddings=514),
    "hf:mistral-8-layers": text_model("MistralConfig", 2048, _CAUSAL, sliding_window=None, **_MISTRAL),
    "hf:gemma3-1b": text_model("Gemma3TextConfig", 1024, _CAUSAL, **_GEMMA),
}
IMAGES = {
    f"timm:{name}": image_model(name)
    for name in (
        *("resnet50", "vit_base_patch16_224", "convnext_tiny", "efficientnet_b0", "mobilenetv3_large_100"),
        *("swin_tiny_patch4_window7_224", "resnext50_32x4d", "densenet121", "regnety_032", "mixer_b16_224"),
    )
} | {"timm:inception_v3": image_model("inception_v3", 299)}
FURTHER_IMAGES = {
    f"timm:{name}": image_model(name)
    for name in (
        *("resnet101", "deit_small_patch16_224", "mobilenetv2_100", "convnext_base", "vgg16_bn", "efficientnetv2_rw_s"),
        *("regnetx_032", "beit_base_patch16_224", "swin_base_patch4_window7_224", "poolformer_s12", "seresnet50"),
        *(
            "vit_large_patch16_224",
            "nfnet_l0",
            "hrnet_w18",
            "xcit_small_12_p16_224",
            "res2net50_26w_4s",
            "ghostnet_100",
        ),
        *("maxvit_tiny_tf_224", "wide_resnet50_2", "dla60"),
    )
}
MODELS: Mapping[str, Make] = TEXTS | FURTHER_TEXTS | IMAGES | FURTHER_IMAGES | {"lstm": lstm, "mlp": mlp}


def step_cases() -> Iterator[StepCase]:
    """Yields the steps to measure, the most telling first."""
    images = list(IMAGES)
    for name in TEXTS:
        for batch in (1, 8):
            yield StepCase(name, "train", batch, "mixed", "", "eager", "adamw-fused")
        yield StepCase(name, "infer", 8, "bfloat16", "", "eager")
    for name in images[:6]:
        yield from _image_steps(name, "eager")
    yield StepCase("lstm", "train", 64, "mixed", "", "eager", "adamw-fused")
    yield StepCase("mlp", "train", 256, "bfloat16", "", "eager", "adamw-foreach")
    for name in images[:2]:
        yield StepCase(name, "train", 16, "mixed", "nhwc", "eager", "sgd")
        yield StepCase(name, "train", 128, "mixed", "nchw", "eager", "sgd")
        yield StepCase(name, "train", 128, "float32", "nchw", "eager", "sgd")
        yield StepCase(name, "infer", 8, "mixed", "nhwc", "cuda-graphs")
        yield StepCase(name, "infer", 256, "mixed", "nchw", "eager")
    for optimizer in ("adamw-foreach", "adamw-loop"):
        yield StepCase("hf:gpt2", "train", 8, "mixed", "", "eager", optimizer)
    for precision in ("bfloat16", "float32"):
        yield StepCase("hf:gpt2", "train", 8, precision, "", "eager", "adamw-fused")
    for runtime in ("cuda-graphs", "eager"):
        yield StepCase("hf:gpt2", "infer", 1, "bfloat16", "", runtime)
    for name in images[6:]:
        yield from _image_steps(name, "eager")
    for name in ("hf:gpt2", "timm:resnet50", "timm:vit_base_patch16_224", "timm:convnext_tiny", "hf:llama-1.1b"):
        if name in TEXTS:
            yield StepCase(name, "train", 8, "mixed", "", "compile", "adamw-fused")
            yield StepCase(name, "infer", 8, "bfloat16", "", "compile")
        else:
            yield from _image_steps(name, "compile")
    for name in images[2:6]:
        yield StepCase(name, "train", 128, "mixed", "nchw", "eager", "sgd")
    for name in ("hf:gpt2", "hf:llama-1.1b"):
        for batch in (2, 4):
            yield StepCase(name, "train", batch, "mixed", "", "eager", "adamw-fused")


def _image_steps(name: str, runtime: str) -> Iterator[StepCase]:
    yield StepCase(name, "train", 128, "mixed", "nhwc", runtime, "sgd")
    yield StepCase(name, "infer", 256, "mixed", "nhwc", runtime)


def further_step_cases() -> Iterator[StepCase]:
    """Yields steps of other models, an image model in one memory format trained and in the other for inference."""
    texts, images = list(FURTHER_TEXTS), list(FURTHER_IMAGES)
    for number, name in enumerate(images):
        formats = ("nhwc", "nchw") if number % 2 == 0 else ("nchw", "nhwc")
        yield StepCase(name, "train", 64, "mixed", formats[0], "eager", "sgd")
        yield StepCase(name, "infer", 128, "mixed" if number % 3 else "bfloat16", formats[1], "eager")
        if number < len(texts):
            how = ("foreach", "fused", "loop")[number % 3]
            yield StepCase(texts[number], "train", 4, "mixed", "", "eager", f"adamw-{how}")
            yield StepCase(texts[number], "infer", 8, "bfloat16", "", "eager")
    for name in ("hf:pythia-410m", "timm:deit_small_patch16_224", "timm:mobilenetv2_100", "timm:resnet101"):
        memory_format = "nhwc" if name in FURTHER_IMAGES else ""
        yield StepCase(name, "infer", 64 if memory_format else 8, "bfloat16", memory_format, "compile")
