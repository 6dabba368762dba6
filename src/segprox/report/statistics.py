"""What the records of runs say, as numbers: no model, no randomness but a seeded bootstrap.

Norms are those that the attacks minimise. An attack that did not succeed counts as 1 (255/255) in linf, as in the
paper, and as infinite in all others. The median is the smallest size that breaks at least half of the images. Images
that could not be attacked at all (errors) are counted but enter nothing else. What nothing is known of is NaN.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, nan

import numpy as np

from segprox.report.metrics import Measure, mean_iou, pixel_accuracy
from segprox.report.results import Image, RunResults
from segprox.report.results import Sizes as Values
from segprox.sizes import Interval, median_interval, median_size

RESAMPLES = 1000
SIGNIFICANT = 0.05  # a p-value below it


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in numbers; medians are over images."""

    images: int  # attacked
    errors: int  # not attacked
    broken: int
    median: float  # of norms
    interval: Interval  # of the median, 95 %
    mean: float
    l2: float  # median, infinite where not broken
    l1: float
    apsr: float  # median
    forwards: float  # median
    backwards: float
    seconds: float
    total_seconds: float
    accuracy: float  # of pixels, before the attack
    attacked_accuracy: float  # at what the attack found, broken or not
    miou: float  # pooled over images
    attacked_miou: float
    rounded_broken: float  # by the image in 8 bits, or as files hold it; NaN where these hold floats
    rounded_median: float
    rounded_mean: float
    reached_apsr: float  # on the images that were not broken: medians
    reached_size: float
    reached_accuracy: float

    @property
    def success_rate(self) -> float:
        """The share of attacked images that were broken."""
        return self.broken / self.images if self.images else nan

    @property
    def rounded_rate(self) -> float:
        """The share that is still broken when rounded."""
        return self.rounded_broken / self.images if self.images else nan


def summarise(result: RunResults) -> Summary:
    """All numbers of a run."""
    of, broken = result.columns, result.success
    unknown = nan if np.isnan(of["rounded.success"]).any() else 0.0  # NaN spreads: floats are not rounded
    rounded = of["rounded.success"] == 1
    coarse_sizes = of.get(f"rounded.{result.unit.norm}", np.full(len(broken), nan))  # scores do not have every norm
    coarse = np.where(rounded, coarse_sizes, result.unit.unbroken)
    sizes = of.get(f"found.{result.unit.norm}", of["norm"])
    return Summary(
        images=len(broken),
        errors=len(result.errors),
        broken=int(broken.sum()),
        median=median_size(result.norms),
        interval=median_interval(result.norms),
        mean=_mean(result.norms),
        l2=median_size(np.where(broken, of["found.l2"], np.inf)),
        l1=median_size(np.where(broken, of["found.l1"], np.inf)),
        apsr=_median(of["found.apsr"]),
        forwards=_median(of["forwards"]),
        backwards=_median(of["backwards"]),
        seconds=_median(of["seconds"]),
        total_seconds=sum(of["seconds"].tolist()),
        accuracy=_pooled(result, pixel_accuracy, clean=True),
        attacked_accuracy=_pooled(result, pixel_accuracy),
        miou=_pooled(result, mean_iou, clean=True),
        attacked_miou=_pooled(result, mean_iou),
        rounded_broken=int(rounded.sum()) + unknown,
        rounded_median=median_size(coarse) + unknown,
        rounded_mean=_mean(coarse) + unknown,
        reached_apsr=_median(of["found.apsr"][~broken]),
        reached_size=_median(sizes[~broken]),
        reached_accuracy=_median(of["accuracy"][~broken]),
    )


def bootstrap_median(values: Values, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95) -> Interval:
    """A percentile interval of the median: of medians of as many values, drawn with replacement.

    Example:
        >>> import numpy as np
        >>> bootstrap_median(np.array([2.0, 2.0, 2.0]))
        Interval(low=2.0, high=2.0)
    """
    if not len(values):
        return Interval(nan, nan)
    generator = np.random.default_rng(seed)
    with np.errstate(invalid="ignore"):  # halfway between minus and plus infinity nothing is known
        medians = np.median(generator.choice(values, (resamples, len(values))), axis=1)
    # One of the medians, not a mean of two, of which one may be infinite.
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2], method="closest_observation")
    return Interval(float(low), float(high))


def common_norms(results: Sequence[RunResults]) -> Values:
    """Norms on the images that all runs have, `[runs, images]`: images are the same if their pixels are."""
    return _common([result.by_image for result in results])


def _common(tables: Sequence[Mapping[Image, float]]) -> Values:
    shared = [key for key in tables[0] if all(key in table for table in tables)] if tables else []
    return np.array([[table[key] for key in shared] for table in tables], dtype=np.float64).reshape(len(tables), -1)


