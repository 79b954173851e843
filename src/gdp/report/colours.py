"""Colours for devices that colour-blind people can tell apart: Okabe and Ito, Color Universal Design (2008)."""

_OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_OTHER = "#8d95a3"


def device_colour(device: int) -> str:
    """Returns the colour of a device by its number; from the ninth on, a darker hue. As in report-palette.js."""
    if device < len(_OKABE_ITO):
        return _OKABE_ITO[device]
    if device == len(_OKABE_ITO):
        return _OTHER
    dark = 0.75 ** min(device // len(_OKABE_ITO), 4)
    colour = _OKABE_ITO[device % len(_OKABE_ITO)]
    return "#" + "".join(f"{round(int(colour[at : at + 2], 16) * dark):02x}" for at in (1, 3, 5))


def line_colour(device: int) -> str:
    """Returns the colour for a thin line on white, where the yellow would be too light."""
    colour = device_colour(device)
    return "#a89b00" if colour == "#f0e442" else colour
