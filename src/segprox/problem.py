"""What an attack is to achieve for a batch of images, and when it has achieved it."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from segprox.devices import finest, together
from segprox.errors import SegproxError
from segprox.fusion import fusible
from segprox.norms import per_image

RANGE_TOLERANCE = 1e-5  # float rounding of a resize or a normalise/denormalise round trip


def check_range(images: Tensor) -> None:
    """Refuse images that are not floats in [0, 1], with some tolerance for rounding."""
    if not images.is_floating_point():
        raise SegproxError(f"images must be floats in [0, 1] but are {images.dtype}; convert them and divide by 255")
    if images.numel() == 0:
        return
    low, high = (value.item() for value in images.detach().aminmax())
    if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):  # also true for NaN
        raise SegproxError(
            f"images must lie in [0, 1] but reach from {low:.4g} to {high:.4g}; "
            "divide 8-bit images by 255 and leave normalisation to the Segmenter"
        )


def image_seed(image: Tensor, seed: int) -> int:
    """A seed for one image `[C, H, W]`, made of its values and of another seed."""
    content = image.cpu().contiguous().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=str(seed).encode()).digest(), "little")


def predictions(logits: Tensor) -> Tensor:
    """The class of each pixel, `[B, K, H, W]` to `[B, H, W]`: the first largest logit, or K where a logit is NaN.

    The same as `logits.argmax(1)` but for NaN. On CPUs argmax over a strided axis is slow (a tenth of a small network's
    forward and backward); comparing plane by plane with the maximum is vectorised and stays within the caches.
    """
    num_classes = logits.shape[1]
    if together(logits):
        highest, first = logits.max(1)
        return first.masked_fill_(highest.isnan(), num_classes)
    largest = logits.amax(1)
    rank, is_largest = torch.zeros_like(largest), torch.empty_like(largest)
    for k, plane in enumerate(logits.unbind(1)):
        torch.eq(plane, largest, out=is_largest)
        torch.maximum(rank, is_largest.mul_(num_classes - k), out=rank)
    return num_classes - rank.long()


@dataclass(frozen=True, eq=False)
class Problem:
    """Images, what their pixels are or shall become, and which pixels count.

    Build one with `Problem.build`. `labels` are true labels (the attack wants every counted pixel to be anything else)
    or, when `targeted`, the labels the attack wants to see. Counted pixels are attacked, unless they are `protected`:
    these are to be what their label says. A success needs a share of either kind.

    Example:
        >>> import torch, segprox
        >>> labels = torch.tensor([[[0, 1], [1, 255]]])
        >>> problem = segprox.Problem.build(torch.rand(1, 3, 2, 2), labels)
        >>> problem.mask.tolist()
        [[[True, True], [True, False]]]
        >>> always_zero = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 2, 2)
        >>> [round(rate, 3) for rate in problem.apsr(always_zero).tolist()]  # two of the three counted pixels are wrong
        [0.667]
    """

    images: Tensor  # x: float [B, C, H, W] in [0, 1]
    labels: Tensor  # y or t: int64 [B, H, W]; 0 where masked, so that it can index logits
    mask: Tensor  # m: bool [B, H, W], the pixels that count
    targeted: bool = False
    threshold: float = 0.99  # nu: the share of attacked pixels that makes a success
    seed: int = 0  # of random starts
    protected: Tensor | None = None  # bool [B, H, W]: counted pixels that shall be their label; the others are attacked
    protect_threshold: float = 0.99  # the share of protected pixels that a success needs
    fixed: Tensor | None = None  # bool [B, H, W]: pixels that hold no data and never change

    @classmethod
    def build(
        cls,
        images: Tensor,
        labels: Tensor | None = None,
        *,
        target: Tensor | int | None = None,
        ignore: Iterable[int] = (255,),
        mask: Tensor | None = None,
        protect: Tensor | None = None,
        threshold: float = 0.99,
        protect_threshold: float | None = None,
        seed: int = 0,
        fixed: Tensor | None = None,
    ) -> "Problem":
        """Check the input and work out the mask.

        Args:
            images: floats in [0, 1], `[B, C, H, W]`.
            labels: true labels, `[B, H, W]`; may be left out when there is a target.
            target: a class for the whole image, or a label map `[B, H, W]` (or `[H, W]` for all images). Pixels whose
                true label is to be ignored stay masked, and so do pixels that the target map marks to be ignored.
            ignore: label values of pixels that do not count.
            mask: True where a pixel counts; combined with `ignore`.
            protect: True where a pixel shall be what `labels` say, whatever becomes of the others.
            threshold: nu, the share of attacked pixels that must be wrong (or on target) for a success.
            protect_threshold: the share of protected pixels that must be right for it; `threshold` if left out.
            seed: of random starts; an image gets the same ones in any batch.
            fixed: True where no band may change, as at pixels that hold no data.
        """
        if images.ndim != 4:
            raise SegproxError(f"images must have shape [batch, channels, height, width] but have {list(images.shape)}")
        check_range(images)
        protect_threshold = threshold if protect_threshold is None else protect_threshold
        for name, share in (("threshold", threshold), ("protect_threshold", protect_threshold)):
            if not 0 < share <= 1:
                raise SegproxError(f"{name} must lie in (0, 1] but is {share}")
        if protect is not None and labels is None:
            raise SegproxError("protected pixels need labels, which they are to be")
        if labels is None and target is None:
            raise SegproxError("an attack needs labels (to make them wrong) or a target (to reach it)")
        size = (len(images), *images.shape[2:])
        ignored = tuple(ignore)
        counted = torch.ones(size, dtype=torch.bool, device=images.device)
        for name, value in (("mask", mask), ("labels", labels), ("target", target)):
            if not isinstance(value, Tensor):
                continue
            plane = _plane(name, value, size, images.device)
            counted &= plane.bool() if name == "mask" else ~_is_any(plane, ignored)
        wanted: Tensor | int | None = labels if target is None else target
        if isinstance(wanted, int):
            wanted = torch.full(size, wanted, device=images.device)
        assert wanted is not None
        wanted = _plane("labels", wanted, size, images.device).long()
        if protect is not None and labels is not None:
            protect = _plane("protect", protect, size, images.device).bool() & counted
            wanted = torch.where(protect, _plane("labels", labels, size, images.device), wanted)
        return cls(
            images=images.detach().clamp(0, 1),
            labels=torch.where(counted, wanted, 0),
            mask=counted,
            targeted=target is not None,
            threshold=threshold,
            seed=seed,
            protected=protect,
            protect_threshold=protect_threshold,
            fixed=None if fixed is None else _plane("fixed", fixed, size, images.device).bool(),
        )

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def counted(self) -> Tensor:
        """How many pixels of each image count, int64 `[B]`."""
        return self.mask.flatten(1).sum(1)

    @cached_property
    def _divisor(self) -> Tensor:
        """The same, at least 1."""
        return self.counted.clamp(min=1)

    @property
    def wanted(self) -> bool | Tensor:
        """Whether pixels shall become their label rather than anything else; if they differ, bool `[B, H, W]`."""
        return True if self.targeted else False if self.protected is None else self.protected

    @cached_property
    def attacked(self) -> Tensor:
        """The counted pixels that are not protected, bool `[B, H, W]`."""
        return self.mask if self.protected is None else self.mask & ~self.protected

    @cached_property
    def attacked_count(self) -> Tensor:
        """How many pixels of each image are attacked, int64 `[B]`."""
        return self.counted if self.protected is None else self.attacked.flatten(1).sum(1)

    @cached_property
    def attackable(self) -> Tensor:
        """Which images have a pixel to attack, bool `[B]`."""
        return self.attacked_count > 0

    @cached_property
    def _shares_of_pixels(self) -> Tensor:
        return self.mask.to(self.images.dtype) / self._divisor.view(-1, 1, 1)

    @cached_property
    def _balance(self) -> Tensor:
        """Weights of mean 1 of pixels, `[B, H, W]`, such that attacked and protected ones weigh the same."""
        sizes = torch.stack([self.attacked_count, self.counted - self.attacked_count])
        there = (sizes > 0).sum(0)  # an image may have pixels of one kind only
        attacked, protected = (self.counted / (there * sizes).clamp(min=1)).to(self.images.dtype).view(2, -1, 1, 1)
        return torch.where(self.attacked, attacked, protected)

    @classmethod
    def join(cls, problems: Sequence["Problem"]) -> "Problem":
        """Problems of images of one size as one; threshold, seed and kind must be the same."""
        return replace(
            problems[0],
            images=torch.cat([problem.images for problem in problems]),
            labels=torch.cat([problem.labels for problem in problems]),
            mask=torch.cat([problem.mask for problem in problems]),
            protected=_join([problem.protected for problem in problems]),
            fixed=_join([problem.fixed for problem in problems]),
        )

    def select(self, indices: list[int] | slice) -> "Problem":
        """The problem of some of the images."""
        chosen = {name: getattr(self, name)[indices] for name in ("images", "labels", "mask")}
        protected, fixed = (None if mask is None else mask[indices] for mask in (self.protected, self.fixed))
        return replace(self, **chosen, protected=protected, fixed=fixed)

    def hold_fixed(self, points: Tensor) -> Tensor:
        """Points `[B, C, H, W]` with fixed pixels as they are in the images."""
        return points if self.fixed is None else torch.where(self.fixed.unsqueeze(1), self.images, points)

    def check_classes(self, num_classes: int) -> None:
        """Refuse labels that the model cannot output."""
        if self.labels.numel() == 0:
            return
        low, high = (int(value) for value in self.labels.aminmax())
        if low < 0 or high >= num_classes:
            kind = "target" if self.targeted else "label"
            raise SegproxError(
                f"{kind} {low if low < 0 else high} is not one of the model's {num_classes} classes "
                f"(0 to {num_classes - 1}); if it marks pixels that do not count, add it to ignore"
            )

    def satisfied(self, logits: Tensor) -> Tensor:
        """Which pixels are as the attack wants them, `[B, K, H, W]` to bool `[B, H, W]`; never masked or NaN ones."""
        return _satisfied(predictions(logits), logits.shape[1], self.labels, self.mask, self.targeted, self.protected)

    def apsr(self, logits: Tensor) -> Tensor:
        """Attack pixel success rate (paper, section 4.3) of each image, float64 `[B]`; 0 if no pixel is attacked."""
        return self.rate(self.satisfied(logits))

    def seeds(self) -> list[int]:
        """A seed per image, made of the problem's seed and the image itself.

        So neither the batch, nor the order of images, nor the device changes these numbers. On the CPU nor do they
        change what an attack finds: images are evaluated one at a time there. Other devices evaluate a batch as a
        whole, which rounds differently for different sizes of it, and attacks may then go other ways.
        """
        return [image_seed(image, self.seed) for image in self.images]

    def generators(self) -> list[torch.Generator]:
        """A source of random numbers per image, from its seed."""
        return [torch.Generator().manual_seed(seed) for seed in self.seeds()]

    def shares(self, dtype: torch.dtype) -> Tensor:
        """The weight of each pixel in a mean over its image's counted pixels, `[B, H, W]`."""
        return self._shares_of_pixels.to(dtype)

    def balanced(self, values: Tensor) -> Tensor:
        """Values per pixel, `[B, H, W]` or `[B, K, H, W]`, weighted so that a small region is not drowned by the rest.

        Where there are protected pixels, these and the attacked ones then have the same weight as a whole.
        """
        if self.protected is None:
            return values
        return values * (self._balance if values.ndim == 3 else self._balance.unsqueeze(1))

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values` `[B, H, W]` over each image's counted pixels, balanced, `[B]`; 0 if none counts."""
        total = per_image(torch.sum, self.balanced(torch.where(self.mask, values, 0)))
        return total / self._divisor

    def rate(self, pixels: Tensor) -> Tensor:
        """The share of attacked pixels at which `pixels` (bool `[B, H, W]`) is true, float64 `[B]`.

        Where there are protected pixels: the smaller of their share and that of the attacked ones. Their share is
        scaled such that it reaches `threshold` when it is `protect_threshold`.
        """
        if self.protected is None:
            return _share(pixels & self.mask, self._divisor)
        attacked, protected = self._shares(pixels)
        least = attacked.minimum(_rescaled(protected, self.protect_threshold, self.threshold))
        return torch.where(self.counted > self.attacked_count, least, attacked)

    def rates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The shares of attacked and of protected pixels that are as the attack wants them, float64 `[B]` each."""
        return self._shares(self.satisfied(logits))

    def _shares(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        attacked, others = pixels & self.attacked, pixels & self.mask & ~self.attacked
        counts = self.attacked_count, self.counted - self.attacked_count
        return _share(attacked, counts[0].clamp(min=1)), _share(others, counts[1].clamp(min=1))

    def succeeded(self, apsr: Tensor) -> Tensor:
        """Which images are successes at this APSR, bool `[B]`; an image without attacked pixels never is one."""
        return (apsr >= self.threshold) & self.attackable


@fusible
def _satisfied(
    predicted: Tensor, num_classes: int, labels: Tensor, mask: Tensor, targeted: bool, protected: Tensor | None
) -> Tensor:
    if targeted:
        return (predicted == labels) & mask
    wrong = (predicted != labels) & (predicted < num_classes)
    if protected is not None:
        wrong = torch.where(protected, predicted == labels, wrong)
    return wrong & mask


def _share(pixels: Tensor, count: Tensor) -> Tensor:
    return pixels.flatten(1).sum(1, dtype=finest(pixels.device)) / count


def _rescaled(share: Tensor, old: float, new: float) -> Tensor:
    """Shares such that those below the threshold `old` are below `new`, and the others are not; 0 and 1 stay."""
    if old == new:
        return share
    below = (share * (new / old)).clamp(max=math.nextafter(new, 0))
    above = (new + (share - old) * ((1 - new) / (1 - old) if old < 1 else 0)).clamp(min=new)
    return torch.where(share < old, below, torch.where(share == 1, 1.0, above))


def _join(masks: Sequence[Tensor | None]) -> Tensor | None:
    known = [mask for mask in masks if mask is not None]
    return torch.cat(known) if known else None


def _plane(name: str, value: Tensor, size: tuple[int, ...], device: torch.device) -> Tensor:
    if value.is_floating_point():
        raise SegproxError(f"{name} must hold whole numbers, one per pixel, but is {value.dtype}")
    if tuple(value.shape) not in (size, size[1:]):
        raise SegproxError(f"{name} must have shape {list(size)}, like the images, but has {list(value.shape)}")
    return value.to(device).expand(size)


def _is_any(plane: Tensor, values: tuple[int, ...]) -> Tensor:
    return torch.isin(plane.long(), torch.tensor(values, dtype=torch.long, device=plane.device))
