"""The model families: the six of the GDP papers, then the further ones; and which are too alike to test each other."""

from gdp.workloads.workload import Family

RNNLM = Family(
    "rnnlm", "RNNLMConfig",
    "LSTM language model, {num_layers} layers of {hidden}, {num_steps} steps unrolled",
    {"num_layers": 2, "num_steps": 40, "hidden": 2048}, layers="num_layers",
)  # fmt: skip
GNMT = Family(
    "gnmt", "GNMTConfig",
    "LSTM translation with attention, {num_layers} + {num_layers} layers, {num_steps} steps unrolled",
    {"num_layers": 2, "num_steps": 40}, layers="num_layers",
)  # fmt: skip
TRANSFORMER_XL = Family(
    "transformer_xl", "TransformerXLConfig",
    "transformer with relative positions, {num_layers} layers, {num_segments} segments of {segment_steps}",
    {"num_layers": 2, "num_segments": 8, "segment_steps": 384}, layers="num_layers",
)  # fmt: skip
INCEPTION = Family(
    "inception", "InceptionConfig", "convolutional image classifier, {image_size} x {image_size} pixels",
    {"image_size": 299},
)  # fmt: skip
AMOEBANET = Family(
    "amoebanet", "AmoebaNetConfig",
    "evolved image classifier, 3 x {cells_per_stack} normal cells, {filters} filters",
    {"cells_per_stack": 6, "filters": 80},
)  # fmt: skip
WAVENET = Family(
    "wavenet", "WaveNetConfig",
    "raw audio model, {num_stacks} stacks of {layers_per_stack} dilated convolutions",
    {"num_stacks": 2, "layers_per_stack": 9},
)  # fmt: skip

LLAMA = Family(
    "llama", "LlamaConfig",
    "Llama-style decoder, {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 22, "hidden": 2048, "num_steps": 1024},
)  # fmt: skip
MIXTURE_OF_EXPERTS = Family(
    "mixture_of_experts", "MixtureOfExpertsConfig",
    "Llama-style decoder, {num_layers} layers, {experts_per_token} of {num_experts} experts a token",
    {"num_layers": 8, "experts_per_token": 2, "num_experts": 8},
)  # fmt: skip
RESNET = Family(
    "resnet", "ResNetConfig",
    "residual image classifier, {num_layers} layers, {image_size} x {image_size}",
    {"num_layers": 101, "image_size": 224},
)  # fmt: skip
DENSENET = Family(
    "densenet", "DenseNetConfig",
    "densely connected image classifier, {num_layers} layers, {image_size} x {image_size}",
    {"num_layers": 121, "image_size": 224},
)  # fmt: skip
NASNET = Family(
    "nasnet", "NASNetConfig",
    "searched image classifier, 3 x {cells_per_stack} normal cells, {filters} filters",
    {"cells_per_stack": 6, "filters": 168},
)  # fmt: skip
EFFICIENTNET = Family(
    "efficientnet", "EfficientNetConfig",
    "mobile image classifier, {width_percent} % of B0's channels, {depth_percent} % of its blocks",
    {"width_percent": 140, "depth_percent": 180},
)  # fmt: skip
HRNET = Family(
    "hrnet", "HRNetConfig",
    "keypoint detector, {num_branches} resolutions side by side, {width} channels and more",
    {"num_branches": 4, "width": 32},
)  # fmt: skip
RETINANET = Family(
    "retinanet", "RetinaNetConfig",
    "object detector, ResNet-{num_layers}, heads shared by 5 scales, {image_size} x {image_size}",
    {"num_layers": 50, "image_size": 512},
)  # fmt: skip
UNET = Family(
    "unet", "UNetConfig",
    "diffusion U-Net, {num_levels} resolutions, {channels} channels, {image_size} x {image_size}",
    {"num_levels": 6, "channels": 128, "image_size": 256},
)  # fmt: skip
BERT = Family(
    "bert", "BERTConfig",
    "bidirectional encoder, {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 24, "hidden": 1024, "num_steps": 512},
)  # fmt: skip
GPT2 = Family(
    "gpt2", "GPT2Config",
    "decoder, {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 36, "hidden": 1280, "num_steps": 1024},
)  # fmt: skip
T5 = Family(
    "t5", "T5Config",
    "encoder and decoder, {num_layers} + {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 12, "hidden": 768, "num_steps": 512},
)  # fmt: skip
VIT = Family(
    "vit", "ViTConfig",
    "vision transformer, {num_layers} layers of {hidden}, patches of {patch_size} x {patch_size} pixels",
    {"num_layers": 24, "hidden": 1024, "patch_size": 16},
)  # fmt: skip
CLIP = Family(
    "clip", "CLIPConfig",
    "image and text transformer, {num_layers} layers of {image_hidden}, {num_layers} of {text_hidden}",
    {"num_layers": 12, "image_hidden": 768, "text_hidden": 512},
)  # fmt: skip
DLRM = Family(
    "dlrm", "DLRMConfig",
    "recommender, {num_tables} tables of at most {max_rows:,} rows of {hidden}",
    {"num_tables": 26, "max_rows": 10_000_000, "hidden": 64},
)  # fmt: skip
DEEP_SPEECH = Family(
    "deep_speech", "DeepSpeechConfig",
    "speech recogniser, {num_layers} bidirectional GRU layers of {hidden}, {num_steps} steps",
    {"num_layers": 3, "hidden": 1024, "num_steps": 32},
)  # fmt: skip
ELMO = Family(
    "elmo", "ELMoConfig",
    "two LSTM language models, {num_layers} layers of {hidden}, {num_steps} steps unrolled",
    {"num_layers": 2, "hidden": 4096, "num_steps": 20},
)  # fmt: skip
TREE_LSTM = Family(
    "tree_lstm", "TreeLSTMConfig",
    "LSTM of {hidden} up a binary tree of {num_leaves} words",
    {"hidden": 1024, "num_leaves": 32},
)  # fmt: skip

RELATIVES = ((AMOEBANET, NASNET), (RESNET, HRNET, RETINANET), (VIT, CLIP), (GPT2, LLAMA, MIXTURE_OF_EXPERTS))
"""Families of which one is built from another's code, or is nearly the same model: a policy that was trained on one has
seen the others. Layers that many families share (`lstm.py`, `transformer.py`, `vision.py`) make no relatives: the GDP
papers too hold RNNLM out while GNMT is trained on."""


def with_relatives(family: str) -> frozenset[str]:
    """The names of `family` and of its relatives."""
    found = (names for group in RELATIVES if family in (names := {relative.name for relative in group}))
    return frozenset(next(found, {family}))
