"""Models of published sizes with few layers, one of each kind, as functions that gdp captures."""

from typing import Any

import torch
import transformers as tf
from torch import nn

from tests.models.shard_cases import Modulated

BATCH, TOKENS = 2, 512
Example = tuple[nn.Module, tuple[()], dict[str, Any]]
_DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
}


def _decoder(kind: str, sizes: tuple[int, ...], **options: Any) -> Example:
    """Returns a decoder of (width, inner width, heads, key heads, vocabulary) in bfloat16, and its inputs."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    options |= dict(zip(keys, sizes, strict=True)) | {"num_hidden_layers": 2, "use_cache": False, "pad_token_id": 0}
    config = getattr(tf, f"{kind}Config")(**options)
    return _language(getattr(tf, f"{kind}ForCausalLM")(config), config.vocab_size)


def _language(model: nn.Module, vocabulary: int) -> Example:
    ids = torch.randint(vocabulary, (BATCH, TOKENS))
    return model.bfloat16(), (), {"input_ids": ids, "labels": ids}


def llama_7b() -> Example:
    return _decoder("Llama", (4096, 11008, 32, 32, 32000))


def llama_8b() -> Example:
    return _decoder("Llama", (4096, 14336, 32, 8, 128256))


def llama_70b() -> Example:
    return _decoder("Llama", (8192, 28672, 64, 8, 128256))


def qwen3_8b() -> Example:
    return _decoder("Qwen3", (4096, 12288, 32, 8, 151936), head_dim=128)


def phi3_mini() -> Example:
    return _decoder("Phi3", (3072, 8192, 32, 32, 32064))


def mixtral() -> Example:
    return _decoder("Mixtral", (4096, 14336, 32, 8, 32000), experts_implementation="grouped_mm")


def qwen3_30b() -> Example:
    options = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    return _decoder("Qwen3Moe", (2048, 6144, 32, 4, 151936), **options, experts_implementation="grouped_mm")


def deepseek_v3() -> Example:
    sizes = (7168, 18432, 128, 128, 129280)
    return _decoder("DeepseekV3", sizes, **_DEEPSEEK, experts_implementation="grouped_mm")


def gpt2_medium() -> Example:
    config = tf.GPT2Config(n_embd=1024, n_layer=2, n_head=16, use_cache=False)
    return _language(tf.GPT2LMHeadModel(config).eval(), config.vocab_size)


def bert_large() -> Example:
    config = tf.BertConfig(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=2, hidden_dropout_prob=0.0
    )
    return _language(tf.BertForMaskedLM(config).eval(), config.vocab_size)


def t5_large() -> Example:
    config = tf.T5Config(
        d_model=1024, d_ff=4096, num_heads=16, d_kv=64, num_layers=2, use_cache=False, decoder_start_token_id=0
    )
    return _language(tf.T5ForConditionalGeneration(config).eval(), config.vocab_size)


def vit_large() -> Example:
    config = tf.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=4, num_labels=1000
    )
    inputs = {"pixel_values": torch.randn(BATCH, 3, 224, 224, dtype=torch.bfloat16), "labels": torch.zeros(2).long()}
    return tf.ViTForImageClassification(config).eval().bfloat16(), (), inputs


class Diffusion(nn.Module):
    """Blocks of DiT-XL/2 with a linear layer of latents before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 1152), nn.Linear(1152, 16)
        self.blocks = nn.ModuleList(Modulated(1152, 4608, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x)
        for block in self.blocks:
            y = block(y)
        return {"loss": (self.last(y) - x).square().mean()}


def dit_xl() -> Example:
    return Diffusion().bfloat16(), (), {"x": torch.randn(BATCH, TOKENS, 16, dtype=torch.bfloat16)}
