"""Queries to the model, counted, and the best point seen at one of them."""

import time
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from segprox.models.segmenter import Segmenter
from segprox.norms import NormName, distance
from segprox.problem import Problem
from segprox.trace import Journal, Trace

Goal = Literal["smallest", "most"]


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
    traces: tuple[Trace, ...] = ()  # [B]: the norms it would have returned after fewer queries


@dataclass(eq=False)
class Query:
    """The model's answer at one point. `gradient` may be asked for once; it frees the graph."""

    logits: Tensor  # [B, K, H, W], detached; 0 for images that were not asked about
    satisfied: Tensor  # [B, H, W]: the pixels that are as the attack wants them
    norm: Tensor  # [B]
    apsr: Tensor  # [B]; the best so far of images that were not asked about
    success: Tensor  # [B]
    _tracker: "Tracker" = field(repr=False)
    _images: Tensor = field(repr=False)
    _outputs: Tensor = field(repr=False)
    _asked: Tensor = field(repr=False)

    def gradient(self, cotangent: Tensor) -> Tensor:
        """Pull a gradient with respect to the logits `[B, K, H, W]` back to the images `[B, C, H, W]`.

        Where the model yields NaN the gradient is 0, so that such an image cannot poison the state kept for it.
        """
        allowed = self._tracker.affordable(self._asked)
        if not self._outputs.requires_grad:  # nobody could afford to ask
            return torch.zeros_like(self._images)
        self._tracker.count(backwards=allowed)
        (gradient,) = torch.autograd.grad(self._outputs, self._images, cotangent)
        if self._tracker.budget is not None:
            gradient *= allowed.view(-1, 1, 1, 1)
        return gradient.nan_to_num_(0.0, 0.0, 0.0)


class BudgetSpent(Exception):  # noqa: N818  # not an error: the end of an attack that may cost no more
    """No image has any budget left."""


