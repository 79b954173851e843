"""The targets of layouts by name."""

from gdp.errors import InputError
from gdp.export.layouts import megatron_lm, torch_fsdp, torchtitan
from gdp.export.layouts.target import LayoutTarget

LAYOUT_TARGETS: dict[str, LayoutTarget] = {
    module.NAME: module.TARGET for module in (torch_fsdp, torchtitan, megatron_lm)
}


def find_layout_target(name: str, *, is_cut: bool) -> LayoutTarget | None:
    """Returns the target called `name` for a plan that is cut (`is_cut`); None if this is for other targets.

    InputError for a plan without a layout where the tool needs one.
    """
    target = LAYOUT_TARGETS.get(name.replace("_", "-").lower())
    if target is None or (not is_cut and target is megatron_lm.TARGET):
        return None
    if not is_cut:
        raise InputError(
            f"{target.name}: the plan places the ops of one copy of the model, and {target.name} takes a layout; "
            "place with --parallel, such as data=2"
        )
    return target
