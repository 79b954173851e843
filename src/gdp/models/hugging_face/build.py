"""`hf:DIR`: the model of a Transformers or Diffusers `config.json`, with inputs made from it; and `timm:NAME`.

Weights are not read, code in the directory is not run, and nothing is downloaded: the class is one of the installed
library's own. The query of `hf:DIR?batch=8&sequence=512` sets sizes that a config does not have; see `Sizes`.

These changes make the models fit for a capture, by the libraries' own switches where they exist:

- Weights are not initialised under fake tensors (some initialisations read tensors), and tied afterwards.
- Caches of keys and values are off, masks are left out (all tokens count, each row is one sequence), and no layers or
  parts of a spectrogram are dropped at random.
- Experts run as grouped matrix products: a loop over the selected experts has no fixed shapes.
- Checks for finite values, which decide on clamping, are answered with yes."""

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gdp import files
from gdp.errors import InputError, suggest
from gdp.models.gguf.gguf_file import GGUF_FILE, read_gguf_config
from gdp.models.hugging_face.example_inputs import (
    check_use,
    diffusers_inputs,
    leaves_out_images,
    serving_inputs,
    transformers_inputs,
)
from gdp.models.hugging_face.patches import FullMasks, HostNumbers, capturable, default_dtype, quiet, run_inside
from gdp.models.hugging_face.quantisation import FLOAT8, QUANTISATION, WeightFormat, weight_format
from gdp.models.hugging_face.sizes import Sizes, parse
from gdp.models.hugging_face.timm_models import timm_builder
from gdp.models.model import DTYPES, GGUF, PRECISIONS, TIMM, even_part
from gdp.models.serving import Serving
from gdp.models.shards import WHOLE, Shards
from gdp.models.stored_weights import ATTRIBUTE
from gdp.models.user_function import Build

if TYPE_CHECKING:
    from gdp.models.hugging_face.kv_cache import CacheRoom

# keys of a config that choose downloaded or missing kernels, weights or code; and dtypes, which builds take separately
_CHOICES = (
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    *("kernel_config", "use_kernels", "torch_dtype", "dtype", "auto_map", QUANTISATION, GGUF_FILE),
)
# names of model classes
_DIFFUSERS_MODEL = re.compile(r"(?!.*(Pipeline|Scheduler|Output|Mixin))\w*(Transformer|UNet|Autoencoder|DiT|Model)\w*")
_HUB_NAME = r"[\w-][\w.-]*/[\w.-]+"  # owner/name
_COUNTS, _MOST_PARTS = re.compile(r"^(num|n)_(.*_)?(layers?|experts?|blocks?|stages?)$|depth$"), 10_000
_OFF = {
    "use_cache": False,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}


def builder(text: str, *, training: bool = True, precision: str = "") -> Build:
    """Returns a function that builds (module, args, kwargs) of `hf:DIR?SIZES` or `timm:NAME?SIZES`, labelled to train.
    Weights have a type of `precision`: that of the config, if it is one. Under `FakeTensorMode` nothing is allocated;
    else the library draws the parameters. InputError, with the remedy, for a directory without a readable `config.json`
    and for a config that this version cannot build."""
    config, sizes = _read(text)
    if text.startswith(TIMM):
        dtype = _dtype(sizes.dtype or "float32", text, precision)
        return timm_builder(parse(text)[0], sizes, text, dtype, training=training)
    if sizes.context is not None:
        raise InputError(f"{text}: context is the size of a cache; add --phase prefill or --phase decode")
    if sizes.prompt is not None:
        raise InputError(f"{text}: prompt is of the requests to a decoder; add --phase decode, or say sequence")
    if "_class_name" in config:
        return _diffusers_builder(config, sizes, text, training, precision)
    make = _transformers_maker(config, sizes, text, precision)

    def build() -> tuple[Any, ...]:
        with _explained(text), quiet():
            model = make()
            model.train(training)
            with torch.no_grad():
                inputs = transformers_inputs(model, sizes, text, training=training)
        return capturable(model), (), inputs

    return build


