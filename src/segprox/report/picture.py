"""One attacked image as a picture: what the model sees, what changed, what it sees then."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray
from torch import Tensor

from segprox.data.base import Colour
from segprox.run import Outcome

VOID_COLOUR: Colour = (0, 0, 0)


def draw_outcome(outcome: Outcome, classes: Sequence[str], palette: Sequence[Colour], path: Path) -> None:
    """Write a picture of `outcome`, in the format of the path's ending."""
    sample, delta = outcome.sample, outcome.image - outcome.sample.image
    largest = delta.abs().max().item()
    gain = 0.5 / largest if largest > 0 else 1.0
    reached = f"{outcome.apsr:.1%} {'on target' if outcome.targeted else 'wrong'}"
    panels: list[tuple[str, NDArray[np.float64]]] = [
        ("image", _photo(sample.image)),
        (f"perturbation, amplified {gain:.0f} times", _photo(0.5 + gain * delta)),
        ("adversarial image", _photo(outcome.image)),
        (f"prediction: {outcome.clean_accuracy:.1%} right", _coloured(outcome.clean_prediction, palette)),
        ("true labels (black: not counted)", _coloured(sample.label, palette)),
        (f"adversarial prediction: {reached}", _coloured(outcome.prediction, palette)),
    ]
    height, width = sample.label.shape
    figure = Figure(figsize=(13, 0.9 + 2 * 4.25 * height / width + 0.6), dpi=110, layout="constrained")
    for axes, (title, pixels) in zip(figure.subplots(2, 3).flat, panels):
        axes.imshow(pixels, interpolation="nearest")
        axes.set_title(title, fontsize=11)
        axes.set_axis_off()
    verdict = "broken" if outcome.success else "not broken"
    figure.suptitle(
        f"{sample.name}, {verdict}: {reached} with no value changed by more than {outcome.linf * 255:.2f}/255\n",
        fontsize=13,
    )
    shown = _present(outcome, len(classes))
    handles = [Patch(color=_unit(palette[k]), label=classes[k]) for k in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 10), frameon=False)
    figure.savefig(path)


def _photo(image: Tensor) -> NDArray[np.float64]:
    pixels: NDArray[np.float64] = image.clamp(0, 1).permute(1, 2, 0).double().numpy()
    return pixels


def _coloured(labels: Tensor, palette: Sequence[Colour]) -> NDArray[np.float64]:
    table = np.array([*palette, VOID_COLOUR]) / 255
    index = labels.numpy()
    inside = (index >= 0) & (index < len(palette))
    pixels: NDArray[np.float64] = table[np.where(inside, index, len(palette))]
    return pixels


def _present(outcome: Outcome, num_classes: int) -> list[int]:
    """The classes that occur in the labels or in a prediction."""
    maps = (outcome.sample.label, outcome.clean_prediction, outcome.prediction)
    found = {int(k) for labels in maps for k in np.unique(labels.numpy())}
    return [k for k in range(num_classes) if k in found]


def _unit(colour: Colour) -> tuple[float, float, float]:
    r, g, b = colour
    return r / 255, g / 255, b / 255
