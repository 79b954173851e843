"""Inputs of Diffusers models, found by the names that their forward pass gives them and by keys of their config. Images
and latents are [batch, channels, height, width], videos have frames after the channels, and models that take positions
or sizes beside them have a row of patches for each sample."""

import inspect
import re
from typing import Any

import torch

from gdp.errors import InputError
from gdp.models.hugging_face.sizes import Sizes

_TEXT, _PROMPT, _IMAGE = 512, 77, 257  # tokens of T5; of CLIP, which conditions UNets; of its encoder of images
_SIDE, _LENGTH = 64, 1024  # of latents
_FRAMES, _ENCODED_FRAMES = 8, 9  # of latents; encoders of videos take 1 + 8 n
_FRAMES_FIRST = re.compile("(CogVideoX|ConsisID)Trans|UNetSpatioTemporal")  # before the channels
_WIDTHS = (  # different models' names for the width of the text that conditions them
    *("caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim", "cap_feat_dim", "in_text_dim"),
    *("cross_attention_input_dim", "cross_attention_dim"),
)


def diffusers_inputs(model: Any, sizes: Sizes, text: str) -> dict[str, Any]:
    """Returns keyword inputs of `model`. InputError if it needs some that this version cannot make."""
    name, config = type(model).__name__, model.config
    parameters = inspect.signature(model.forward).parameters.items()
    takes = {name: x.default is x.empty for name, x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD}
    values = _values(model, sizes, takes)
    if sizes.frames not in (None, values["num_frames"]):
        raise InputError(f"{text}: frames is given, but the model reads images; leave it out")
    inputs = {name: values[name] for name in takes if values.get(name) is not None}
    missing = [name for name, is_required in takes.items() if is_required and name not in inputs]
    if config.get("encoder_hid_dim_type") or config.get("addition_embed_type") not in (None, "text_time"):
        missing.append("inputs of its encoder_hid_dim_type or addition_embed_type")
    if missing or inputs.keys().isdisjoint(("sample", "hidden_states")):
        reason = f"needs {', '.join(missing) or 'inputs'}, which this version cannot make"
        raise InputError(f"{text}: {name} {reason}; give it as module:function with inputs of your own")
    return inputs


def _values(model: Any, sizes: Sizes, takes: dict[str, bool]) -> dict[str, Any]:
    """Returns an input for each known name; None where the config asks for none. `takes` says which are required."""
    name, config, batch = type(model).__name__, model.config, sizes.batch

    def get(*keys: str) -> Any:
        return next((value for key in keys if (value := config.get(key)) is not None), None)

    def normal(*shape: int | None) -> Any:
        return None if None in shape else torch.randn(*shape, dtype=model.dtype)  # type: ignore[arg-type]

    is_unet, is_encoder = "UNet" in name, "Autoencoder" in name or "VQ" in name
    tokens = sizes.sequence or get("max_text_seq_length", "max_sequence_length", "text_len")
    tokens = tokens or (_PROMPT if is_unet else _TEXT)
    width_of_text = get(*_WIDTHS)
    if isinstance(width_of_text, (list, tuple)):
        width_of_text = width_of_text[0]
    mask = torch.ones(batch, tokens, dtype=torch.long)
    size = sizes.image or get("sample_size") or (get("sample_height") or _SIDE, get("sample_width") or _SIDE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    is_volume = any(isinstance(module, torch.nn.Conv3d) for module in model.modules()) and "num_frames" not in takes
    frames = sizes.frames or (_ENCODED_FRAMES if is_encoder else get("num_frames", "video_length") or _FRAMES)
    frames = frames if is_volume or re.search("3D|Motion|SpatioTemporal", name) else 1
    patch = get("patch_size") if isinstance(get("patch_size"), int) else 1
    is_joined = not takes.keys().isdisjoint(("img_ids", "img_shapes"))  # two by two
    if is_joined:
        height, width = height // 2, width // 2
    channels = get("in_channels", "in_visual_dim")
    if is_joined or {"num_frames", "height", "width"} <= takes.keys():
        main = normal(batch, frames * height * width, channels)
    elif "StableAudio" in name or "1D" in name:
        main = normal(batch, channels, size if isinstance(size, int) else _LENGTH)
    elif frames == 1 and not is_volume:
        main = normal(batch, channels, height, width)
    elif _FRAMES_FIRST.search(name):
        main = normal(batch, frames, channels, height, width)
    else:
        main = normal(batch, channels, frames, height, width)

    count = get("num_class_embeds" if is_unet else "num_embeds_ada_norm")
    has_classes = count is not None and get("class_embed_type") is None and (is_unet or name.startswith("DiT"))
    added = None
    if get("addition_embed_type") == "text_time":
        pooled = get("projection_class_embeddings_input_dim") - 6 * get("addition_time_embed_dim")
        added = {"text_embeds": normal(batch, pooled), "time_ids": normal(batch, 6)}
    elif "PixArt" in name:
        added = {"resolution": normal(batch, 2), "aspect_ratio": normal(batch, 1)}
    rows = frames // (get("patch_size_t") or 1) * (height // patch) * (width // patch)
    is_rotated = get("use_rotary_positional_embeddings") or name == "HunyuanDiT2DModel"
    rotary = tuple(torch.rand(rows, get("attention_head_dim")) for _ in range(2)) if is_rotated else None
    is_sized = get("use_style_cond_and_image_meta_size")
    axes = len(get("axes_dims_rope") or (0, 0, 0))
    return {
        **dict.fromkeys(("sample", "hidden_states"), main),
        "timestep": torch.randint(1000, (batch,)),
        "encoder_hidden_states": normal(batch, tokens, width_of_text),
        **{key: mask for key in ("encoder_attention_mask", "encoder_hidden_states_mask") if takes.get(key)},
        "pooled_projections": normal(batch, get("pooled_projection_dim")),
        "guidance": torch.ones(batch) if get("guidance_embeds") else None,
        "img_ids": torch.zeros(rows, axes),
        "txt_ids": torch.zeros(tokens, axes),
        "img_shapes": [[(1, height, width)]] * batch,
        "num_frames": frames,
        "height": height,
        "width": width,
        "class_labels": torch.randint(count, (batch,)) if has_classes else None,
        "added_cond_kwargs": added,
        "added_time_ids": normal(batch, 3),
        "image_rotary_emb": rotary,
        "encoder_hidden_states_image": normal(batch, _IMAGE, get("image_dim")),
        "padding_mask": torch.zeros(1, 1, height, width) if get("concat_padding_mask") else None,
        **{key: normal(batch, 2) for key in ("original_size", "target_size", "crop_coords")},
        "global_hidden_states": normal(batch, 1, get("global_states_input_dim")),
        "text_embedding_mask": mask,
        "text_embedding_mask_t5": torch.ones(batch, get("text_len_t5") or 1),
        "encoder_hidden_states_t5": normal(batch, get("text_len_t5"), get("cross_attention_dim_t5")),
        **({"image_meta_size": normal(batch, 6), "style": torch.zeros(batch, dtype=torch.long)} if is_sized else {}),
    }
