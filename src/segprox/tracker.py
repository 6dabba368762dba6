"""Queries to the model on behalf of an attack: counted, limited, and verified in full precision."""

import time

import torch
from torch import Tensor

from segprox.best import BestPoints, Keep
from segprox.devices import send, together, wait_for
from segprox.draws import Draws, Sampling
from segprox.models.segmenter import Segmenter
from segprox.norms import NormName, distance
from segprox.problem import Problem
from segprox.query import Query
from segprox.result import AttackResult
from segprox.tally import Tally
from segprox.trace import Journal


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
        look_every: the host looks at every so many-th query which images are done, and waits for the device then;
            in between, images that are done are computed in vain. It changes no result.
        sampling: for a model that answers at random: every query is the mean of some draws, and successes are judged by
            repeated scoring, for which draws are kept back; see `segprox.draws`.

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
        look_every: int = 1,
        sampling: Sampling | None = None,
    ) -> None:
        self.model, self.problem, self.norm, self.max_queries = model, problem, norm, max_queries
        self.look_every, self._until_look = look_every, 0  # queries until the host looks again
        self._use_draws(None if sampling is None else Draws(problem, sampling, max_queries))
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
        limits = self.max_queries, self.look_every
        child = Tracker(self.model, self.problem, self.norm, keep, stop_at_success, *limits)
        child.skipped = skipped if self.skipped is None else self.skipped if skipped is None else skipped | self.skipped
        child._parent, child._shared, child._num_classes = self, share, self._num_classes
        child._radius = radius
        child._use_draws(self._draws)
        return child

    def _use_draws(self, draws: Draws | None) -> None:
        self._draws = draws
        self._samples = 1 if draws is None else draws.sampling.samples  # forwards of a query
        self._scored = 1 if draws is None else draws.sampling.score_draws  # the most that verify a success

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
        """The images not to ask about, as of the last look of the host, which waits for them once per look."""
        success, skipped, known = self._known
        due = self.look_every == 1 or self._until_look <= 0
        if due and (success is not self.best.success or skipped is not self.skipped):
            self._until_look, left_out = self.look_every, self._left_out()
            known = [False] * len(self.problem) if left_out is None else left_out.tolist()
            self._known = self.best.success, self.skipped, known
        return known

    def affordable(self, asked: Tensor | None) -> Tensor | None:
        """Which of the `asked` images are not done yet and have a query left, bool `[B]` each; None: all."""
        left_out, exhausted = self._left_out(), self._exhausted()
        if exhausted is True:
            raise QueriesExhausted
        for done in (left_out, exhausted):
            if isinstance(done, Tensor):
                asked = ~done if asked is None else asked & ~done
        return asked

    def _ended(self) -> Tensor:
        """The images for which the whole attack can do no more: a child may have left out others for a while only."""
        root = self
        while root._parent is not None:
            root = root._parent
        left_out = root._left_out()
        return ~root._affordable_among(torch.ones_like(root.best.success) if left_out is None else ~left_out)

    def _exhausted(self, cost: int | None = None) -> Tensor | bool:
        """The images that cannot afford so many forwards or backwards (if left out, those of a query), bool `[B]`.

        Where all were asked equally often, nothing is computed.
        """
        if self._parent is not None:
            return self._parent._exhausted(cost)
        if self.max_queries is None:
            return False
        asked = self._forwards.total(self._backwards)
        return asked + self._kept_back(asked) + (cost or self._samples) > self.max_queries

    def _kept_back(self, asked: Tensor | int) -> Tensor | int:
        """Forwards that a search must leave for `result`, of images that were `asked` so often.

        It looks at the image itself where no point was seen that could be returned, and scores whatever it returns by
        the draws of a random model.
        """
        if self._draws is not None:
            return self._scored
        return self.best.unseen if isinstance(asked, Tensor) else not self.best.seen

    def _affordable_among(self, images: Tensor, cost: int | None = None) -> Tensor:
        """Those of the images, bool `[B]`, that can afford so many forwards or backwards, or those of a query."""
        exhausted = self._exhausted(cost)
        if isinstance(exhausted, Tensor):
            return images & ~exhausted
        return torch.zeros_like(images) if exhausted else images

    def query(self, images: Tensor, differentiable: bool = True) -> Query:
        """Evaluate the model at `images` `[B, C, H, W]` and keep what is better than the best so far.

        Fixed pixels stay what they are, whatever the attack makes of them. Without `differentiable` no graph is made,
        and the answer has no gradient.
        """
        images = self.problem.hold_fixed(images.detach()).requires_grad_(differentiable)
        asked = self.affordable(None)
        chosen = self._chosen(asked)
        with torch.set_grad_enabled(differentiable):
            outputs = self._evaluate(images, chosen)
        self.count_forwards(asked, self._samples)
        logits, points = outputs.detach(), images.detach()
        norm = distance(points - self.problem.images, self.norm)
        satisfied = self.problem.satisfied(logits)
        apsr = self.problem.rate(satisfied) if self._draws is None else self._draws.apsr.clone()
        apsr = apsr if asked is None else torch.where(asked, apsr, self.best.apsr)
        success = self._successes(apsr, asked)
        if self.model.autocast is not None or self._draws is not None:
            claimed = success & self._matters(norm, apsr)  # of which nothing is known
            affordable = self._affordable_among(claimed, self._scored)
            apsr = self._verified(points, torch.where(claimed, 0.0, apsr), affordable)
            success = self._successes(apsr, asked)
        self._keep(points, norm, apsr, success, asked)
        return Query(logits, satisfied, norm, apsr, success, self, images, outputs, asked)

    def _successes(self, apsr: Tensor, asked: Tensor | None) -> Tensor:
        success = self.problem.succeeded(apsr)
        return success if asked is None else success & asked

    def count_forwards(self, asked: Tensor | None, times: int = 1) -> None:
        """So many more forwards of the images asked about (see `Tally.add`), here and for the parent."""
        self._forwards.add(asked, times)
        if self._parent is not None:
            self._parent.count_forwards(asked, times)

    def count_backwards(self, asked: Tensor | None) -> None:
        """The backwards of a query's gradient, likewise."""
        self._backwards.add(asked, self._samples)
        if self._parent is not None:
            self._parent.count_backwards(asked)

    def _chosen(self, asked: Tensor | None) -> list[int] | None:
        """The places of images that the model is to be asked about: of the `asked` ones (bool `[B]`; None: all).

        Without a limit on queries, those that are done may be among them until the host looks again.
        """
        if asked is None:
            return None
        if self.max_queries is None:
            chosen = [not done for done in self._known_left_out()]
            self._until_look -= 1
        else:
            left_out = self._left_out()
            wanted = torch.ones_like(asked) if left_out is None else ~left_out
            chosen, wants, ended = torch.stack([asked, wanted, self._ended()]).tolist()
            if any(wants) and all(ended):
                raise QueriesExhausted
        return [i for i, yes in enumerate(chosen) if yes]

    def _evaluate(self, images: Tensor, chosen: list[int] | None) -> Tensor:
        # The first query is checked; later points lie in the box by construction, and the head stays what it is.
        model = self.model.logits if self._num_classes else self.model
        everything = list(range(len(images)))
        chosen = everything if chosen is None else chosen
        if not chosen and self._num_classes:
            return images.detach().new_zeros(len(images), self._num_classes, *images.shape[2:])
        if self._draws is not None:
            outputs = torch.cat([self._draws.mean(model, images[i : i + 1], i) for i in chosen])
        elif not together(images) and len(chosen) > 1:
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
        """Places of images as an index on their device."""
        return send(torch.tensor(chosen), self.problem.images.device)

    def _know_num_classes(self, count: int) -> None:
        self._num_classes = count
        if self._parent is not None:
            self._parent._know_num_classes(count)

    @torch.no_grad()
    def _verified(self, points: Tensor, apsr: Tensor, chosen: Tensor) -> Tensor:
        """APSR with that of the chosen images measured in full precision, whatever the network's is."""
        if self._draws is not None:
            self.count_forwards(self._draws.verify(self.model, points, apsr, chosen))
            return apsr
        self.count_forwards(chosen)
        for i in [i for i, yes in enumerate(chosen.tolist()) if yes]:
            one = slice(i, i + 1)
            apsr[one] = self.problem.select(one).apsr(self.model.full_precision(points[one]))
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
        wait_for(self.best.images.device)
        return time.perf_counter() - self._start

    def result(self) -> AttackResult:
        """The best points, with what they cost."""
        best, draws = self.best, None
        if self._draws is not None:
            draws = self._draws.score(self.model, best.images)
            self.count_forwards(None, self._scored)
            best.apsr = self._draws.sampling.reached(draws)
            best.success = self.problem.succeeded(best.apsr)
        elif self.model.autocast is not None or self.max_queries is not None:
            # In low precision only successes are verified already; else all that was seen is.
            unknown = best.unseen if self.model.autocast is None else ~best.success
            affordable = (unknown & best.unseen | self._affordable_among(unknown)) & self.problem.attackable
            best.apsr = self._verified(best.images, torch.where(unknown, 0.0, best.apsr), affordable)
            best.success = best.success | self.problem.succeeded(best.apsr)
            self._note()
        traces = self._journal.traces()
        return AttackResult(
            images=best.images,
            norm=best.norm,
            apsr=best.apsr.clamp(min=0),
            success=best.success,
            forwards=self.forwards,
            backwards=self.backwards,
            seconds=self._elapsed(),
            originals=self.problem.images,
            # What a random model was thought to fall to during the search, and did not in the end, is no success.
            traces=traces if draws is None else tuple(t if s else () for t, s in zip(traces, best.success.tolist())),
            draws=draws,
        )