def optimality(norms: Values, unbroken: float = 1.0) -> Values:
    """How near each attack comes to the best that any of them found, in [0, 1]; 1 is best everywhere.

    As in AttackBench: the best attack is the (imaginary) one that finds for every image the smallest norm that any
    attack found. Let e be the norm at which it has broken all that it breaks. The area between an attack's curve of
    unbroken images and the best one's, from norm 0 to e, is divided by the area between the best one's curve and that
    of an attack that breaks nothing; optimality is 1 minus this:

        sum over images of (e - min(norm, e))  /  sum over images of (e - best norm),  best norm <= e

    Images that no attack broke play no part. If the best norms are all equal both areas are empty; the ratio's limit is
    then the share of images on which the attack is as good as the best. If nothing was broken it is NaN.

    Args:
        norms: `[attacks, images]`, the same images for all.
        unbroken: the norm where an attack did not succeed.

    Example:
        >>> import numpy as np
        >>> optimality(np.array([[0.01, 0.02, 0.04], [0.01, 0.03, 1.0]])).round(3).tolist()
        [1.0, 0.8]
    """
    best = norms.min(0, initial=unbroken)
    norms, best = norms[:, best < unbroken], best[best < unbroken]
    if not len(best):
        return np.full(len(norms), nan)
    end = best.max()
    area = fsum(end - best)
    if area == 0:
        return np.array([(own <= best).mean() for own in norms])
    return np.array([fsum(end - np.minimum(own, end)) / area for own in norms])  # fsum: not above 1 by rounding


def head_to_head(norms: Values) -> Values:
    """The share of images on which one attack's norm is smaller than another's, `[attacks, attacks]`; ties are half.

    Args:
        norms: `[attacks, images]`, the same images for all.

    Example:
        >>> import numpy as np
        >>> head_to_head(np.array([[1.0, 2.0], [2.0, 2.0]])).tolist()
        [[0.5, 0.75], [0.25, 0.5]]
    """
    if not norms.shape[1]:
        return np.full((len(norms), len(norms)), nan)
    return np.array([((norms > own).mean(1) + (norms >= own).mean(1)) / 2 for own in norms])


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two runs on the same images."""

    images: int  # that both have
    medians: tuple[float, float]  # of each, on these images
    ratio: float  # median over images of the second's value over the first's
    difference: float  # median of the second's value minus the first's
    interval: Interval  # of the difference, 95 %
    larger: int  # images with a larger value in the second
    smaller: int
    p_value: float  # of the sign test, two-sided: how likely so lopsided a result is by chance

    @property
    def equal(self) -> int:
        """Images with the same value in both."""
        return self.images - self.larger - self.smaller

    @property
    def differs(self) -> bool:
        """Whether the test tells the two apart."""
        return self.p_value < SIGNIFICANT


def compare_pair(first: RunResults, second: RunResults, seed: int = 0) -> Paired:
    """How the second run's norms differ from the first's, image by image; within an epsilon, the accuracy left."""
    fixed = first.epsilon is not None
    one, other = _common([result.accuracy_by_image if fixed else result.by_image for result in (first, second)])
    differences = np.subtract(other, one, out=np.zeros_like(one), where=one != other)  # not broken by either is equal
    with np.errstate(divide="ignore"):
        ratios = np.divide(other, one, out=np.ones_like(one), where=one != other)
    larger, smaller = int((differences > 0).sum()), int((differences < 0).sum())
    return Paired(
        images=len(differences),
        medians=(_median(one), _median(other)) if fixed else (median_size(one), median_size(other)),
        ratio=_median(ratios),
        difference=_median(differences),
        interval=bootstrap_median(differences, seed),
        larger=larger,
        smaller=smaller,
        p_value=sign_test(larger, smaller),
    )


def sign_test(larger: int, smaller: int) -> float:
    """The two-sided p-value that two counts come from tosses of a fair coin, exact.

    Example:
        >>> sign_test(5, 0), sign_test(3, 3)
        (0.0625, 1.0)
    """
    tosses = larger + smaller
    ways = tail = 1
    for k in range(min(larger, smaller)):
        ways = ways * (tosses - k) // (k + 1)  # comb(tosses, k + 1), without computing it from the start each time
        tail += ways
    return float(min(1.0, 2 * tail / 2**tosses))


def _pooled(result: RunResults, measure: Measure, clean: bool = False) -> float:
    return measure(*result.counts(clean)) if result.records else nan


def _median(values: Iterable[float]) -> float:
    known = np.fromiter(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return float(np.median(known)) if len(known) else nan


def _mean(values: Values) -> float:
    return float(values.mean()) if len(values) else nan
