"""`timm:NAME?batch=64&image=224`: an image model of timm with random weights, and inputs of its config's size. Nothing
is downloaded. A classifier is trained with cross entropy of as many labels as it gives outputs."""

from typing import Any

import torch
from torch.nn import functional

from gdp.errors import InputError, first_line, suggest
from gdp.models.hugging_face.patches import HostNumbers, capturable, default_dtype, quiet, with_forward
from gdp.models.hugging_face.sizes import Sizes
from gdp.models.user_function import Build


def timm_builder(name: str, sizes: Sizes, text: str, dtype: torch.dtype, *, training: bool) -> Build:
    """Returns a function that builds (module, args, kwargs) of `timm:NAME`. InputError if timm has no such model."""
    if names := [name for name in ("sequence", "context", "weights", "frames") if getattr(sizes, name) is not None]:
        raise InputError(f"{text}: {names[0]} is given, but the model reads images; leave it out")
    try:
        with quiet():
            import timm
    except ImportError as error:
        missing = "timm" if error.name in (None, "timm") else f"timm and {error.name}, which timm imports"
        raise InputError(f"{text}: needs {missing}; pip install 'gdp-placement[timm]'") from None
    if not timm.is_model(name):
        raise InputError(f"{text}: timm {timm.__version__} has no {name!r}; {suggest(name, timm.list_models())}")
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:
        name, _, tag = name.partition(".")
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{name}.*")]
        raise InputError(f"{text}: {name} has no weights {tag!r}; {suggest(tag, tags)}") from None
    channels, *pixels = (3, 224, 224) if config is None else config.input_size
    if sizes.image is not None:
        pixels = [sizes.image, sizes.image]
    is_fixed = sizes.image is not None and config is not None and config.fixed_input_size

    def build() -> tuple[Any, ...]:
        options: dict[str, Any] = {"img_size": tuple(pixels)} if is_fixed else {}
        with quiet(), HostNumbers(), default_dtype(dtype):
            try:
                model: Any = timm.create_model(name, pretrained=False, no_jit=True, **options)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                if not is_fixed:
                    raise
                reason = f"{name} takes no images of {sizes.image} pixels ({first_line(error)})"
                raise InputError(f"{text}: {reason}; leave image out") from error
        model.train(training)
        images = torch.randn(sizes.batch, channels, *pixels, dtype=dtype)
        if not training or not getattr(model, "num_classes", 0):
            return capturable(model), (images,), {}
        return _with_loss(model), (images,), {"labels": torch.randint(model.num_classes, (sizes.batch,))}

    return build


def _with_loss(model: Any) -> Any:
    """Returns `model`, whose forward pass also takes labels and returns its loss: the sum of those of its outputs."""
    kind = type(model)

    def forward(self: Any, images: Any, labels: Any) -> dict[str, Any]:
        output = kind.forward(self, images)
        outputs = output if isinstance(output, tuple | list) else [output]
        return {"loss": sum(functional.cross_entropy(each, labels) for each in outputs), "logits": outputs}

    return capturable(with_forward(model, forward))
