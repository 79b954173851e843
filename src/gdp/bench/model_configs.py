"""Published models as Transformers and Diffusers configs, and one built-in workload: what `bench capture` captures.

Every config has the shape that its authors published, in the keys of the library's `config.json`; what equals the
library's defaults is left out. Parameters are counted as in the authors' checkpoints, tied ones once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdp import files
from gdp.devices import suggest
from gdp.errors import InputError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A published model: its `config.json`, the sizes that it is captured with (`hf:DIR?SIZES`), its parameters."""

    name: str
    config: Mapping[str, Any]
    num_parameters: int
    sizes: str = ""  # "": a batch of 8, as many tokens as the model has positions, at most 512


def names() -> tuple[str, ...]:
    """The models that have a config."""
    return tuple(_CONFIGS)


def get(name: str) -> ModelConfig:
    """The model of that name. InputError if there is none."""
    if name not in _CONFIGS:
        raise InputError(f"model {name!r}: no published config of that name; {suggest(name, names())}")
    return _CONFIGS[name]


def write_config(name: str, directory: str | Path) -> Path:
    """Write `config.json` of that model to `directory`/`name`, which is made if need be; returns that directory."""
    found = get(name)
    path = Path(directory) / name
    path.mkdir(parents=True, exist_ok=True)
    files.write_json(path / "config.json", dict(found.config))
    return path


def write_model(name: str, directory: str | Path) -> str:
    """`write_config`, and the MODEL that stands for it with its sizes: `hf:DIR?SIZES`."""
    path, sizes = write_config(name, directory), get(name).sizes
    return f"hf:{path}?{sizes}" if sizes else f"hf:{path}"


_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "torch_dtype": "float16",
}  # fmt: skip

_MODELS = (
    # Devlin et al. 2018, google-bert/bert-base-uncased
    ModelConfig("bert-base", {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 30522, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    }, 109_514_298),
    # Raffel et al. 2019, google-t5/t5-base
    ModelConfig("t5-base", {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 32128, "d_model": 768,
        "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "n_positions": 512, "decoder_start_token_id": 0,
        "is_encoder_decoder": True,
    }, 222_903_552),
    # Dosovitskiy et al. 2020, google/vit-base-patch16-224
    ModelConfig("vit-base", {
        "architectures": ["ViTForImageClassification"], "model_type": "vit", "image_size": 224, "patch_size": 16,
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "num_labels": 1000,
    }, 86_567_656),
    # Liu et al. 2021, microsoft/swin-tiny-patch4-window7-224
    ModelConfig("swin-tiny", {
        "architectures": ["SwinForImageClassification"], "model_type": "swin", "image_size": 224, "patch_size": 4,
        "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 7, "num_labels": 1000,
    }, 28_288_354),
    # Radford et al. 2022, openai/whisper-small
    ModelConfig("whisper-small", {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "vocab_size": 51865,
        "num_mel_bins": 80, "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "max_source_positions": 1500,
        "max_target_positions": 448, "is_encoder_decoder": True,
    }, 241_734_912),
    # Radford et al. 2021, openai/clip-vit-base-patch32
    ModelConfig("clip-vit-b-32", {
        "architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 512,
        "text_config": {"model_type": "clip_text_model", "vocab_size": 49408, "max_position_embeddings": 77,
                        "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
                        "intermediate_size": 2048},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 32, "hidden_size": 768,
                          "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    }, 151_277_313),
    # Carion et al. 2020, facebook/detr-resnet-50, its backbone as Transformers' own ResNet
    ModelConfig("detr-resnet-50", {
        "architectures": ["DetrForObjectDetection"], "model_type": "detr", "d_model": 256, "encoder_layers": 6,
        "decoder_layers": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048, "num_queries": 100, "num_labels": 91, "use_timm_backbone": False,
        "backbone_config": {"model_type": "resnet", "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048],
                            "depths": [3, 4, 6, 3], "layer_type": "bottleneck", "out_features": ["stage4"]},
    }, 41_524_768),
    # Kirillov et al. 2023, facebook/sam-vit-base; 256 frequencies of positions are parameters in Transformers only
    ModelConfig("sam-vit-base", {
        "architectures": ["SamModel"], "model_type": "sam",
        "vision_config": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 1024,
                          "patch_size": 16, "output_channels": 256, "window_size": 14,
                          "global_attn_indexes": [2, 5, 8, 11]},
    }, 93_735_472 + 256),
    # Touvron et al. 2023, meta-llama/Llama-2-7b-hf and Llama-2-70b-hf
    ModelConfig("llama-7b", {
        **_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
    }, 6_738_415_616),
    ModelConfig("llama-70b", {
        **_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672,
    }, 68_976_648_192),
    # Jiang et al. 2024, mistralai/Mixtral-8x7B-v0.1
    ModelConfig("mixtral-8x7b", {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
    }, 46_702_792_704),
    # Gu and Dao 2023, state-spaces/mamba-130m-hf; its scan is a loop over the tokens
    ModelConfig("mamba-130m", {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 50280, "hidden_size": 768,
        "num_hidden_layers": 24, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 48,
    }, 129_135_360, "sequence=64"),
    # Tan and Le 2019, google/efficientnet-b0
    ModelConfig("efficientnet-b0", {
        "architectures": ["EfficientNetForImageClassification"], "model_type": "efficientnet", "image_size": 224,
        "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "num_labels": 1000,
    }, 5_288_548),
    # Rombach et al. 2022, stable-diffusion-v1-5, unet/config.json
    ModelConfig("sd-1.5-unet", {
        "_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4,
        "block_out_channels": [320, 640, 1280, 1280], "layers_per_block": 2, "cross_attention_dim": 768,
        "attention_head_dim": 8, "norm_num_groups": 32,
        "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    }, 859_520_964),
)  # fmt: skip
_CONFIGS: Mapping[str, ModelConfig] = {model.name: model for model in _MODELS}
