"""What the records of a run say as functions: of what an attacker may change, and of what an attack may cost."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from segprox.report.metrics import Measure
from segprox.report.results import RunResults, Sizes
from segprox.sizes import median_sizes


class Curve(NamedTuple):
    """A step function: `y[i]` from `x[i]`, inclusive, up to the next; `x[0]` is 0."""

    x: Sizes
    y: Sizes

    def at(self, x: float) -> float:
        """Its value at `x >= 0`."""
        return float(self.y[np.searchsorted(self.x, x, side="right") - 1])


def unbroken_curve(result: RunResults) -> Curve:
    """The share of images that are not broken with a norm of at most x, exact at every x."""
    if not result.records:
        return Curve(np.zeros(1), np.full(1, np.nan))
    return share_above(result.norms[result.success], len(result.records))


def share_above(norms: Sizes, count: int) -> Curve:
    """The share of so many images that is left at x, where those with a norm break when x reaches it."""
    x = np.unique(np.append(0.0, norms))
    return Curve(x, 1 - np.searchsorted(np.sort(norms), x, side="right") / count)


def measure_curve(result: RunResults, measure: Measure) -> Curve:
    """What is left of a model's quality if perturbations may be as large as epsilon, exact at every epsilon.

    An attacker has every perturbation that was found and is no larger, whether or not it counts as a success; all other
    images stay as they were. The measure may be any function of pooled counts.
    """
    if not result.records:
        return Curve(np.zeros(1), np.full(1, np.nan))
    clean, attacked = np.stack(result.counts(clean=True)), np.stack(result.counts())  # [3, images, classes]
    order = np.argsort(result.sizes, kind="stable")
    sizes = result.sizes[order]
    start = clean.sum(1, keepdims=True)
    states = np.concatenate([start, start + np.cumsum((attacked - clean)[:, order], axis=1)], axis=1)  # after 0, 1, ...
    x = np.unique(np.append(0.0, sizes))
    after = np.searchsorted(sizes, x, side="right")
    return Curve(x, np.array([measure(*states[:, [k]]) for k in after]))


def epsilon_curve(runs: Sequence[RunResults], measure: Measure) -> Curve:
    """What a fixed-epsilon attack leaves of a model's quality at 0 and at each epsilon of its runs, which grow.

    Between these points nothing is known: it is drawn with straight lines, as the field does.
    """
    left = [measure(*runs[0].counts(clean=True)), *(measure(*run.counts()) for run in runs)]
    return Curve(np.array([0.0, *(run.epsilon or 0.0 for run in runs)]), np.array(left))


def anytime_curve(result: RunResults) -> Curve | None:
    """The median over images of the norm that the attack has after x queries, up to where its last image ends.

    None if that was not recorded. Images that are not broken yet count as those that never are.
    """
    of = result.columns
    if not len(result.records) or not of["traced"].all():
        return None
    traces = np.split(of["trace"], of["trace_ends"][:-1])  # each `[steps, 2]`
    known = [trace if success else trace[:0] for trace, success in zip(traces, result.success)]
    end = max(1, (of["forwards"] + of["backwards"]).max())
    x = np.unique(np.concatenate([[0, end], *(trace[:, 0] for trace in known)]))
    norms = np.empty((len(known), len(x)))
    for own, trace in zip(norms, known):
        reached = np.searchsorted(trace[:, 0], x, side="right")
        own[:] = np.append(result.unit.unbroken, trace[:, 1])[reached]
    return Curve(x, median_sizes(norms))
