"""Small models of many architectures: configs of Diffusers and Transformers, with all their kinds of layers.

A step of each takes seconds to capture, and its operators are those of the model's published sizes.
"""

from collections.abc import Mapping
from typing import Any

from gdp.models.names import names

_JOINT = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
_CROSS = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "sample_size": 16}
_ROPE = {"axes_dims_rope": (4, 6, 6)}
_BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_UNET = _BLOCKS | {"sample_size": 16, "cross_attention_dim": 32, "attention_head_dim": 8}

DIFFUSERS: Mapping[str, Mapping[str, Any]] = {
    "FluxTransformer2DModel": _JOINT
    | _ROPE
    | {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32},
    "Flux2Transformer2DModel": _JOINT
    | {"in_channels": 16, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32},
    "ChromaTransformer2DModel": _JOINT
    | _ROPE
    | {"in_channels": 16, "joint_attention_dim": 32, "approximator_hidden_dim": 32, "approximator_layers": 1},
    "SD3Transformer2DModel": _CROSS
    | {"joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 64, "qk_norm": "rms_norm"},
    "QwenImageTransformer2DModel": _JOINT | _ROPE | {"in_channels": 16, "joint_attention_dim": 32},
    "WanTransformer3DModel": _JOINT | {"text_dim": 32, "ffn_dim": 64},
    "SkyReelsV2Transformer3DModel": _JOINT | {"text_dim": 32, "ffn_dim": 64},
    "PixArtTransformer2DModel": _CROSS | {"cross_attention_dim": 32, "caption_channels": 32},
    "SanaTransformer2DModel": _CROSS
    | {
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 32,
    },
    "HunyuanDiT2DModel": _CROSS
    | {"in_channels": 4, "patch_size": 2, "hidden_size": 32, "cross_attention_dim": 32, "cross_attention_dim_t5": 32},
    "HunyuanVideoTransformer3DModel": _JOINT
    | {"num_refiner_layers": 1, "text_embed_dim": 32, "pooled_projection_dim": 32, "rope_axes_dim": (4, 6, 6)},
    "Lumina2Transformer2DModel": {
        "sample_size": 16,
        "hidden_size": 48,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "cap_feat_dim": 32,
        "axes_dim_rope": (4, 4, 4),
        "multiple_of": 16,
    },
    "CogVideoXTransformer3DModel": _CROSS
    | {"text_embed_dim": 32, "sample_width": 16, "sample_height": 16, "use_rotary_positional_embeddings": True},
    "CogView3PlusTransformer2DModel": _CROSS | {"text_embed_dim": 32, "condition_dim": 16},
    "CogView4Transformer2DModel": _CROSS | {"text_embed_dim": 32, "condition_dim": 16, "rope_axes_dim": (8, 8)},
    "LTXVideoTransformer3DModel": _JOINT | {"in_channels": 16, "cross_attention_dim": 32, "caption_channels": 32},
    "AuraFlowTransformer2DModel": {
        "sample_size": 16,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "caption_projection_dim": 32,
    },
    "MochiTransformer3DModel": _CROSS | {"pooled_projection_dim": 32, "text_embed_dim": 32},
    "AllegroTransformer3DModel": _CROSS
    | {
        "cross_attention_dim": 48,
        "caption_channels": 32,
        "sample_height": 16,
        "sample_width": 16,
        "attention_head_dim": 24,
    },
    "LatteTransformer3DModel": _CROSS
    | {
        "in_channels": 4,
        "patch_size": 2,
        "cross_attention_dim": 32,
        "caption_channels": 32,
        "norm_type": "ada_norm_single",
    },
    "DiTTransformer2DModel": _CROSS | {"num_embeds_ada_norm": 10, "norm_num_groups": 8},
    "StableAudioDiTModel": {
        "sample_size": 64,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "in_channels": 8,
        "num_key_value_attention_heads": 1,
        "cross_attention_dim": 32,
        "global_states_input_dim": 32,
        "cross_attention_input_dim": 32,
        "time_proj_dim": 32,
        "out_channels": 8,
    },
    "UNet2DConditionModel": _UNET
    | {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
    "UNet3DConditionModel": _UNET
    | {
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    },
    "UNetSpatioTemporalConditionModel": {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "num_attention_heads": (2, 4),
        "num_frames": 4,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    },
    "UNet2DModel": {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "AutoencoderKL": _BLOCKS
    | {"sample_size": 32, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
    "AutoencoderTiny": {},
    "AutoencoderDC": {
        "latent_channels": 8,
        "attention_head_dim": 8,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "encoder_block_out_channels": (16, 16),
        "decoder_block_out_channels": (16, 16),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu",
    },
    "AutoencoderKLCogVideoX": {
        "block_out_channels": (16, 16, 16, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_height": 32,
        "sample_width": 32,
    },
    "AutoencoderKLWan": {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    "VQModel": {"sample_size": 16, "norm_num_groups": 8, "num_vq_embeddings": 32},
}
"""Configs of Diffusers, by class."""

SIZES = "batch=2&dtype=float32"
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim"), 64
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv"), 16),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "n_inner"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), 512),
    "num_labels": 10,
    "image_size": 64,
    "rotary_dim": 8,
    "vocab_size_per_layer_input": 512,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 128),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
}
TRANSFORMERS = tuple(
    sorted(
        names(
            """
    albert bart beit bert bert-generation big_bird bitnet blenderbot bloom camembert codegen
    cohere convbert convnext convnextv2 ctrl cvt data2vec-text deberta deberta-v2 deit diffllama dinov2
    distilbert efficientnet electra ernie falcon falcon_h1 falcon_mamba fnet focalnet gemma gemma2
    gemma3_text gemma3n_text glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite granitemoe helium
    hiera ibert jamba jetmoe layoutlm led levit llama m2m_100 mamba marian mbart
    megatron-bert mistral mixtral mobilebert mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert
    mpnet mpt mra mvp nemotron nystromformer olmo olmo2 olmoe opt pegasus persimmon phi phi3 phimoe
    plbart poolformer pvt pvt_v2 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next regnet rembert
    resnet roberta roc_bert roformer seed_oss segformer smollm3 squeezebert stablelm starcoder2
    swinv2 switch_transformers t5 umt5 vit vit_msn wav2vec2 whisper xglm xlm xlm-roberta
    yolos yoso
    """
        )
    )
)
"""Types of models of Transformers, which their config makes small."""

_TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "PRETRAINING")


def transformers_config(kind: str) -> dict[str, Any]:
    """Returns the small config of a type of models, for the first task that it has a class for."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = CONFIG_MAPPING[kind]().to_dict()
    tables = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in _TASKS)
    architecture = next((table[kind] for table in tables if kind in table), None)
    architecture = architecture[0] if isinstance(architecture, tuple) else architecture
    config = {"model_type": kind} | {key: value for key, value in _SMALL.items() if type(keys.get(key)) is int}
    if keys.get("num_key_value_heads", 0) is None:  # a type may not divide by None
        config["num_key_value_heads"] = _SMALL["num_key_value_heads"]
    if keys.get("is_encoder_decoder"):
        config["decoder_start_token_id"] = 0
    config |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]} if "n_text" in kind else {}
    return config | ({"architectures": [architecture]} if architecture else {})


TIMM = tuple(
    sorted(
        names(
            """
    beit_base_patch16_224 cait_xxs24_224 coat_tiny convnext_atto convnextv2_atto
    deit_tiny_distilled_patch16_224 densenet121 dpn68 efficientnet_b0 efficientvit_b0 ghostnet_100
    hiera_tiny_224 hrnet_w18_small inception_v3 levit_128s maxvit_tiny_rw_224 mixer_s32_224
    mobilenetv3_small_100 nest_tiny pit_ti_224 poolformer_s12 regnety_002 resnet18 resnext50_32x4d
    sequencer2d_s swin_tiny_patch4_window7_224 tresnet_m vgg11 vit_tiny_patch16_224 volo_d1_224
    """
        )
    )
)
"""Models of timm, each of a family of its own, at the size that they are published with."""
