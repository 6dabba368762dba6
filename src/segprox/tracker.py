"""Queries to the model on behalf of an attack: counted, limited, and verified in full precision."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from segprox.best import BestPoints, Keep
from segprox.models.segmenter import Segmenter
from segprox.norms import NormName, distance
from segprox.problem import Problem
from segprox.result import AttackResult
from segprox.trace import Journal


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
    _asked: Tensor | None = field(repr=False)  # bool [B]; None: all

    def gradient(self, cotangent: Tensor) -> Tensor:
        """Pull a gradient with respect to the logits `[B, K, H, W]` back to the images `[B, C, H, W]`.

        Where the model yields NaN the gradient is 0, so that such an image cannot poison the state kept for it. Where
        some pixels are protected, these and the attacked ones weigh the same: see `Problem.balanced`.
        """
        allowed = self._tracker.affordable(self._asked)  # None: all
        if not self._outputs.requires_grad:  # nobody could afford to ask
            return torch.zeros_like(self._images)
        self._tracker.count_backwards(allowed)
        cotangent = self._tracker.problem.balanced(cotangent)
        if self._tracker.model.autocast == torch.float16:  # small gradients would vanish on their way
            factor = _power_of_two_over(cotangent)
            (gradient,) = torch.autograd.grad(self._outputs, self._images, cotangent * factor)
            gradient = gradient / factor
        else:
            (gradient,) = torch.autograd.grad(self._outputs, self._images, cotangent)
        if allowed is not None and self._tracker.max_queries is not None:
            gradient *= allowed.view(-1, 1, 1, 1)
        return gradient.nan_to_num_(0.0, 0.0, 0.0)


def _power_of_two_over(values: Tensor) -> Tensor:
    """The power of two by which each image's largest value comes near 1, `[B, 1, 1, 1]`; scaling by it rounds nothing.

    Float16 ends at 6e-8, and the weight of a pixel among millions is not far from that.
    """
    largest = distance(values.nan_to_num(0.0, 0.0, 0.0), "linf").clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(-largest.log2().floor()).clamp(max=2.0**100).view(-1, 1, 1, 1)


class Tally:
    """Counts per image: on the host as long as all images count the same, so that nothing is launched for it."""

    def __init__(self, images: Tensor) -> None:
        self._size, self._device = len(images), images.device
        self._every = 0  # what was added for all images
        self._some: Tensor | None = None  # int64 [B]: what was added for some

    def add(self, chosen: Tensor | None) -> None:
        """One more for the chosen images (bool `[B]`; None: all)."""
        if chosen is None:
            self._every += 1
        else:
            self._some = chosen.long() if self._some is None else self._some + chosen

    def each(self) -> Tensor:
        """The count of each image, int64 `[B]`."""
        if self._some is None:
            return torch.full((self._size,), self._every, device=self._device)
        return self._some + self._every

    def total(self, other: "Tally") -> Tensor | int:
        """This and another together: a number where all images have the same."""
        if self._some is None and other._some is None:
            return self._every + other._every
        return self.each() + other.each()


class QueriesExhausted(Exception):  # noqa: N818  # not an error: the end of an attack that may cost no more
    """No image has a query left."""


class Tracker:
    """Asks the model on behalf of an attack and counts; `best` keeps each image's best queried point.

    Nothing here waits for the device, so an attack loop runs without host synchronisation, unless images are to be left
    out once they are done.

    An attack made of attacks gives each a `child` tracker, whose queries count for the parent and whose points the
    parent's `best` sees as well.

    Args:
        model: the model.
        problem: what is to be achieved.
        norm: how perturbations are measured.
        keep: which point is best; see `BestPoints`.
        stop_at_success: ask no more about an image once it is a success.
        max_queries: the most forwards plus backwards of an image; then there is no answer, and when no image has any
            left, `QueriesExhausted` ends the attack. If no point that could be returned was queried by then, the image
            itself is returned, for which a forward is kept back.

    Example:
        >>> import segprox
        >>> scene, model = segprox.load_dataset("demo")[0], segprox.load_model("demo-standard")
        >>> tracker = segprox.Tracker(model, segprox.Problem.build(scene.image[None], scene.label[None]), "linf")
        >>> query = tracker.query(scene.image[None])
        >>> query.logits.shape, tracker.best.success.tolist(), tracker.forwards.tolist()
        (torch.Size([1, 8, 128, 256]), [False], [1])
    """

    def __init__(
        self,
        model: Segmenter,
        problem: Problem,
        norm: NormName,
        keep: Keep = "smallest",
        stop_at_success: bool = False,
        max_queries: int | None = None,
    ) -> None:
        self.model, self.problem, self.norm, self.max_queries = model, problem, norm, max_queries
        self.best = BestPoints(problem, keep)
        self._forwards, self._backwards = Tally(problem.images), Tally(problem.images)
        self.stop_at_success = stop_at_success
        self.skipped: Tensor | None = None  # images not to ask about, bool [B]
        self._parent: Tracker | None = None
        self._shared = True  # whether the parent may keep a point of this child
        self._radius: Tensor | None = None  # [B]: what the parent judges this child's successes by
        self._journal = Journal(len(problem))
        self._num_classes = 0  # of the model; 0 before the first query, which is checked
        self._known: tuple[Tensor | None, Tensor | None, list[bool]] = (None, None, [])  # see `_known_left_out`
        self._start = time.perf_counter()

    def child(
        self,
        keep: Keep = "most",
        *,
        skipped: Tensor | None = None,
        stop_at_success: bool = False,
        share: bool = True,
        radius: Tensor | None = None,
    ) -> "Tracker":
        """A tracker for a part of the attack.

        Args:
            keep: which of the child's own points is best.
            skipped: images that the child does not ask about, bool `[B]`.
            stop_at_success: as for the parent.
            share: whether the parent may keep a point of the child.
            radius: of the child's ball, `[B]`: the parent judges successes by it, not by their norms.
        """
        child = Tracker(self.model, self.problem, self.norm, keep, stop_at_success, self.max_queries)
        child.skipped = skipped if self.skipped is None else self.skipped if skipped is None else skipped | self.skipped
        child._parent, child._shared, child._num_classes = self, share, self._num_classes
        child._radius = radius
        return child

    @property
    def forwards(self) -> Tensor:
        """How often each image was asked about, int64 `[B]`."""
        return self._forwards.each()

    @property
    def backwards(self) -> Tensor:
        """How many gradients were asked for of each image, int64 `[B]`."""
        return self._backwards.each()

    @property
    def finished(self) -> bool:
        """Whether no image is left to ask about."""
        return self._left_out() is not None and all(self._known_left_out())

    def _left_out(self) -> Tensor | None:
        if not self.stop_at_success:
            return self.skipped
        return self.best.success if self.skipped is None else self.best.success | self.skipped

    def _known_left_out(self) -> list[bool]:
        """The images not to ask about, on the host, which waits for them once per query."""
        success, skipped, known = self._known
        if success is not self.best.success or skipped is not self.skipped:
            left_out = self._left_out()
            known = [False] * len(self.problem) if left_out is None else left_out.tolist()
            self._known = self.best.success, self.skipped, known
        return known

    def affordable(self, asked: Tensor | None) -> Tensor | None:
        """Which of the `asked` images are not done yet and have a query left, bool `[B]` each; None: all."""
        left_out = self._left_out()
        if self.max_queries is None and left_out is None:
            return asked
        asked = torch.ones_like(self.best.success) if asked is None else asked
        asked = asked if left_out is None else asked & ~left_out
        if self.max_queries is None:
            return asked
        if bool(asked.any()) and bool(self._ended().all()):
            raise QueriesExhausted
        return asked & ~self._exhausted()

    def _ended(self) -> Tensor:
        """The images for which the whole attack can do no more: a child may have left out others for a while only."""
        if self._parent is not None:
            return self._parent._ended()
        left_out, ended = self._left_out(), self._exhausted()
        return ended if left_out is None else ended | left_out

    def _exhausted(self) -> Tensor:
        if self._parent is not None:
            return self._parent._exhausted()
        if self.max_queries is None:
            return torch.zeros_like(self.best.success)
        # A forward is kept back as long as there is no point to return: then `result` looks at the image itself.
        return self.forwards + self.backwards + self.best.unseen >= self.max_queries

    def query(self, images: Tensor) -> Query:
        """Evaluate the model at `images` `[B, C, H, W]` and keep what is better than the best so far."""
        images = images.detach().requires_grad_()
        asked = self.affordable(None)
        with torch.enable_grad():
            outputs = self._evaluate(images, self._chosen(asked))
        self.count_forwards(asked)
        logits, points = outputs.detach(), images.detach()
        norm = distance(points - self.problem.images, self.norm)
        satisfied = self.problem.satisfied(logits)
        apsr = self.problem.rate(satisfied)
        apsr = apsr if asked is None else torch.where(asked, apsr, self.best.apsr)
        success = self._successes(apsr, asked)
        if self.model.autocast is not None:
            claimed = success & self._matters(norm, apsr)  # of which nothing is known
            apsr = self._verified(points, torch.where(claimed, 0.0, apsr), claimed & ~self._exhausted())
            success = self._successes(apsr, asked)
        self._keep(points, norm, apsr, success, asked)
        return Query(logits, satisfied, norm, apsr, success, self, images, outputs, asked)

    def _successes(self, apsr: Tensor, asked: Tensor | None) -> Tensor:
        success = self.problem.succeeded(apsr)
        return success if asked is None else success & asked

    def count_forwards(self, asked: Tensor | None) -> None:
        """One more forward of the images asked about (bool `[B]`; None: all), here and for the parent."""
        self._forwards.add(asked)
        if self._parent is not None:
            self._parent.count_forwards(asked)

    def count_backwards(self, asked: Tensor | None) -> None:
        """One more backward, likewise."""
        self._backwards.add(asked)
        if self._parent is not None:
            self._parent.count_backwards(asked)

    def _chosen(self, asked: Tensor | None) -> list[int] | None:
        """The places of the `asked` images (bool `[B]`; None: all)."""
        if asked is None:
            return None
        left_out = self._known_left_out() if self.max_queries is None else (~asked).tolist()
        return [i for i, out in enumerate(left_out) if not out]

    def _evaluate(self, images: Tensor, chosen: list[int] | None) -> Tensor:
        # The first query is checked; later points lie in the box by construction, and the head stays what it is.
        model = self.model.logits if self._num_classes else self.model
        everything = list(range(len(images)))
        chosen = everything if chosen is None else chosen
        if not chosen and self._num_classes:
            return images.detach().new_zeros(len(images), self._num_classes, *images.shape[2:])
        if images.device.type == "cpu" and len(chosen) > 1:
            # CPU kernels are chosen by the size of the batch and round differently. One image at a time costs nothing
            # there and makes results independent of the batch, bit for bit.
            outputs = torch.cat([model(images[i : i + 1]) for i in chosen])
        else:
            outputs = model(images if chosen == everything else images[self._places(chosen)])
        if not self._num_classes:
            self.problem.check_classes(outputs.shape[1])
            self._know_num_classes(outputs.shape[1])
        if chosen == everything:
            return outputs
        return outputs.new_zeros(len(images), *outputs.shape[1:]).index_put((self._places(chosen),), outputs)

    def _places(self, chosen: list[int]) -> Tensor:
        """Places of images as an index on their device, sent there without waiting."""
        places, device = torch.tensor(chosen), self.problem.images.device
        return places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places.to(device)

    def _know_num_classes(self, count: int) -> None:
        self._num_classes = count
        if self._parent is not None:
            self._parent._know_num_classes(count)

    @torch.no_grad()
    def _verified(self, points: Tensor, apsr: Tensor, chosen: Tensor) -> Tensor:
        """APSR with that of the chosen images measured in full precision, whatever the network's is."""
        self.count_forwards(chosen)
        for i in chosen.nonzero().flatten().tolist():
            apsr[i : i + 1] = self.problem.select([i]).apsr(self.model.full_precision(points[i : i + 1]))
        return apsr

    def _matters(self, norm: Tensor, apsr: Tensor, radius: Tensor | None = None) -> Tensor:
        """Which successes would be the best so far, here or for the parent."""
        here = self.best.improved_by(norm, apsr, radius)
        return here if self._parent is None else here | self._parent._matters(norm, apsr, self._radius_of(norm))

    def _radius_of(self, norm: Tensor) -> Tensor | None:
        """The radius that the parent judges successes of this norm by, `[B]`, if any; the image itself needs none."""
        return None if self._radius is None else torch.where(norm == 0, norm, self._radius)

    def _keep(
        self,
        points: Tensor,
        norm: Tensor,
        apsr: Tensor,
        success: Tensor,
        asked: Tensor | None,
        radius: Tensor | None = None,
    ) -> None:
        self.best.update(points, norm, apsr, success, asked, radius)
        if self._parent is None:
            self._note()
        elif self._shared:
            self._parent._keep(points, norm, apsr, success, asked, self._radius_of(norm))

    def _note(self) -> None:
        self._journal.note(self._forwards.total(self._backwards), self.best.norm, self.best.success)

    def _elapsed(self) -> float:
        if self.best.images.is_cuda:
            torch.cuda.synchronize(self.best.images.device)
        return time.perf_counter() - self._start

    def result(self) -> AttackResult:
        """The best points, with what they cost."""
        best = self.best
        if self.model.autocast is not None or self.max_queries is not None:
            # In low precision only successes are verified already; else all that was seen is.
            unknown = best.unseen if self.model.autocast is None else ~best.success
            affordable = unknown & (best.unseen | ~self._exhausted()) & self.problem.attackable
            best.apsr = self._verified(best.images, torch.where(unknown, 0.0, best.apsr), affordable)
            best.success = best.success | self.problem.succeeded(best.apsr)
            self._note()
        return AttackResult(
            images=best.images,
            norm=best.norm,
            apsr=best.apsr.clamp(min=0),
            success=best.success,
            forwards=self.forwards,
            backwards=self.backwards,
            seconds=self._elapsed(),
            originals=self.problem.images,
            traces=self._journal.traces(),
        )
