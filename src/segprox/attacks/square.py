"""Random search with small squares, which asks the model for logits only: no gradient."""

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from segprox.attacks.base import FIELDS, Cost, FixedEpsilonAttack, MinimalAttack, ProgressReporter
from segprox.best import BestPoints
from segprox.devices import send
from segprox.losses import margin
from segprox.norms import distance, scale
from segprox.query import Query
from segprox.tracker import Tracker

PENDING = 0.5  # the score of a pixel that is not yet as wanted, beside its margin
BEYOND = 0.5  # in mean margins: how far beyond the boundary a pixel is still pushed
WORST = 16.0  # the largest score: one pixel, or a NaN, must not outweigh all others
UNIT = 2**16  # scores are whole numbers of this fineness, so that their sums are exact in any order
FIRST_RADIUS = 1 / 255  # of the minimal form, over the largest perturbation that the box allows
WIDENING = 100  # queries after which cells begin to widen, with the square root: few squares are judged better
GROWTH = 1.1  # of the radius, round after round until the first success
SHRINKAGE = 0.97  # of the best norm: the next radius after a success

Side = Annotated[int, Field(ge=1, description="side of the squares, in pixels")]
Spacing = Annotated[
    int, Field(ge=1, description="side of the first cells over that of the squares: one square per cell")
]
RoundLength = Annotated[int, Field(ge=2, description="queries per round, the first of which is of what was accepted")]
RadiusRule = Callable[[BestPoints, int], Tensor]  # from the best points and the round's number to radii [B]


class Proposals(NamedTuple):
    """One square with random signs in each cell of a grid that is shifted at random, for each image."""

    cells: Tensor  # int64 [B, H, W]: the cell of each pixel, by number
    inside: Tensor  # bool [B, H, W]: the pixels of the squares
    signs: Tensor  # [B, C, H, W]
    number: int  # of cells of an image

    def better_cells(self, before: Tensor, after: Tensor) -> Tensor:
        """The pixels of the cells whose summed score (int64 `[B, H, W]`) did not grow, bool `[B, H, W]`."""
        cells = self.cells.flatten(1)
        change = cells.new_zeros(len(cells), self.number).scatter_add_(1, cells, (after - before).flatten(1))
        return (change <= 0).gather(1, cells).view_as(before)


