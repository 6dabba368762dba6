"""Queries to the model, counted, and the best point seen at one of them."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from segprox.models.segmenter import Segmenter
from segprox.norms import NormName, distance
from segprox.problem import Problem


@dataclass(frozen=True, eq=False)
class Attacked:
    """What an attack found, one entry per image.

    Example:
        >>> import segprox
        >>> scene = segprox.load_dataset("demo")[0]
        >>> result = segprox.attack(segprox.load_model("demo-standard"), scene.image[None], scene.label[None], steps=2)
        >>> result.images.shape, result.forwards.tolist()
        (torch.Size([1, 3, 128, 256]), [2])
    """

    images: Tensor  # [B, C, H, W]: the best adversarial images, in [0, 1]
    norm: Tensor  # [B]: the size of their perturbations, in the attack's norm
    apsr: Tensor  # [B]: attack pixel success rates, float64
    success: Tensor  # [B] bool: whether the APSR reaches the problem's threshold
    forwards: Tensor  # [B] int64: model evaluations spent
    backwards: Tensor  # [B] int64: gradients spent
    seconds: float  # for the whole batch


@dataclass(eq=False)
class Query:
    """The model's answer at one point. `gradient` may be asked for once; it frees the graph."""

    logits: Tensor  # [B, K, H, W], detached
    norm: Tensor  # [B]
    apsr: Tensor  # [B]
    success: Tensor  # [B]
    _tracker: "Tracker" = field(repr=False)
    _images: Tensor = field(repr=False)
    _outputs: Tensor = field(repr=False)

    def gradient(self, cotangent: Tensor) -> Tensor:
        """Pull a gradient with respect to the logits `[B, K, H, W]` back to the images `[B, C, H, W]`.

        Where the model yields NaN the gradient is 0, so that such an image cannot poison the state kept for it.
        """
        self._tracker.backwards += 1
        (gradient,) = torch.autograd.grad(self._outputs, self._images, cotangent)
        return gradient.nan_to_num_(0.0, 0.0, 0.0)


class Tracker:
    """Asks the model on behalf of an attack, counts, and keeps each image's best queried point.

    Best is the smallest norm among successes; before the first success, the highest APSR. Nothing here waits for the
    device, so an attack loop runs without host synchronisation.
    """

    def __init__(self, model: Segmenter, problem: Problem, norm: NormName) -> None:
        self.model = model
        self.problem = problem
        self.norm = norm
        size, device = len(problem), problem.images.device
        self.forwards = torch.zeros(size, dtype=torch.long, device=device)
        self.backwards = torch.zeros_like(self.forwards)
        self.best_images = problem.images.clone()
        self.best_norm = problem.images.new_zeros(size)
        self.best_apsr = torch.full((size,), -1.0, dtype=torch.float64, device=device)
        self.success = torch.zeros(size, dtype=torch.bool, device=device)
        self._checked = False
        self._start = time.perf_counter()

    def query(self, images: Tensor) -> Query:
        """Evaluate the model at `images` `[B, C, H, W]` and remember what is better than the best so far."""
        images = images.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self._evaluate(images)
        self.forwards += 1
        logits, points = outputs.detach(), images.detach()
        norm = distance(points - self.problem.images, self.norm)
        apsr = self.problem.apsr(logits)
        success = self.problem.succeeded(apsr)
        self._remember(points, norm, apsr, success)
        return Query(logits, norm, apsr, success, self, images, outputs)

    def _evaluate(self, images: Tensor) -> Tensor:
        # The first query is checked; later points lie in the box by construction, and the head stays what it is.
        model = self.model.logits if self._checked else self.model
        if images.device.type == "cpu" and len(images) > 1:
            # CPU kernels are chosen by the size of the batch and round differently. One image at a time costs nothing
            # there and makes results independent of the batch, bit for bit.
            outputs = torch.cat([model(image[None]) for image in images])
        else:
            outputs = model(images)
        if not self._checked:
            self.problem.check_classes(outputs.shape[1])
            self._checked = True
        return outputs

    def _remember(self, points: Tensor, norm: Tensor, apsr: Tensor, success: Tensor) -> None:
        smaller = success & (~self.success | (norm < self.best_norm))
        closer = ~success & ~self.success & (apsr > self.best_apsr)
        better = smaller | closer
        torch.where(better.view(-1, 1, 1, 1), points, self.best_images, out=self.best_images)
        self.best_norm = torch.where(better, norm, self.best_norm)
        self.best_apsr = torch.where(better, apsr, self.best_apsr)
        self.success |= success

    def _elapsed(self) -> float:
        if self.best_images.is_cuda:
            torch.cuda.synchronize(self.best_images.device)
        return time.perf_counter() - self._start

    def result(self) -> Attacked:
        """The best points, with what they cost."""
        return Attacked(
            images=self.best_images,
            norm=self.best_norm,
            apsr=self.best_apsr.clamp(min=0),
            success=self.success,
            forwards=self.forwards,
            backwards=self.backwards,
            seconds=self._elapsed(),
        )
