"""Models that answer at random: which random numbers they get, how often they are asked, and when they are broken.

Such a model is attacked on the average (expectation over transformation, Athalye et al., ICML 2018): each query is
the mean of several draws. Whether a point breaks it is judged by repeated scoring, because an attack that keeps the
smallest success of hundreds of queries keeps the luckiest draw.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from segprox.devices import finest
from segprox.errors import SegproxError
from segprox.models.segmenter import Segmenter
from segprox.naming import checked
from segprox.problem import Problem
from segprox.seeding import seeded
from segprox.sizes import wilson


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Sampling:
    """How often a random model is asked, and how often it must be wrong to be broken.

    Example:
        >>> Sampling(4).needed, Sampling(4, score_draws=40, score_share=0.8).needed
        (15, 37)
    """

    samples: Annotated[int, Field(ge=1, description="n: draws of a query, whose logits and gradients are averaged")]
    score_draws: Annotated[int, Field(ge=1, description="m: draws by which a point is judged")] = 20
    score_share: Annotated[float, Field(gt=0, lt=1, description="the share of them that must be successes")] = 0.5

    def __post_init__(self) -> None:
        if self.needed > self.score_draws:
            enough = next(m for m in range(self.score_draws, 10**9) if wilson(m, m).low >= self.score_share)
            raise SegproxError(
                f"score_draws={self.score_draws} cannot show that a share of {self.score_share:g} of the draws are "
                f"successes: it takes at least {enough}"
            )

    @property
    def needed(self) -> int:
        """How many of the m draws must be successes for the whole 95 % interval of their share to be high enough."""
        m = self.score_draws
        return next((count for count in range(m + 1) if wilson(count, m).low >= self.score_share), m + 1)

    def most(self, forwards: int, backwards: int) -> tuple[int, int]:
        """The most that an attack costs which asks so often: each query may claim a success, which is then scored."""
        return forwards * (self.samples + self.score_draws) + self.score_draws, backwards * self.samples

    def check_limit(self, max_queries: int | None) -> None:
        """Refuse a limit within which no point could be queried and judged."""
        fewest = self.samples + self.score_draws
        if max_queries is not None and max_queries < fewest:
            raise SegproxError(
                f"max_queries={max_queries} is not enough for a query of {self.samples} draws and the "
                f"{self.score_draws} draws by which its point is judged: it takes {fewest}"
            )

    def reached(self, apsrs: Tensor) -> Tensor:
        """The APSR that the share of the draws reaches, of APSRs `[..., m]`; a success if as many draws are."""
        return _reached(apsrs, self.score_share)


def _reached(apsrs: Tensor, share: float) -> Tensor:
    """The largest value that at least this share of `apsrs` `[..., m]` reach, `[...]`."""
    rank = max(math.ceil(share * apsrs.shape[-1] - 1e-9), 1)
    return apsrs.sort(dim=-1, descending=True).values[..., rank - 1]


def make_sampling(samples: int | None, score_draws: int | None, score_share: float | None) -> Sampling | None:
    """What was asked for; None for a model that is not random."""
    given = {"score_draws": score_draws, "score_share": score_share}
    given = {name: value for name, value in given.items() if value is not None}
    if samples is None:
        if given:
            raise SegproxError(f"{', '.join(given)} cannot be given without samples, the draws of a query")
        return None
    return checked(Sampling, "a random model", samples=samples, **given)


def scoring_draws(model: Segmenter, image: Tensor, seed: int, sampling: Sampling | None) -> Iterator[Tensor]:
    """Logits `[1, K, H, W]` of an image `[1, C, H, W]` in full precision, of each draw by which it is judged.

    The draws come from `seed`, that of the clean image (see `Problem.seeds`), so whoever scores sees the same ones,
    and no search has seen them. A model that is not random is asked once.
    """
    for number in range(1 if sampling is None else sampling.score_draws):
        with (
            torch.no_grad(),
            nullcontext() if sampling is None else seeded(image.device, _derived(seed, "score", number)),
        ):
            logits = model.full_precision(image)
        yield logits


def _derived(seed: int, purpose: str, number: int) -> int:
    content = f"{seed} {purpose} {number}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class Draws:
    """Asks a random model on behalf of a tracker, one image and one draw at a time.

    Images are never evaluated together: a batch would share its random numbers. Draw number k of an image has a seed
    made of the problem's seed, the image and k, so neither the batch nor the order of images changes what is found.
    """

    def __init__(self, problem: Problem, sampling: Sampling, max_queries: int | None) -> None:
        sampling.check_limit(max_queries)
        self.problem, self.sampling = problem, sampling
        self.apsr = torch.zeros(len(problem), dtype=finest(problem.images.device), device=problem.images.device)
        self._seeds = problem.seeds()
        self._drawn = [0] * len(problem)  # draws of each image so far

    def mean(self, model: Callable[[Tensor], Tensor], image: Tensor, i: int) -> Tensor:
        """The mean logits `[1, K, H, W]` of n draws of image i, `[1, C, H, W]`; `apsr[i]` is what they reach.

        Its gradient is the mean of the draws' gradients. Of several draws only the logits are held: each is computed
        again in the backward, so the memory is that of one.
        """
        problem, count = self.problem.select([i]), self.sampling.samples
        each, apsrs = [], []
        for _ in range(count):
            draw = self._next(model, i)
            again = count > 1 and torch.is_grad_enabled()
            logits = checkpoint(draw, image, use_reentrant=False, preserve_rng_state=False) if again else draw(image)
            each.append(logits)
            apsrs.append(problem.apsr(logits.detach()))
        self.apsr[i] = self.sampling.reached(torch.cat(apsrs))
        return each[0] if count == 1 else torch.stack(each).mean(0)

    def _next(self, model: Callable[[Tensor], Tensor], i: int) -> Callable[[Tensor], Tensor]:
        """The next draw of image i: the model as a function that always answers the same."""
        seed = _derived(self._seeds[i], "query", self._drawn[i])
        self._drawn[i] += 1

        def draw(image: Tensor) -> Tensor:
            with seeded(image.device, seed):
                return model(image)

        return draw

    @torch.no_grad()
    def verify(self, model: Segmenter, points: Tensor, apsr: Tensor, chosen: Tensor) -> Tensor:
        """Put what the chosen points `[B, C, H, W]` reach in draws of their own into `apsr` `[B]`; draws of each `[B]`.

        A success needs so many successful draws that chance is an unlikely reason. It ends as soon as it is decided.
        """
        needed, m = self.sampling.needed, self.sampling.score_draws
        spent = torch.zeros_like(chosen, dtype=torch.long)
        for i in chosen.nonzero().flatten().tolist():
            problem, good, found = self.problem.select([i]), 0, list[Tensor]()
            while good < needed and len(found) - good <= m - needed:
                found.append(problem.apsr(self._next(model.full_precision, i)(points[i : i + 1])))
                good += int(problem.succeeded(found[-1]))
            apsr[i], spent[i] = _reached(torch.cat(found), needed / m), len(found)
        return spent

    def score(self, model: Segmenter, images: Tensor) -> Tensor:
        """The APSR of each draw by which images `[B, C, H, W]` are judged in the end, `[B, m]`."""
        each = []
        for i, seed in enumerate(self._seeds):
            problem, draws = self.problem.select([i]), scoring_draws(model, images[i : i + 1], seed, self.sampling)
            each.append(torch.cat([problem.apsr(logits) for logits in draws]))
        return torch.stack(each)