class Tracker:
    """Asks the model on behalf of an attack, counts, and keeps each image's best queried point.

    Best is the point of smallest norm among successes, before the first success the one of highest APSR (`smallest`);
    or the one of highest APSR throughout (`most`). Nothing here waits for the device, so an attack loop runs without
    host synchronisation, unless images are to be left out once they are done.

    An attack made of attacks gives each its own tracker by `part`, which counts and remembers for the whole as well.
    Where parts have a radius, the best success of a `smallest` whole is the one of highest APSR in the smallest radius.

    Args:
        model: the model.
        problem: what is to be achieved.
        norm: how perturbations are measured.
        goal: what is best.
        stop_at_success: ask no more about an image once it is a success.
        budget: the most forwards plus backwards to spend on an image; then there is no answer, and when no image has
            any left, `BudgetSpent` ends the attack. If no point that could be returned was queried by then, the image
            itself is returned, for which a forward is kept back.
    """

    def __init__(
        self,
        model: Segmenter,
        problem: Problem,
        norm: NormName,
        goal: Goal = "smallest",
        stop_at_success: bool = False,
        budget: int | None = None,
    ) -> None:
        self.budget = budget
        self.model, self.problem, self.norm, self.goal = model, problem, norm, goal
        size, device = len(problem), problem.images.device
        self.forwards = torch.zeros(size, dtype=torch.long, device=device)
        self.backwards = torch.zeros_like(self.forwards)
        self.best_images = problem.images.clone()
        self.best_norm = problem.images.new_zeros(size)
        self.best_apsr = torch.full((size,), -1.0, dtype=torch.float64, device=device)
        self.success = torch.zeros(size, dtype=torch.bool, device=device)
        self._best_radius = torch.zeros_like(self.best_norm)  # of the part that found the best success, if it had one
        self.stop_at_success = stop_at_success
        self.skipped: Tensor | None = None  # images not to ask about, bool [B]
        self._whole: Tracker | None = None
        self._remembers_for_whole = True
        self._radius: Tensor | None = None  # [B]: what successes of this part are judged by in the whole
        self._journal = Journal(size)
        self._classes = 0  # of the model; 0 before the first query, which is checked
        self._start = time.perf_counter()

    def part(
        self,
        goal: Goal = "most",
        *,
        skipped: Tensor | None = None,
        stop_at_success: bool = False,
        remember: bool = True,
        radius: Tensor | None = None,
    ) -> "Tracker":
        """A tracker for a part of the attack.

        Args:
            goal: what is best within the part.
            skipped: images that the part does not ask about, bool `[B]`.
            stop_at_success: as for the whole.
            remember: whether a point of the part may become the best of the whole.
            radius: of the part's ball, `[B]`: the whole judges successes by it, not by their norms.
        """
        part = Tracker(self.model, self.problem, self.norm, goal, stop_at_success, self.budget)
        part.skipped = skipped if self.skipped is None else self.skipped if skipped is None else skipped | self.skipped
        part._whole, part._remembers_for_whole, part._classes = self, remember, self._classes
        part._radius = radius
        return part

    @property
    def finished(self) -> bool:
        """Whether no image is left to ask about."""
        left_out = self._left_out()
        return left_out is not None and bool(left_out.all())

    def _left_out(self) -> Tensor | None:
        if not self.stop_at_success:
            return self.skipped
        return self.success if self.skipped is None else self.success | self.skipped

    def affordable(self, asked: Tensor) -> Tensor:
        """Which of the `asked` images (bool `[B]`) are not done yet and have budget for an evaluation or a gradient."""
        left_out = self._left_out()
        asked = asked if left_out is None else asked & ~left_out
        if self.budget is None:
            return asked
        if bool(asked.any()) and bool(self._ended().all()):
            raise BudgetSpent
        return asked & ~self._spent()

    def _ended(self) -> Tensor:
        """The images for which the whole attack can do no more: a part may have left out others for a while only."""
        if self._whole is not None:
            return self._whole._ended()
        left_out, ended = self._left_out(), self._spent()
        return ended if left_out is None else ended | left_out

    def _spent(self) -> Tensor:
        if self._whole is not None:
            return self._whole._spent()
        if self.budget is None:
            return torch.zeros_like(self.success)
        # A forward is kept back as long as there is no point to return: then `result` looks at the image itself.
        return self.forwards + self.backwards + self._unseen() >= self.budget

    def _unseen(self) -> Tensor:
        """The images without a point to return, bool `[B]`."""
        return self.best_apsr < 0

    def query(self, images: Tensor) -> Query:
        """Evaluate the model at `images` `[B, C, H, W]` and remember what is better than the best so far."""
        images = images.detach().requires_grad_()
        everything = self.budget is None and self._left_out() is None
        asked = self.affordable(torch.ones_like(self.success))
        with torch.enable_grad():
            outputs = self._evaluate(images, None if everything else asked.nonzero().flatten().tolist())
        self.count(forwards=asked)
        logits, points = outputs.detach(), images.detach()
        norm = distance(points - self.problem.images, self.norm)
        satisfied = self.problem.satisfied(logits)
        apsr = torch.where(asked, self.problem.rate(satisfied), self.best_apsr)
        success = self.problem.succeeded(apsr) & asked
        if self.model.autocast is not None:
            claimed = success & self._matters(norm, apsr)  # of which nothing is known
            apsr = self._verified(points, torch.where(claimed, 0.0, apsr), claimed & ~self._spent())
            success = self.problem.succeeded(apsr) & asked
        self._remember(points, norm, apsr, success, asked)
        return Query(logits, satisfied, norm, apsr, success, self, images, outputs, asked)

    def count(self, forwards: Tensor | int = 0, backwards: Tensor | int = 0) -> None:
        """Add to what has been spent, here and in the whole that this is a part of."""
        self.forwards += forwards
        self.backwards += backwards
        if self._whole is not None:
            self._whole.count(forwards, backwards)

    def _evaluate(self, images: Tensor, chosen: list[int] | None) -> Tensor:
        # The first query is checked; later points lie in the box by construction, and the head stays what it is.
        model = self.model.logits if self._classes else self.model
        everything = list(range(len(images)))
        chosen = everything if chosen is None else chosen
        if not chosen and self._classes:
            return images.detach().new_zeros(len(images), self._classes, *images.shape[2:])
        if images.device.type == "cpu" and len(chosen) > 1:
            # CPU kernels are chosen by the size of the batch and round differently. One image at a time costs nothing
            # there and makes results independent of the batch, bit for bit.
            outputs = torch.cat([model(images[i : i + 1]) for i in chosen])
        else:
            outputs = model(images if chosen == everything else images[chosen])
        if not self._classes:
            self.problem.check_classes(outputs.shape[1])
            self._know_classes(outputs.shape[1])
        if chosen == everything:
            return outputs
        return outputs.new_zeros(len(images), *outputs.shape[1:]).index_put((torch.tensor(chosen),), outputs)

    def _know_classes(self, count: int) -> None:
        self._classes = count
        if self._whole is not None:
            self._whole._know_classes(count)

    @torch.no_grad()
    def _verified(self, points: Tensor, apsr: Tensor, chosen: Tensor) -> Tensor:
        """APSR with that of the chosen images measured in full precision, whatever the network's is."""
        self.count(forwards=chosen)
        for i in chosen.nonzero().flatten().tolist():
            apsr[i : i + 1] = self.problem.select([i]).apsr(self.model.full_precision(points[i : i + 1]))
        return apsr

    def _matters(self, norm: Tensor, apsr: Tensor, radius: Tensor | None = None) -> Tensor:
        """Which successes would be the best so far, here or in the whole."""
        here = self._improves(norm, apsr, radius)
        return here if self._whole is None else here | self._whole._matters(norm, apsr, self._radius_of(norm))

    def _improves(self, norm: Tensor, apsr: Tensor, radius: Tensor | None) -> Tensor:
        """Which successes at this norm and APSR, in a part of this radius, would be the best so far."""
        if self.goal == "most":
            return ~self.success | (apsr > self.best_apsr)
        if radius is None:
            return ~self.success | (norm <= self.best_norm)  # of equally small ones, the last
        return (
            ~self.success
            | (radius < self._best_radius)
            | ((radius == self._best_radius) & (apsr >= self.best_apsr))  # of equals, the last, as the paper's code
        )

    def _radius_of(self, norm: Tensor) -> Tensor | None:
        """The radius that the whole judges successes of this norm by, `[B]`, if any; the image itself needs none."""
        return None if self._radius is None else torch.where(norm == 0, norm, self._radius)

    def _remember(
        self,
        points: Tensor,
        norm: Tensor,
        apsr: Tensor,
        success: Tensor,
        asked: Tensor,
        radius: Tensor | None = None,
    ) -> None:
        if self.goal == "smallest":
            closer = ~success & ~self.success & (apsr > self.best_apsr)
            better = (success & self._improves(norm, apsr, radius) | closer) & asked
        else:
            better = (apsr > self.best_apsr) & asked
        torch.where(better.view(-1, 1, 1, 1), points, self.best_images, out=self.best_images)
        self.best_norm = torch.where(better, norm, self.best_norm)
        self.best_apsr = torch.where(better, apsr, self.best_apsr)
        if radius is not None:
            self._best_radius = torch.where(better, radius, self._best_radius)
        self.success |= success
        if self._whole is None:
            self._note()
        elif self._remembers_for_whole:
            self._whole._remember(points, norm, apsr, success, asked, self._radius_of(norm))

    def _note(self) -> None:
        self._journal.note(self.forwards + self.backwards, self.best_norm, self.success)

    def _elapsed(self) -> float:
        if self.best_images.is_cuda:
            torch.cuda.synchronize(self.best_images.device)
        return time.perf_counter() - self._start

    def result(self) -> Attacked:
        """The best points, with what they cost."""
        if self.model.autocast is not None or self.budget is not None:
            # In low precision only successes are verified already; else all that was seen is.
            unknown = self._unseen() if self.model.autocast is None else ~self.success
            affordable = unknown & (self._unseen() | ~self._spent()) & (self.problem.counted > 0)
            self.best_apsr = self._verified(self.best_images, torch.where(unknown, 0.0, self.best_apsr), affordable)
            self.success |= self.problem.succeeded(self.best_apsr)
            self._note()
        return Attacked(
            images=self.best_images,
            norm=self.best_norm,
            apsr=self.best_apsr.clamp(min=0),
            success=self.success,
            forwards=self.forwards,
            backwards=self.backwards,
            seconds=self._elapsed(),
            traces=self._journal.traces(),
        )
