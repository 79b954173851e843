"""The six model families of the GDP papers, and smaller and larger versions of them to train a policy on."""

from gdp.models.papers.workload import Family

_RNNLM = "LSTM language model, {num_layers} layers of {hidden}, {num_steps} steps unrolled"
RNNLM = Family("rnnlm", _RNNLM, {"num_layers": 2, "num_steps": 40, "hidden": 2048}, layers="num_layers")
_GNMT = "LSTM translation with attention, {num_layers} + {num_layers} layers, {num_steps} steps unrolled"
GNMT = Family("gnmt", _GNMT, {"num_layers": 2, "num_steps": 40}, layers="num_layers")
_XL = "transformer with relative positions, {num_layers} layers, {num_segments} segments of {segment_steps}"
_XL_SIZES = {"num_layers": 2, "num_segments": 8, "segment_steps": 384}
TRANSFORMER_XL = Family("transformer_xl", _XL, _XL_SIZES, layers="num_layers")
INCEPTION = Family(
    "inception", "convolutional image classifier, {image_size} x {image_size} pixels", {"image_size": 299}
)
_AMOEBANET = "evolved image classifier, 3 x {cells_per_stack} normal cells, {filters} filters"
AMOEBANET = Family("amoebanet", _AMOEBANET, {"cells_per_stack": 6, "filters": 80})
_WAVENET = "raw audio model, {num_stacks} stacks of {layers_per_stack} dilated convolutions"
WAVENET = Family("wavenet", _WAVENET, {"num_stacks": 2, "layers_per_stack": 9})


VARIANTS = (
    RNNLM.variant("2xp100-pcie-16g", 128, num_layers=1, num_steps=30, hidden=1024),
    RNNLM.variant("2xrtx3090-24g", 256, num_layers=2, num_steps=20, hidden=1024),
    RNNLM.variant("3xp100-pcie-16g", 128, num_layers=3, num_steps=20, hidden=1024),
    RNNLM.variant("4xv100-sxm-32g", 512, num_layers=4, num_steps=12, hidden=2048),
    RNNLM.variant("6xp100-sxm-16g", 64, num_layers=6, num_steps=12, hidden=1536),
    GNMT.variant("2xp100-pcie-16g", 128, num_layers=1, num_steps=16),
    GNMT.variant("3xrtx3090-24g", 256, num_layers=2, num_steps=12),
    GNMT.variant("4xp100-sxm-16g", 64, num_layers=3, num_steps=10, hidden=512),
    GNMT.variant("4xp100-pcie-16g", 512, num_layers=4, num_steps=8),
    GNMT.variant("6xl4-24g", 256, num_layers=6, num_steps=6, hidden=1536),
    TRANSFORMER_XL.variant("2xp100-pcie-16g", 16, num_layers=2, num_segments=4, segment_steps=192),
    TRANSFORMER_XL.variant("3xp100-pcie-16g", 16, num_layers=3, num_segments=8, segment_steps=128),
    TRANSFORMER_XL.variant("4xl4-24g", 8, num_layers=4, num_segments=4, segment_steps=384),
    TRANSFORMER_XL.variant("6xv100-sxm-32g", 16, num_layers=6, num_segments=5, segment_steps=256),
    TRANSFORMER_XL.variant("4xp100-pcie-16g", 6, num_layers=12, num_segments=2, segment_steps=384),
    INCEPTION.variant("2xp100-pcie-16g", 256, image_size=171),
    INCEPTION.variant("4xp100-pcie-16g", 128, image_size=299),
    INCEPTION.variant("3xl4-24g", 128, image_size=235, width_divisor=2),
    AMOEBANET.variant("2xp100-pcie-16g", 128, cells_per_stack=1, filters=40),
    AMOEBANET.variant("4xp100-sxm-16g", 32, cells_per_stack=2, filters=80),
    AMOEBANET.variant("3xrtx4090-24g", 32, cells_per_stack=3, filters=128),
    WAVENET.variant("2xp100-pcie-16g", 128, num_stacks=1, layers_per_stack=10, num_samples=8192),
    WAVENET.variant("3xl4-24g", 32, num_stacks=2, layers_per_stack=6, channels=128),
    WAVENET.variant("3xp100-pcie-16g", 24, num_stacks=3, layers_per_stack=10),
    WAVENET.variant("6xp100-pcie-16g", 64, num_stacks=6, layers_per_stack=6, num_samples=8192),
)  # family by family; a name is the family and the sizes: `rnnlm/l3-s20-h1024-b128`
