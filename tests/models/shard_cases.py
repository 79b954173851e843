"""Tiny models, with inputs and labels, that tests cut over ranks."""

from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, parallel

from gdp.models.pytorch.shards.given_styles import styles_noted

BATCH, TOKENS, WIDTH, INNER, HEADS, VOCABULARY = 2, 8, 64, 128, 4, 256
_DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {name: _DECODER[name] for name in list(_DECODER)[:4]} | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5 = {"decoder_start_token_id": 0, "pad_token_id": 0, "feed_forward_proj": "gated-gelu"}
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}


_LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


class Stack(nn.Module):
    """Runs layers and a head, and returns the loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x.mean(1)), labels)}


class Block(nn.Module):
    """Adds to its input what two linear layers make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Scaled(Block):
    """The same with sums of a product and of a bias, each times a number."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x).relu().flatten(0, 1)
        return x + torch.addmm(self.down.bias, rows, self.down.weight.t(), alpha=2.0, beta=0.5).view_as(x)


class Heads(nn.Module):
    """Attention by sums over letters, its weights of heads and columns; two heads of keys are repeated."""

    def __init__(self) -> None:
        super().__init__()
        shapes = (WIDTH, HEADS, 16), (WIDTH, HEADS // 2, 16), (WIDTH, HEADS // 2, 16), (HEADS, 16, WIDTH)
        self.query, self.key, self.value, self.out = (nn.Parameter(torch.randn(shape) / 8) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        query, *pair = (torch.einsum("btd,dhk->bthk", x, each) for each in (self.query, self.key, self.value))
        key, value = (each.repeat(1, 1, 2, 1) for each in pair)
        shares = torch.einsum("bthk,bshk->bhts", query, key).softmax(-1)
        return x + torch.einsum("bthk,hkd->btd", torch.einsum("bhts,bshk->bthk", shares, value), self.out)


class Modulated(nn.Module):
    """A block of a diffusion transformer: norms are scaled and shifted by a linear layer of a condition."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(x.mean(1)).unsqueeze(1).chunk(6, dim=-1)
        batch, tokens, width = x.shape
        y = self.qkv(self.norm(x) * (1 + scale) + shift)
        q, k, v = y.reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + gate * self.out(y)
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class Balanced(nn.Module):
    """A router that sends each two neighbouring tokens to all four experts, with weights that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH))
        self.register_buffer("choice", 100.0 * nn.functional.one_hot(torch.arange(2).repeat(TOKENS), 2))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.reshape(-1, WIDTH), self.weight).float()
        weights, index = torch.topk(torch.softmax(logits + self.choice.repeat_interleave(2, 1), -1), 2)
        return logits, weights.to(hidden.dtype), index


class Spelled(nn.Module):
    """A block in spellings that users have: learned positions, few heads of keys by views of weights, gates of heads, a
    mixing of tokens, entries that are written, NumPy's names, and letters for all other dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 32, WIDTH))
        self.queries, self.keys = (nn.Parameter(torch.randn(size, WIDTH) / 8) for size in (WIDTH, WIDTH))
        self.gate, self.out = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)
        self.pair = nn.Linear(WIDTH, 2 * INNER)
        self.down = nn.Parameter(torch.randn(INNER, WIDTH) / 8)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        x = x + self.positions[:, :tokens]
        query = (x @ self.queries.t()).view(batch, tokens, HEADS, -1).transpose(1, 2)
        pair = (x @ self.keys.t()).view(batch, tokens, 2, 2, -1).permute(2, 0, 3, 1, 4)  # two heads of each
        key, value = (each.repeat_interleave(HEADS // 2, dim=1) for each in pair)
        y = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        y = y * torch.softmax(input=self.gate(x), dim=-1).unsqueeze(-1)
        x = x + self.out(y.flatten(2))
        x = x + self.attention(x, x, x)[0]
        x = x + torch.fft.fft(x, dim=1).real / 8
        x = x / (1 + torch.linalg.vector_norm(x, dim=-1, keepdim=True) / 8)
        x.masked_scatter_(torch.arange(tokens).view(1, -1, 1) == 3, self.positions[:, :batch])
        x[:, 0] = 0.5
        x[:, 1:3] += 1.0
        gate, up = self.pair(x).chunk(2, axis=-1)
        x = x + torch.einsum("...d,df->...f", gate.sigmoid() * up, self.down)
        x = x * torch.einsum("...d,...d->...", x, self.positions[:, :1]).tanh().unsqueeze(-1)
        x = torch.where(condition=x > 3, input=x / 2, other=x)
        mean = x.mean(axis=-1, keepdim=True)
        return (x - mean) * torch.ones(batch, tokens, 1).expand_as(x)


class Tagged(nn.Module):
    """Scores of classes for each token, in the second dimension as images have them."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Spelled(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.block(x)).transpose(1, 2)
        return {"loss": nn.functional.cross_entropy(scores, labels)}


def _routed() -> nn.Module:
    options = _DECODER | {"num_local_experts": 4} | _EXPERTS
    model = tf.MixtralForCausalLM(_config("Mixtral", **options))
    for layer in model.model.layers:
        layer.mlp.gate = Balanced()
    return model.bfloat16()


def _biased(*, is_balanced: bool) -> nn.Module:
    options = _DECODER | {"head_dim": 16, "num_local_experts": 4, "sliding_window": 4} | _EXPERTS
    model = tf.GptOssForCausalLM(_config("GptOss", **options))
    for layer in model.model.layers if is_balanced else ():
        layer.mlp.router = Balanced()
    return model.bfloat16()


def _given(names: str, **options: Any) -> nn.Module:
    """A decoder that the user's code cuts by `parallelize_module`: these of its weights."""
    rows = {"embed_tokens", "o_proj", "down_proj"}
    paths = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
    with styles_noted():
        mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))["tp"]
        model = tf.LlamaForCausalLM(_config("Llama", **_DECODER | options))
        styles: dict[str, Any] = {}
        for name in names.split():
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            path = paths.get(name, f"model.layers.*.{part}.{name}")
            style = parallel.RowwiseParallel if name in rows else parallel.ColwiseParallel
            styles[path] = style(input_layouts=Replicate()) if name in rows & paths.keys() else style()
        cut: nn.Module = parallel.parallelize_module(model, mesh, styles)
        return cut


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout=0.0, batch_first=True)