def propose(images: Tensor, side: int, cell: int, sources: list[torch.Generator]) -> Proposals:
    """Draw proposals for images `[B, C, H, W]`, each from its own source.

    Numbers are drawn on the host, a few per cell, and sent to the device, where they are spread over the pixels.
    """
    batch, channels, height, width = images.shape
    side = min(side, cell)
    rows, columns = -(-height // cell) + 1, -(-width // cell) + 1
    count = rows * columns

    def draw(source: torch.Generator) -> Tensor:
        shift = torch.randint(cell, (2, 1), generator=source).expand(2, count)
        corner = torch.randint(cell - side + 1, (2, count), generator=source)
        sign = torch.randint(2, (channels, count), generator=source)
        return torch.cat([shift, corner, sign])

    drawn = torch.stack([draw(source) for source in sources]) if sources else torch.zeros(0, 4 + channels, count)
    drawn = send(drawn.long(), images.device)
    y = torch.arange(height, device=images.device).view(1, -1, 1) + drawn[:, 0, :1, None]
    x = torch.arange(width, device=images.device).view(1, 1, -1) + drawn[:, 1, :1, None]
    cells = y // cell * columns + x // cell
    values = drawn.gather(2, cells.flatten(1).unsqueeze(1).expand(-1, 4 + channels, -1))
    top, left = values[:, 2:4].view(batch, 2, height, width).unbind(1)
    inside = (y % cell >= top) & (y % cell < top + side) & (x % cell >= left) & (x % cell < left + side)
    signs = (2 * values[:, 4:] - 1).view(images.shape).to(images.dtype)
    return Proposals(cells, inside, signs, count)


class Squares:
    """The random search: a pattern of signs for each image, and the score of each pixel at it.

    Logits of a pixel depend mostly on its surroundings. So one query tries many squares, one in each cell, and each is
    accepted or rejected by the score of its own cell. What was accepted together is queried once in a round, since
    cells are not quite independent.
    """

    def __init__(self, tracker: Tracker, side: int, spacing: int) -> None:
        self.tracker, self.side, self.spacing = tracker, side, spacing
        self.sources = tracker.problem.generators()
        images = tracker.problem.images
        self.pattern = torch.zeros_like(images)
        self.width = torch.ones_like(tracker.best.norm)  # the mean size of margins, [B]
        self.scores = torch.zeros_like(tracker.problem.labels)

    def start(self, report: ProgressReporter) -> None:
        """Query the image itself, whose margins tell the scale of the logits, and begin with vertical stripes."""
        problem = self.tracker.problem
        query = self._ask(problem.images, report)
        sizes = margin(query.logits, problem.labels, targeted=problem.wanted).values.abs()
        self.width = problem.mean(sizes.nan_to_num(0.0, 0.0, 0.0)).clamp(min=torch.finfo(sizes.dtype).tiny)
        channels, _, width = problem.images.shape[1:]
        stripes = [torch.randint(2, (channels, 1, width), generator=source) for source in self.sources]
        if stripes:
            signs = send(2 * torch.stack(stripes) - 1, problem.images.device)
            self.pattern = signs.to(self.pattern.dtype).expand_as(self.pattern)

    def refresh(self, radius: Tensor, report: ProgressReporter) -> None:
        """Query what was accepted, at this radius `[B]`."""
        self.scores = self._score(self._ask(self._point(self.pattern, radius), report))

    def improve(self, radius: Tensor, t: int, report: ProgressReporter) -> None:
        """Query a square per cell, as query `t`, and keep those that are no worse where they are."""
        cell = round(self.side * self.spacing * math.sqrt(1 + t / WIDENING))
        proposals = propose(self.pattern, self.side, cell, self.sources)
        pattern = torch.where(proposals.inside.unsqueeze(1), proposals.signs, self.pattern)
        scores = self._score(self._ask(self._point(pattern, radius), report))
        better = proposals.better_cells(self.scores, scores)
        self.pattern = torch.where(better.unsqueeze(1), pattern, self.pattern)
        self.scores = torch.where(better, scores, self.scores)

    def _ask(self, points: Tensor, report: ProgressReporter) -> Query:
        query = self.tracker.query(points, differentiable=False)
        report(query)
        return query

    def _point(self, pattern: Tensor, radius: Tensor) -> Tensor:
        """The image plus the pattern, scaled to the radius `[B]`: every pixel changes by the same amount."""
        length = distance(pattern, self.tracker.norm).clamp(min=1)
        return (self.tracker.problem.images + scale(pattern, radius / length)).clamp_(0, 1)

    def _score(self, query: Query) -> Tensor:
        """How far each pixel is from what is wanted, int64 `[B, H, W]`: whether it is pending, and its margin."""
        problem = self.tracker.problem
        margins = margin(query.logits, problem.labels, targeted=problem.wanted).values / self.width.view(-1, 1, 1)
        values = (margins + BEYOND).nan_to_num_(nan=WORST).clamp_(0, WORST) + PENDING * ~query.satisfied
        return (torch.where(problem.mask, problem.balanced(values), 0) * UNIT).round().long()


def random_search(
    tracker: Tracker, report: ProgressReporter, steps: int, squares: Squares, round_length: int, radius_of: RadiusRule
) -> None:
    """Query `steps` points: the image, then rounds of what was accepted followed by new squares."""
    radius = tracker.best.norm
    for t in range(steps):
        if tracker.finished:
            return
        if t == 0:
            squares.start(report)
        elif (t - 1) % round_length == 0:
            radius = radius_of(tracker.best, (t - 1) // round_length)
            squares.refresh(radius, report)
        else:
            squares.improve(radius, t, report)


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class Square(FixedEpsilonAttack):
    """Random search within epsilon, in the manner of the Square attack, with many squares per query.

    It asks for logits only and thus sees through gradients that are zero, wrong or missing.
    """

    paper: ClassVar[str] = "Andriushchenko et al., Square Attack: a query-efficient black-box attack, ECCV 2020"

    steps: Annotated[int, Field(ge=1, description="N: queries")] = 1000
    side: Side = 2
    spacing: Spacing = 4
    round_length: RoundLength = 5

    def cost(self) -> Cost:
        """N queries, no gradient."""
        return Cost(self.steps, 0)

    def run_within(self, tracker: Tracker, epsilon: Tensor, report: ProgressReporter) -> None:
        """Search at the radius `epsilon` `[B]`."""
        squares = Squares(tracker, self.side, self.spacing)
        random_search(tracker, report, self.steps, squares, self.round_length, lambda best, number: epsilon)


@dataclass(frozen=True, kw_only=True, config=FIELDS)
class SquareMinimal(MinimalAttack):
    """The same random search for the smallest norm, at radii that grow until a success and then shrink below it.

    Signs that succeed at one radius nearly do at a smaller one: it goes on with them, where bisection starts again.
    """

    paper: ClassVar[str] = Square.paper

    norm: Annotated[Literal["linf", "l2"], Field(description="how perturbations are measured")] = "linf"
    steps: Annotated[int, Field(ge=1, description="N: queries")] = 1000
    side: Side = 2
    spacing: Spacing = 4
    round_length: RoundLength = 5

    def cost(self) -> Cost:
        """N queries, no gradient."""
        return Cost(self.steps, 0)

    def search(self, tracker: Tracker, report: ProgressReporter) -> None:
        """Search at radii that follow the best norm."""
        images = tracker.problem.images
        farthest = distance(torch.maximum(images, 1 - images), self.norm)

        def radius(best: BestPoints, number: int) -> Tensor:
            growing = torch.minimum(farthest * FIRST_RADIUS * GROWTH**number, farthest)
            return torch.where(best.success, SHRINKAGE * best.norm, growing)

        squares = Squares(tracker, self.side, self.spacing)
        random_search(tracker, report, self.steps, squares, self.round_length, radius)
