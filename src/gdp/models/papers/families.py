"""The six model families of the GDP papers."""

from gdp.models.papers.workload import Family

RNNLM = Family(
    "rnnlm",
    "LSTM language model, {num_layers} layers of {hidden}, {num_steps} steps unrolled",
    {"num_layers": 2, "num_steps": 40, "hidden": 2048},
    layers="num_layers",
)
GNMT = Family(
    "gnmt",
    "LSTM translation with attention, {num_layers} + {num_layers} layers, {num_steps} steps unrolled",
    {"num_layers": 2, "num_steps": 40},
    layers="num_layers",
)
TRANSFORMER_XL = Family(
    "transformer_xl",
    "transformer with relative positions, {num_layers} layers, {num_segments} segments of {segment_steps}",
    {"num_layers": 2, "num_segments": 8, "segment_steps": 384},
    layers="num_layers",
)
INCEPTION = Family(
    "inception", "convolutional image classifier, {image_size} x {image_size} pixels", {"image_size": 299}
)
AMOEBANET = Family(
    "amoebanet",
    "evolved image classifier, 3 x {cells_per_stack} normal cells, {filters} filters",
    {"cells_per_stack": 6, "filters": 80},
)
WAVENET = Family(
    "wavenet",
    "raw audio model, {num_stacks} stacks of {layers_per_stack} dilated convolutions",
    {"num_stacks": 2, "layers_per_stack": 9},
)
