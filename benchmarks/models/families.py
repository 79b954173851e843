"""The model families beyond the papers', and groups of families too alike to test each other."""

from functools import partial

from gdp.models.papers.families import AMOEBANET
from gdp.models.papers.workload import Family as AnyFamily

Family = partial(AnyFamily, package="benchmarks.models")

LLAMA = Family(
    "llama",
    "Llama-style decoder, {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 22, "hidden": 2048, "num_steps": 1024},
)
MIXTURE_OF_EXPERTS = Family(
    "mixture_of_experts",
    "Llama-style decoder, {num_layers} layers, {experts_per_token} of {num_experts} experts a token",
    {"num_layers": 8, "experts_per_token": 2, "num_experts": 8},
)
RESNET = Family(
    "resnet",
    "residual image classifier, {num_layers} layers, {image_size} x {image_size}",
    {"num_layers": 101, "image_size": 224},
)
DENSENET = Family(
    "densenet",
    "densely connected image classifier, {num_layers} layers, {image_size} x {image_size}",
    {"num_layers": 121, "image_size": 224},
)
NASNET = Family(
    "nasnet",
    "searched image classifier, 3 x {cells_per_stack} normal cells, {filters} filters",
    {"cells_per_stack": 6, "filters": 168},
)
EFFICIENTNET = Family(
    "efficientnet",
    "mobile image classifier, {width_percent} % of B0's channels, {depth_percent} % of its blocks",
    {"width_percent": 140, "depth_percent": 180},
)
HRNET = Family(
    "hrnet",
    "keypoint detector, {num_branches} resolutions side by side, {width} channels and more",
    {"num_branches": 4, "width": 32},
)
RETINANET = Family(
    "retinanet",
    "object detector, ResNet-{num_layers}, heads shared by 5 scales, {image_size} x {image_size}",
    {"num_layers": 50, "image_size": 512},
)
UNET = Family(
    "unet",
    "diffusion U-Net, {num_levels} resolutions, {channels} channels, {image_size} x {image_size}",
    {"num_levels": 6, "channels": 128, "image_size": 256},
)
BERT = Family(
    "bert",
    "bidirectional encoder, {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 24, "hidden": 1024, "num_steps": 512},
)
GPT2 = Family(
    "gpt2",
    "decoder, {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 36, "hidden": 1280, "num_steps": 1024},
)
T5 = Family(
    "t5",
    "encoder and decoder, {num_layers} + {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 12, "hidden": 768, "num_steps": 512},
)
VIT = Family(
    "vit",
    "vision transformer, {num_layers} layers of {hidden}, patches of {patch_size} x {patch_size} pixels",
    {"num_layers": 24, "hidden": 1024, "patch_size": 16},
)
CLIP = Family(
    "clip",
    "image and text transformer, {num_layers} layers of {image_hidden}, {num_layers} of {text_hidden}",
    {"num_layers": 12, "image_hidden": 768, "text_hidden": 512},
)
CONV_MIXER = Family(
    "conv_mixer",
    "depthwise image classifier, {num_layers} layers of {channels} channels",
    {"num_layers": 8, "channels": 256},
)
LSTM = Family(
    "lstm",
    "PyTorch's LSTM, {num_layers} layers of {hidden}, {num_steps} tokens",
    {"num_layers": 2, "hidden": 384, "num_steps": 32},
)
GRAPH_NET = Family(
    "graph_net",
    "graph network, {num_layers} layers of {hidden}, {num_nodes} nodes, {num_edges} edges",
    {"num_layers": 4, "hidden": 192, "num_nodes": 256, "num_edges": 2048},
)
CACHED_DECODER = Family(
    "cached_decoder",
    "decoder, {num_layers} layers of {hidden}, {num_steps} tokens after {num_cached} in a cache",
    {"num_layers": 4, "hidden": 320, "num_steps": 48, "num_cached": 192},
)
DLRM = Family(
    "dlrm",
    "recommender, {num_tables} tables of at most {max_rows:,} rows of {hidden}",
    {"num_tables": 26, "max_rows": 10_000_000, "hidden": 64},
)
DEEP_SPEECH = Family(
    "deep_speech",
    "speech recogniser, {num_layers} bidirectional GRU layers of {hidden}, {num_steps} steps",
    {"num_layers": 3, "hidden": 1024, "num_steps": 32},
)
ELMO = Family(
    "elmo",
    "two LSTM language models, {num_layers} layers of {hidden}, {num_steps} steps unrolled",
    {"num_layers": 2, "hidden": 4096, "num_steps": 20},
)
TREE_LSTM = Family(
    "tree_lstm", "LSTM of {hidden} up a binary tree of {num_leaves} words", {"hidden": 1024, "num_leaves": 32}
)

RELATIVES = ((AMOEBANET, NASNET), (RESNET, HRNET, RETINANET), (VIT, CLIP), (GPT2, LLAMA, MIXTURE_OF_EXPERTS))
"""Groups of families that share the code of a model, or are nearly the same model.

A policy that was trained on one has seen the others. Layers that many families share (`lstm.py`, `transformer.py`,
`vision.py`) make no relatives: the GDP papers too hold RNNLM out while they train on GNMT."""