class ServedBuild:
    """Builds (module, args, kwargs) of a prefill or decode step of `hf:DIR?SIZES`, its batch divided by `parts`. With
    `shards` it is the step of one rank, whose cache has the heads that its weights make."""

    def __init__(self, text: str, serving: Serving, parts: int = 1, shards: Shards = WHOLE) -> None:
        self.text, self.is_decode, self.shards = text, serving.phase == "decode", shards
        config, sizes = _read(text)
        if "_class_name" in config:
            raise InputError(f"{text}: a model of Diffusers has no cache; leave out --phase")
        if self.is_decode and shards.context > 1:
            raise InputError(
                f"{text}: context={shards.context} cuts the tokens of a prompt, and a decode step has one a sequence; "
                f"leave context out, or take tensor={shards.num_ranks}"
            )
        self.sizes = replace(sizes, batch=even_part(sizes.batch, parts, text))
        self._make = _transformers_maker(config, self.sizes, text)
        self.room: CacheRoom | None = None  # of the last model built
        self.share = Fraction(1)  # of its cache that a rank holds
        self.notes: list[str] = []  # on that model

    def __call__(self) -> tuple[Any, ...]:
        """Builds the model with its cache."""
        from gdp.models.hugging_face import kv_cache
        from gdp.models.hugging_face.kv_cache import CacheRoom
        from gdp.models.pytorch.shards.local_program import localise

        with _explained(self.text), quiet():
            model = capturable(self._make())
            model.train(False)
            with torch.no_grad():
                inputs, context = serving_inputs(model, self.sizes, self.text, is_decode=self.is_decode)
                self.room = CacheRoom(context, self.is_decode)
                self.notes = []
                if hasattr(model.config, "vision_config") and not leaves_out_images(type(model)):
                    self.notes.append(f"{self.text}: the prompt is text alone; images are not encoded in this step")
                if self.shards != WHOLE:
                    self.notes += localise(model, (), inputs, self.shards, self.text, training=False)
                served = kv_cache.serve(model, inputs, self.room, self.text, cuts_tokens=self.shards.context > 1)
                self.share = kv_cache.share_of_rank(model)
                if (copies := float(self.share * self.shards.num_ranks)) > 1:
                    why = "each card has all of it" if self.shards.tensor == 1 else "it has fewer heads than ranks"
                    degrees = replace(self.shards, sequence=None)
                    self.notes.append(f"{degrees} holds the cache {copies:.4g} times: {why}")
                return model, (), served


def _read(text: str) -> tuple[dict[str, Any], Sizes]:
    """Returns the config and the sizes of `hf:DIR?SIZES`; `timm:NAME` has no config."""
    directory, sizes = parse(text)
    return {} if text.startswith(TIMM) else _read_config(Path(directory)), sizes


def _read_config(directory: Path) -> dict[str, Any]:
    if directory.suffix == GGUF:
        return read_gguf_config(directory)
    if not os.path.isdir(directory):
        if not os.path.exists(directory) and re.fullmatch(_HUB_NAME, str(directory)):
            raise InputError(
                f"hf:{directory}: no such directory; to fetch the config from the hub: "
                f"hf download {directory} config.json --local-dir {directory}"
            )
        what = "is no directory" if os.path.exists(directory) else "no such directory"
        raise InputError(f"hf:{directory}: {what}; name one with a config.json")
    path = directory / "config.json"
    if not os.path.isfile(path) and os.access(directory, os.X_OK):
        other = "model_index.json" if os.path.isfile(directory / "model_index.json") else ""
        remedy = "name its unet or transformer directory" if other else "name a directory that has one"
        raise InputError(f"{directory}: has no config.json{' but ' + other if other else ''}; {remedy}")
    try:
        config = json.loads(files.read_bytes(path))  # configs have Infinity, which strict JSON has not
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({str(error).splitlines()[0]}); mend the file") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: is a {type(config).__name__}; a JSON object is expected")
    for key, count in config.items():
        if _COUNTS.search(key) and isinstance(count, int) and count > _MOST_PARTS:  # would be built for hours
            raise InputError(f"{path}: {key} is {count:.3g}; at most {_MOST_PARTS:,} are expected")
    return config


