"""What an attack returns."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segprox.bands import EIGHT_BIT, Bands, choose_shown
from segprox.encoding import SUFFIXES, encode, file_kinds
from segprox.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class AttackResult:
    """What an attack found, one entry per image.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> result = segprox.attack(segprox.load_model("demo-standard"), scene.image[None], scene.label[None], steps=2)
        >>> result.images.shape, result.forwards.tolist()
        (torch.Size([1, 3, 128, 256]), [2])
        >>> result
        AttackResult(0 of 1 broken, norms 0.0..., APSR ...%, 3 queries)
    """

    images: Tensor  # [B, C, H, W]: the best adversarial images, in [0, 1]
    norm: Tensor  # [B]: the size of their perturbations, in the attack's norm
    apsr: Tensor  # [B]: attack pixel success rates, float64
    success: Tensor  # [B] bool: whether the APSR reaches the problem's threshold
    forwards: Tensor  # [B] int64: model evaluations spent
    backwards: Tensor  # [B] int64: gradients spent
    seconds: float  # for the whole batch
    originals: Tensor  # [B, C, H, W]: the images that were attacked
    traces: tuple[Trace, ...] = ()  # [B]: the norms it would have returned after fewer queries
    draws: Tensor | None = None  # [B, m]: of a random model, the APSR of each draw by which the images were judged

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        if not len(self):
            return "AttackResult(no images)"
        broken, queries = int(self.success.sum()), self.forwards + self.backwards
        return (
            f"AttackResult({broken} of {len(self)} broken, norms {_range(self.norm, '.3g')}, "
            f"APSR {_range(self.apsr, '.2%')}, {_range(queries, '.0f')} queries)"
        )

    def to(self, device: str | torch.device) -> "AttackResult":
        """The same with all tensors on another device."""
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)

    def save(self, folder: str | Path, names: Sequence[str] | None = None, bands: Bands | None = None) -> list[Path]:
        """Write each image as it is (safetensors, lossless) and as files of its dataset are; returns the files.

        Args:
            folder: where to; it is made if it is not there.
            names: of the files, one per image; numbers if left out.
            bands: the dataset's: values are those of its files, in PNGs or, where these do not hold them, NumPy arrays.
                If left out, colour and grey images are written in 8 bits (PNG) and others as they are only.
        """
        channels = self.images.shape[1]
        kept = ("float", "png") if bands is not None or channels in (1, 3) else ("float",)
        bands = bands or EIGHT_BIT
        folder, files = Path(folder), []
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in zip(names or [f"{i:06}" for i in range(len(self))], self.images):
            for kind in file_kinds(kept, channels, bands):
                files.append(folder / f"{name}.{SUFFIXES[kind]}")
                files[-1].write_bytes(encode(kind, image, bands))
        return files

    def plot(self, index: int = 0, bands: Sequence[int] = ()) -> "Figure":
        """Draw an image, its perturbation (grey is none, scaled to the whole range) and the adversarial image.

        Args:
            index: of the image.
            bands: those drawn as red, green and blue, or the one drawn in grey, from 1; the first three if left out.
        """
        from matplotlib.figure import Figure

        original, image = (images[index].detach().cpu().float() for images in (self.originals, self.images))
        change = image - original
        scaled = 0.5 + change / (2 * change.abs().max().clamp(min=1e-12))
        state = "broken" if bool(self.success[index]) else "not broken"
        titles = ("original", f"perturbation, norm {self.norm[index].item():.3g}", f"adversarial, {state}")
        figure = Figure(figsize=(12, 3), layout="constrained")
        for place, (title, shown) in enumerate(zip(titles, (original, scaled, image)), start=1):
            axes = figure.add_subplot(1, 3, place)
            axes.imshow(choose_shown(shown, tuple(bands)).permute(1, 2, 0).clamp(0, 1).numpy())
            axes.set_title(title)
            axes.axis("off")
        return figure


def _range(values: Tensor, form: str) -> str:
    """The smallest and the largest value, or the one that they are."""
    low, high = (format(value.item(), form) for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"
