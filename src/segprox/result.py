"""What an attack returns."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segprox.encoding import ENCODERS, SUFFIXES
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

    def save(self, folder: str | Path, names: Sequence[str] | None = None) -> list[Path]:
        """Write each image as it is (safetensors, lossless) and in 8 bits (PNG); returns the files.

        Args:
            folder: where to; it is made if it is not there.
            names: of the files, one per image; numbers if left out.
        """
        folder, files = Path(folder), []
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in zip(names or [f"{i:06}" for i in range(len(self))], self.images):
            for kind, encode in ENCODERS.items():
                files.append(folder / f"{name}.{SUFFIXES[kind]}")
                files[-1].write_bytes(encode(image[None]))
        return files

    def plot(self, index: int = 0) -> "Figure":
        """Draw an image, its perturbation (grey is none, scaled to the whole range) and the adversarial image."""
        from matplotlib.figure import Figure

        original, image = (images[index].detach().cpu().float() for images in (self.originals, self.images))
        change = image - original
        scaled = 0.5 + change / (2 * change.abs().max().clamp(min=1e-12))
        state = "broken" if bool(self.success[index]) else "not broken"
        titles = ("original", f"perturbation, norm {self.norm[index].item():.3g}", f"adversarial, {state}")
        figure = Figure(figsize=(12, 3), layout="constrained")
        for place, (title, shown) in enumerate(zip(titles, (original, scaled, image)), start=1):
            axes = figure.add_subplot(1, 3, place)
            axes.imshow(shown[:3].permute(1, 2, 0).clamp(0, 1).numpy() if len(shown) >= 3 else shown[0].numpy())
            axes.set_title(title)
            axes.axis("off")
        return figure


def _range(values: Tensor, form: str) -> str:
    """The smallest and the largest value, or the one that they are."""
    low, high = (format(value.item(), form) for value in (values.double().min(), values.double().max()))
    return low if low == high else f"{low} to {high}"