def notes(text: str) -> tuple[str, ...]:
    """Returns the differences from the config of `hf:DIR`, a sentence each."""
    config, sizes = _read(text)
    sentences = []
    if config.get("auto_map"):
        sentences.append(
            f"{text}: its config names code of its own (auto_map), which is not run; the class is Transformers'"
        )
    if (weights := weight_format(config, sizes.weights, text)) is not None:
        sentences.append(f"{text}: weights are quantised, {weights.label}; {_arithmetic_of(weights)}")
    names = config.get("architectures")
    if "vision_config" in config and names:
        import transformers

        if leaves_out_images(getattr(transformers, names[0])):
            sentences.append(
                f"{text}: the step reads text alone; the image encoder's parameters take memory, and do no work"
            )
    return tuple(sentences)


def has_quantised_weights(text: str) -> bool:
    """Returns whether the weights of `hf:DIR` are quantised."""
    config, sizes = _read(text)
    return weight_format(config, sizes.weights, text) is not None


def _arithmetic_of(weights: WeightFormat) -> str:
    names = {"": "the model's dtype", "int8": "int8", FLOAT8: "FP8 where a device has a rate for it, else in bfloat16"}
    return f"products are computed in {names.get(weights.arithmetic, weights.arithmetic)}"


# Transformers


def _transformers_maker(config: dict[str, Any], sizes: Sizes, text: str, precision: str = "") -> Callable[[], Any]:
    """Returns a function that makes the model of a config, in the dtype that `sizes` or the config says."""
    weights = weight_format(config, sizes.weights, text)
    default = "float32" if weights is None else "bfloat16"  # no kernel multiplies quantised weights in float32
    parts = (config, config.get("text_config"))  # models of text and images may have their type in the latter
    own = [part.get(name) for part in parts if isinstance(part, dict) for name in ("dtype", "torch_dtype")]
    dtype = _dtype(sizes.dtype or next(filter(None, own), default), text, precision)
    try:
        import transformers
    except ImportError:
        raise InputError(f"{text}: needs Transformers; pip install 'gdp-placement[hf]'") from None
    try:
        with _explained(text), quiet():
            parsed_config = _config_of(transformers, config, text)
            model_class = _class_of(transformers, parsed_config, config.get("architectures"), text)
    except InputError as error:
        if not config.get("auto_map"):
            raise
        raise InputError(
            f"{error}; its auto_map names code, which is never run from a directory: give it as module:function"
        ) from None

    def make() -> Any:
        from transformers.initialization import no_init_weights

        is_fake = isinstance(torch.empty(0), FakeTensor)
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": None}
        if model_class._can_set_experts_implementation():
            options["experts_implementation"] = "grouped_mm"
        with contextlib.ExitStack() as stack:
            if is_fake:
                stack.enter_context(no_init_weights())
                stack.enter_context(HostNumbers())
            model = model_class._from_config(copy.deepcopy(parsed_config), **options)
        if is_fake:
            model.tie_weights()
        if weights is not None:
            setattr(model, ATTRIBUTE, weights.stored(model))
        return model

    return make


