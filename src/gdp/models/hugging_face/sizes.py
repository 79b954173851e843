"""`hf:DIR?batch=8&sequence=512`: a directory, and the sizes that its config leaves open."""

from dataclasses import dataclass, fields, replace
from typing import Any

from gdp.errors import InputError
from gdp.models.lora import NF4
from gdp.models.model import HUGGING_FACE, MIXED, PRECISIONS, TIMM, Reading, check_precision


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that a config leaves open: `batch`, `sequence` (tokens), `image` (pixels of a side), `frames` of a video,
    `dtype`, `context` (tokens of the cache in prefill and decode), and `prompt` (those that a request to a decoder
    brings; the others are generated); None: default. `weights` is the format of quantised weights, in place of that of
    the config. Defaults: a batch of 8; as many tokens as the model has positions, at most 512; the config's image size,
    else 800 for detection and 224 for other tasks; the config's type, else float32. The cache of a prefill has room for
    its prompt, that of a decode step for as many tokens as the model has positions, at most 4096 (llama.cpp's
    default)."""

    batch: int = 8
    sequence: int | None = None
    image: int | None = None
    dtype: str | None = None
    context: int | None = None
    weights: str | None = None
    frames: int | None = None
    prompt: int | None = None

    @classmethod
    def parse(cls, query: str, text: str) -> "Sizes":
        """Reads `batch=8&sequence=512`. InputError, naming the whole `text`, for anything else."""
        names = [item.name for item in fields(cls)]
        values: dict[str, Any] = {}
        for part in query.split("&"):
            name, _, value = part.partition("=")
            if name not in names or not value:
                raise InputError(f"{text}: {part!r} is no size; NAME=VALUE with {', '.join(names)} is expected after ?")
            if name in values:
                raise InputError(f"{text}: {name} is given twice; give it once")
            if name in ("dtype", "weights"):
                values[name] = value
            elif value.isascii() and value.isdigit() and 0 < int(value) < 2**31:
                values[name] = int(value)
            else:
                raise InputError(f"{text}: {name} is {value!r}; an integer of at least 1 is expected")
        return cls(**values)


def parse(text: str) -> tuple[str, Sizes]:
    """Returns (DIR or NAME, sizes) of `hf:DIR?batch=8&sequence=512` or `timm:NAME?...`. InputError for a bad size."""
    directory, mark, query = text.removeprefix(HUGGING_FACE).removeprefix(TIMM).partition("?")
    if not directory and text.startswith(TIMM):
        raise InputError(f"{text!r}: names no model; timm:NAME is expected, such as timm:resnet50?batch=64")
    if not directory:
        raise InputError(f"{text!r}: names no directory; hf:DIR with a config.json in it is expected")
    return directory, Sizes.parse(query, text) if mark else Sizes()


def as_published(text: str, reading: Reading) -> Reading:
    """Returns `reading` for a training step of `hf:DIR`: mixed precision, unless it says otherwise or names a type
    that has no master weights. InputError for a type that does not go with the precision."""
    dtype = (reading.dtype or parse(text)[1].dtype or "").removeprefix("torch.")
    check_precision(reading.precision, dtype)
    is_mixed = not reading.precision and (not dtype or dtype in PRECISIONS[MIXED])
    return replace(reading, precision=MIXED) if is_mixed else reading


def with_adapters(text: str, reading: Reading) -> tuple[str, Reading]:
    """Returns a MODEL and its reading with adapters beside frozen weights: of `hf:DIR?weights=nf4` those of QLoRA.
    Other models are converted to bfloat16, unless the reading says otherwise."""
    if text.startswith(HUGGING_FACE):
        if reading.lora is not None and (parse(text)[1].weights or "").lower() == NF4:
            return _without("weights", text), replace(reading, lora=replace(reading.lora, weights=NF4))
    elif reading.precision in ("", MIXED) and reading.dtype in ("", *PRECISIONS[MIXED]):
        return text, replace(reading, precision=MIXED, dtype=reading.dtype or PRECISIONS[MIXED][0])
    return text, reading


def without_context(text: str) -> str:
    """Returns `hf:DIR?SIZES` without the size of its cache."""
    return _without("context", text)


def without_requests(text: str) -> str:
    """Returns `hf:DIR?SIZES` without the sizes of requests to a decoder and of its cache."""
    return _without("prompt", _without("context", text))


def with_batch(text: str, samples: int) -> str:
    """Returns `hf:DIR?SIZES` with another batch."""
    other = _without("batch", text)
    return f"{other}{'&' if '?' in other else '?'}batch={samples}"


def of_prompt(text: str, context: int) -> str:
    """Returns `hf:DIR?SIZES` for the prefill of one prompt of a decode step: all of `context`, unless it says."""
    prompt = parse(text)[1].prompt or context
    for name in ("batch", "sequence", "context", "prompt"):
        text = _without(name, text)
    return f"{text}{'&' if '?' in text else '?'}batch=1&sequence={prompt}&context={context}"


def _without(name: str, text: str) -> str:
    directory, _, query = text.partition("?")
    kept = "&".join(part for part in query.split("&") if not part.startswith(f"{name}="))
    return f"{directory}?{kept}" if kept else directory