def _checkpointed(*, use_reentrant: bool) -> nn.Module:
    model = tf.LlamaForCausalLM(_config("Llama", **_DECODER)).train()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def _config(kind: str, **options: Any) -> Any:
    return getattr(tf, f"{kind}Config")(**options)


_MODELS: dict[str, Any] = {
    "llama": lambda **options: tf.LlamaForCausalLM(_config("Llama", **_DECODER | options)),
    "tied": lambda: tf.LlamaForCausalLM(_config("Llama", **_DECODER, tie_word_embeddings=True)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(_config("Qwen3", **_DECODER, head_dim=16)),
    "phi3": lambda: tf.Phi3ForCausalLM(_config("Phi3", **_DECODER | {"num_key_value_heads": HEADS})),
    "olmo2": lambda: tf.Olmo2ForCausalLM(_config("Olmo2", **_DECODER)),
    "neox": lambda: tf.GPTNeoXForCausalLM(_config("GPTNeoX", **_DECODER)),
    "bloom": lambda: tf.BloomForCausalLM(
        _config("Bloom", hidden_size=WIDTH, n_layer=2, n_head=HEADS, vocab_size=VOCABULARY, use_cache=False)
    ),
    "opt": lambda: tf.OPTForCausalLM(_config("OPT", **_DECODER, ffn_dim=INNER, word_embed_proj_dim=WIDTH)).eval(),
    "bigcode": lambda: tf.GPTBigCodeForCausalLM(
        _config("GPTBigCode", n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=VOCABULARY, n_positions=32)
    ).eval(),
    "gemma": lambda: tf.GemmaForCausalLM(_config("Gemma", **_DECODER | {"num_key_value_heads": 1}, head_dim=16)),
    "phi3-gqa": lambda: tf.Phi3ForCausalLM(_config("Phi3", **_DECODER)),
    "mistral": lambda: tf.MistralForCausalLM(_config("Mistral", **_DECODER, sliding_window=4)),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        _config("GPT2", n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=VOCABULARY + 2, n_positions=32)
    ).eval(),
    "bert": lambda: tf.BertForMaskedLM(_config("Bert", **_ENCODER, vocab_size=VOCABULARY, max_position_embeddings=32)),
    "vit": lambda: tf.ViTForImageClassification(_config("ViT", **_ENCODER, image_size=32, patch_size=8, num_labels=10)),
    "t5": lambda: tf.T5ForConditionalGeneration(
        _config("T5", d_model=WIDTH, d_kv=16, d_ff=INNER, num_layers=2, num_heads=HEADS, vocab_size=VOCABULARY, **_T5)
    ).eval(),
    "mixtral": lambda **options: tf.MixtralForCausalLM(
        _config("Mixtral", **_DECODER | options, num_local_experts=4, **_EXPERTS)
    ).bfloat16(),
    "qwen3moe": lambda: tf.Qwen3MoeForCausalLM(
        _config("Qwen3Moe", **_DECODER, head_dim=16, num_experts=4, moe_intermediate_size=32, **_EXPERTS)
    ).bfloat16(),
    "deepseek": lambda: tf.DeepseekV3ForCausalLM(_config("DeepseekV3", **_DECODER | _LATENT | _EXPERTS)).bfloat16(),
    "gptoss": lambda: _biased(is_balanced=False),
    "gptoss-routed": lambda: _biased(is_balanced=True),
    "routed": _routed,
    "given": lambda: _given("embed_tokens lm_head q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    "given-mlp": lambda: _given("embed_tokens lm_head gate_proj up_proj down_proj", intermediate_size=256),
    "checkpointed": lambda: _checkpointed(use_reentrant=False),
    "reentrant": lambda: _checkpointed(use_reentrant=True),
    "encoder": lambda: Stack(nn.TransformerEncoder(_layer(), 2)),
    "blocks": lambda: Stack(Block(), Block()),
    "scaled": lambda: Stack(Scaled(), Scaled()),
    "heads": lambda: Stack(Heads(), Block()),
    "diffusion": lambda: Stack(Modulated(), Modulated()),
    "spelled": lambda: Stack(Spelled(), Spelled()),
    "tagged": Tagged,
}


def case(name: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model and its inputs, the same each time; with other `options` of a config."""
    torch.manual_seed(0)
    model = _MODELS[name](**options)
    if isinstance(model, Stack):
        return model, {"x": torch.randn(BATCH, TOKENS, WIDTH), "labels": torch.tensor([1, 2])}
    if isinstance(model, Tagged):
        return model, {"x": torch.randn(BATCH, TOKENS, WIDTH), "labels": torch.randint(VOCABULARY, (BATCH, TOKENS))}
    if name == "vit":
        return model, {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.tensor([1, 2])}
    tokens = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
    return model, {"input_ids": tokens, "labels": tokens}
