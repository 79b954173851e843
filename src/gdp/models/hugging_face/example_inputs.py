"""Inputs of Transformers and Diffusers models, made from their configs; the batch is the first dimension of each.
Those of Diffusers are found by the names that forward passes give them. Images and latents are [batch, channels,
height, width], videos have frames after the channels, and models that take positions or sizes beside them have a row of
patches for each sample."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gdp.errors import InputError
from gdp.models.hugging_face.sizes import Sizes

SEQUENCE, IMAGE, DETECTION_IMAGE, CONTEXT = 512, 224, 800, 4096
SAMPLES = 16_000  # of sound a second

# different models' names for the longest sequence, and for the size of their vocabulary
_LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_sequence_length", "n_ctx")
_IMAGE_TOKENS = ("image_seq_length", "mm_tokens_per_image")
# inputs of images whose content decides on shapes: sizes of grids, of crops
_IMAGE_SHAPES = ("image_grid_thw", "image_sizes", "spatial_shapes", "aspect_ratio_ids", "pixel_attention_mask")
_CACHES = ("past_key_values", "cache_params")  # parameters of a forward pass
_VOCABULARIES = ("vocab_size", "n_vocab", "decoder_vocab_size")
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


def transformers_inputs(model: Any, sizes: Sizes, text: str, *, training: bool) -> dict[str, Any]:
    """Returns keyword inputs of `model`; for training with labels, where its class takes them."""
    inputs = _Inputs(model, sizes, text).make(training)
    check_use(inputs, sizes, text)
    return inputs


def serving_inputs(model: Any, sizes: Sizes, text: str, *, is_decode: bool) -> tuple[dict[str, Any], int]:
    """Returns (inputs, context) of a prefill or decode step; see `kv_cache`. InputError for sizes that do not fit."""
    inputs = _Inputs(model, sizes, text)
    step = inputs.serve(is_decode)
    if sizes.image is not None and "pixel_values" not in step[0]:
        raise InputError(f"{text}: image is given, but the step reads text alone; leave it out")
    return step


def check_use(inputs: Mapping[str, Any], sizes: Sizes, text: str) -> None:
    """Raises InputError for a size that no input has."""
    for name, users in (("sequence", _SEQUENCES), ("image", _IMAGES), ("frames", _VIDEOS)):
        if getattr(sizes, name) is not None and not users & inputs.keys():
            raise InputError(f"{text}: {name} is given, but the model reads {', '.join(inputs)}; leave it out")


def leaves_out_images(model_class: Any) -> bool:
    """Returns whether a model of text and images gets text alone: shapes depend on the sizes of its images."""
    takes = inspect.signature(model_class.forward).parameters
    return "input_ids" in takes and "pixel_values" in takes and not takes.keys().isdisjoint(_IMAGE_SHAPES)


class _Inputs:
    """Inputs for the parameters of a model's forward pass."""

    def __init__(self, model: Any, sizes: Sizes, text: str) -> None:
        self.model, self.config, self.sizes, self.text = model, model.config, sizes, text
        self.takes = set(inspect.signature(model.forward).parameters)
        self.task = type(model).__name__
        self.dtype = model.dtype

    def make(self, training: bool) -> dict[str, Any]:
        is_text = leaves_out_images(type(self.model))
        main = "input_ids" if is_text else self.model.main_input_name
        if main not in _MAKERS:
            raise InputError(
                f"{self.text}: {self.task} reads {main}, which this version cannot make; "
                "give the model as module:function with inputs of your own"
            )
        both = ("input_ids", "pixel_values")
        names = dict.fromkeys((main, *both)) if main in both and self._is_pair() and not is_text else [main]
        inputs: dict[str, Any] = {name: _MAKERS[name](self) for name in names if name in self.takes}
        if training and "token_type_ids" in self.takes and self._is_pair():  # Gemma 3: text or image
            inputs["token_type_ids"] = torch.zeros(inputs["input_ids"].shape, dtype=torch.long)
        if "input_points" in self.takes:  # SAM: one prompt of one point
            inputs["input_points"] = torch.rand(self.sizes.batch, 1, 1, 2, dtype=self.dtype)
        labels = self._labels(inputs) if training else {}
        is_decoding = self.config.is_encoder_decoder and "decoder_input_ids" in self.takes
        if is_decoding and "labels" not in labels:
            inputs["decoder_input_ids"] = self._tokens(self._decoder_length())
        if training and "return_loss" in self.takes:
            inputs["return_loss"] = True
        return inputs | labels

    def serve(self, is_decode: bool) -> tuple[dict[str, Any], int]:
        """Returns the inputs of a prefill or decode step, and the places of the cache."""
        if self.sizes.sequence is not None and is_decode and not self.config.is_encoder_decoder:
            raise InputError(
                f"{self.text}: sequence is given, but a decode step feeds one token; give the cache's size as context"
            )
        context = self.sizes.context
        tokens = "decoder_input_ids" if self.config.is_encoder_decoder else "input_ids"
        if tokens not in self.takes:
            raise InputError(f"{self.text}: {self.task} reads no tokens, so it has no cache; leave out --phase")
        if self.takes.isdisjoint(_CACHES):
            raise InputError(f"{self.text}: {self.task} takes no cache of a kind that is known; leave out --phase")
        if self.config.is_encoder_decoder:  # prefill runs the encoder, and the decoder on one token
            inputs = self.make(False) | {"decoder_input_ids": self._tokens(1)}
            return inputs, self._places(CONTEXT if context is None else context)
        prompt = self.sizes.prompt
        if prompt is not None and not is_decode:
            raise InputError(f"{self.text}: prompt is of the requests to a decoder; give a prefill its sequence")
        if is_decode:
            places = self._places(CONTEXT if context is None else context)
            if prompt is not None and prompt >= places:
                raise InputError(f"{self.text}: prompt is {prompt}, and context {places}; the rest is generated")
            return {"input_ids": self._tokens(1)}, places
        length = self._length() if context is None or self.sizes.sequence is not None else self._places(context)
        context = length if context is None else self._places(context)
        if length > context:
            raise InputError(f"{self.text}: sequence is {length}, and context {context}; the cache holds the prompt")
        inputs = {"input_ids": self._tokens(length)}
        if "logits_to_keep" in self.takes:
            inputs["logits_to_keep"] = 1  # the first token needs the last one's alone
        return inputs, context

    def _places(self, context: int) -> int:
        """Returns the places of a cache. InputError for more than the model has positions, if they are given."""
        longest = self._positions(self.config.get_text_config(decoder=True))
        if longest is None or context <= longest:
            return context
        if self.sizes.context is None:
            return longest
        raise InputError(f"{self.text}: context is {context}; the model has {longest} positions")

    # -- inputs ----------------------------------------------------------------------------------------------------

    def input_ids(self) -> Any:
        if self.task.endswith("ForMultipleChoice"):
            return self._tokens(2, self._length())
        return self._tokens(self._length())

    def pixel_values(self) -> Any:
        vision = getattr(self.config, "vision_config", None) or self.config
        num_channels = getattr(vision, "num_channels", None) or getattr(self.config, "num_channels", None) or 3
        return self._normal(self.sizes.batch, int(num_channels), *self._image_size())

    def input_features(self) -> Any:
        """Returns Whisper's input: two frames of sound for each position."""
        if not hasattr(self.config, "num_mel_bins") or not hasattr(self.config, "max_source_positions"):
            raise InputError(f"{self.text}: {self.task} reads sound that is not Whisper's; give it as module:function")
        return self._normal(self.sizes.batch, self.config.num_mel_bins, 2 * self.config.max_source_positions)

    def input_values(self) -> Any:
        """Returns a second of sound; `sequence` counts its samples."""
        return self._normal(self.sizes.batch, self.sizes.sequence or SAMPLES)

    def _is_pair(self) -> bool:
        """Returns whether the model reads text and images: CLIP and its kin, which have a config for each."""
        return hasattr(self.config, "vision_config") and hasattr(self.config, "text_config")

    def _image_size(self) -> tuple[int, int]:
        size: Any = self.sizes.image
        for config in (getattr(self.config, "vision_config", None), self.config):
            size = size or getattr(config, "image_size", None)
        if size is None:
            size = DETECTION_IMAGE if self.task.endswith("ForObjectDetection") else IMAGE
        if isinstance(size, Mapping):
            size = (size["height"], size["width"])
        return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) else (int(size), int(size))

    # -- labels ----------------------------------------------------------------------------------------------------

    def _labels(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the labels for the loss of the model's task; {} if there is no loss that reads shapes only."""
        batch, num_labels = self.sizes.batch, int(getattr(self.config, "num_labels", 2) or 2)

        def classes(*shape: int) -> Any:
            return torch.randint(num_labels, shape)

        if self.task.endswith("ForQuestionAnswering") and "start_positions" in self.takes:
            length = inputs["input_ids"].shape[1]
            return {name: torch.randint(length, (batch,)) for name in ("start_positions", "end_positions")}
        if "labels" not in self.takes:
            return {}
        if self.task.endswith(_TOKEN_TASKS):
            is_decoding = self.config.is_encoder_decoder
            labels = {"labels": self._tokens(self._decoder_length() if is_decoding else self._length())}
            if "next_sentence_label" in self.takes:
                labels["next_sentence_label"] = torch.randint(2, (batch,))
            return labels
        if self.task.endswith("ForTokenClassification"):
            return {"labels": classes(batch, self._length())}
        if self.task.endswith("ForMultipleChoice"):
            return {"labels": torch.randint(2, (batch,))}
        if self.task.endswith(("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")):
            return {"labels": classes(batch) if num_labels > 1 else self._normal(batch)}
        if self.task.endswith("ForSemanticSegmentation"):
            return {"labels": classes(batch, *self._image_size())}
        return {}

    # -- sizes and tensors -----------------------------------------------------------------------------------------

    def _length(self) -> int:
        text = getattr(self.config, "text_config", None)
        return self._length_of(text if text is not None else self.config.get_text_config(encoder=True))

    def _decoder_length(self) -> int:
        return self._length_of(self.config.get_text_config(decoder=True))

    def _positions(self, config: Any) -> int | None:
        return next((int(getattr(config, name)) for name in _LENGTHS if getattr(config, name, None)), None)

    def _image_tokens(self) -> int:
        """Returns the tokens that an image becomes, where it is a part of the text."""
        if "pixel_values" not in self.takes or leaves_out_images(type(self.model)):
            return 0
        return next((int(getattr(self.config, name)) for name in _IMAGE_TOKENS if getattr(self.config, name, None)), 0)

    def _length_of(self, config: Any) -> int:
        longest, image_tokens = self._positions(config), self._image_tokens()
        if image_tokens:
            length = self.sizes.sequence or max(SEQUENCE, 2 * image_tokens)
            if length < image_tokens:
                raise InputError(f"{self.text}: sequence is {length}; an image alone has {image_tokens} tokens")
            return length
        if self.sizes.sequence is None:
            return min(SEQUENCE, longest or SEQUENCE)
        if longest is not None and self.sizes.sequence > longest:
            raise InputError(f"{self.text}: sequence is {self.sizes.sequence}; the model has {longest} positions")
        return self.sizes.sequence

    def _vocabulary(self) -> int:
        for config in (self.config.get_text_config(), self.config):
            for name in _VOCABULARIES:
                if getattr(config, name, None):
                    return int(getattr(config, name))
        raise InputError(f"{self.text}: the config has no vocab_size; add it")

    def _tokens(self, *shape: int) -> Any:
        return torch.randint(self._vocabulary(), (self.sizes.batch, *shape))

    def _normal(self, *shape: int) -> Any:
        return torch.randn(*shape, dtype=self.dtype)


_MAKERS: dict[str, Callable[[_Inputs], Any]] = {"input_ids": _Inputs.input_ids, "pixel_values": _Inputs.pixel_values}
_MAKERS |= {"input_features": _Inputs.input_features, "input_values": _Inputs.input_values}
_SEQUENCES = {"input_ids", "decoder_input_ids", "labels", "input_values", "encoder_hidden_states"}
_IMAGES = {"pixel_values", "sample", "hidden_states"}
_VIDEOS = {"sample", "hidden_states"}
_TOKEN_TASKS = ("ForMaskedLM", "ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForPreTraining")