def _config_of(transformers: Any, config: dict[str, Any], text: str) -> Any:
    """Returns the model type's config, without options that make a step depend on chance or on earlier steps."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f'{text}: config.json has no model_type; add the one of Transformers, such as "bert"')
    if kind not in transformers.CONFIG_MAPPING:
        kinds = sorted(transformers.CONFIG_MAPPING.keys())
        raise InputError(
            f"{text}: model_type {kind!r} is unknown to Transformers {transformers.__version__}; {suggest(kind, kinds)}"
        )
    content = {key: value for key, value in config.items() if key not in _CHOICES}
    if isinstance(content.get("text_config"), dict):
        content["text_config"] = {key: value for key, value in content["text_config"].items() if key != QUANTISATION}
    parsed = transformers.CONFIG_MAPPING[kind].from_dict(content)
    for part in _parts_of(parsed):
        for name, value in _OFF.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)
    return parsed


def _parts_of(config: Any) -> Iterator[Any]:
    """Yields a config and the configs of its parts."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "sub_configs"):
            yield from _parts_of(part)


def _class_of(transformers: Any, config: Any, architectures: Any, text: str) -> Any:
    """Returns the class that `architectures` names first, else the bare model of the config's type."""
    if architectures in (None, []):
        model_class = transformers.MODEL_MAPPING.get(type(config), None)
        if model_class is None:
            raise InputError(
                f"{text}: model_type {config.model_type!r} has no bare model; name a class in architectures"
            )
        return model_class[0] if isinstance(model_class, tuple) else model_class
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise InputError(f"{text}: architectures is {architectures!r}; a list with the name of a class is expected")
    name = architectures[0]
    model_class = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise InputError(
            f"{text}: architectures names {name!r}, no model class of Transformers {transformers.__version__}; "
            "correct it, or remove it for the bare model"
        )
    config_class = getattr(model_class, "config_class", None)
    if config_class is None or not isinstance(config, config_class):
        expected = "no config" if config_class is None else config_class.__name__
        raise InputError(
            f"{text}: architectures names {name}, which takes {expected}, "
            f"but model_type is {config.model_type!r}; correct one of them"
        )
    return model_class


def _dtype(name: Any, text: str, precision: str) -> torch.dtype:
    short = str(name).removeprefix("torch.")
    if short not in DTYPES:
        raise InputError(f"{text}: dtype is {name!r}; {', '.join(DTYPES)} are known")
    names = PRECISIONS.get(precision, DTYPES)
    dtype: torch.dtype = getattr(torch, short if short in names else names[0])
    return dtype


# Diffusers


def _diffusers_builder(config: dict[str, Any], sizes: Sizes, text: str, training: bool, precision: str) -> Build:
    try:
        import diffusers
    except ImportError:
        raise InputError(f"{text}: its config is one of Diffusers; pip install diffusers") from None
    name = config["_class_name"]
    if sizes.weights is not None:
        raise InputError(f"{text}: weights is for models of Transformers; leave it out")
    names = list(filter(_DIFFUSERS_MODEL.fullmatch, dir(diffusers)))
    if name not in names:
        remedy = suggest(str(name), names)
        raise InputError(f"{text}: _class_name is {name!r}, no model of Diffusers {diffusers.__version__}; {remedy}")
    dtype = _dtype(sizes.dtype or config.get("torch_dtype") or "float32", text, precision)

    def build() -> tuple[Any, ...]:
        with _explained(text), quiet():
            with default_dtype(dtype), HostNumbers():
                model = getattr(diffusers, name).from_config(dict(config))
            model.train(training)
            inputs = diffusers_inputs(model, sizes, text)
            check_use(inputs, sizes, text)
        length = inputs["encoder_hidden_states"].shape[1] if "encoder_hidden_states" in inputs else 0
        return run_inside(capturable(model), partial(FullMasks, length)), (), inputs

    return build


@contextlib.contextmanager
def _explained(text: str) -> Iterator[None]:
    """Turns exceptions of the libraries about a config into InputErrors of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if type(error).__module__ == "torch._subclasses.fake_tensor":
            raise  # the capture explains these
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        if isinstance(error, ImportError) and lines:
            raise InputError(f"{text}: {lines[0].partition('. ')[0]}; install it") from error
        reason = f"{type(error).__name__}: {' '.join(lines)[:200]}" if lines else type(error).__name__
        raise InputError(f"{text}: its config makes no model ({reason}); correct config.json") from error
