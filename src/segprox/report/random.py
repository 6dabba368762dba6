"""What reports say of models that answer at random: when an image of theirs is broken, and in how many draws."""

from collections.abc import Iterator, Sequence

import numpy as np

from segprox.report.groups import Group
from segprox.report.results import RunResults
from segprox.report.tables import Column, Table, Value
from segprox.run.record import share_interval


def draws_text(result: RunResults, share: float) -> str | None:
    """In how many of its draws a random model is broken, with the 95 % interval of the share; None of another model."""
    sampling = result.run.settings.sampling
    if sampling is None:
        return None
    m = sampling.score_draws
    low, high = share_interval(share, m)
    return f"{round(share * m)} of {m} ({low:.0%} to {high:.0%})"


def random_sentences(groups: Sequence[Group]) -> Iterator[str]:
    """What broken means where models answer at random."""
    runs = [(group.model, run.run.settings.sampling) for group in groups for run in group.runs.values()]
    kinds = {(model, s.score_draws, s.score_share) for model, s in runs if s is not None}
    for model, m, share in sorted(kinds):
        means = f"an image counts as broken if at least {share:.0%} of {m} draws, which no search has seen"
        yield f"{model} is taken to answer at random: {means}, are successes."


def random_table(groups: Sequence[Group]) -> Table:
    """By which share of draws the images of random models are broken."""
    rows: list[tuple[Value, ...]] = []
    for group in groups:
        for label, run in group.attacked.items():
            if (sampling := run.run.settings.sampling) is None:
                continue
            shares = run.columns["found.share"]
            broken, mean = shares[run.success], float(shares.mean())
            typical = [float(value) for value in np.quantile(broken, [0.5, 0])] if len(broken) else [None, None]
            rows.append((
                *group.names, label, len(shares), len(run.errors), sampling.samples, sampling.score_draws,
                sampling.score_share, len(broken), mean, *typical,
            ))  # fmt: skip
    columns = (
        Column("model"), Column("dataset"), Column("goal"), Column("attack"), Column("images", "d"),
        Column("errors", "d"), Column("samples", "d"), Column("draws", "d"), Column("at least", ".0%"),
        Column("broken", "d"), Column("broken draws", ".1%", "max"), Column("of broken images", ".1%"),
        Column("least", ".1%"),
    )  # fmt: skip
    notes = (
        "samples: draws of a query, averaged. An image is broken if at least that share of the draws by which it is "
        "judged are successes.",
        "broken draws: their share, mean over all images; of broken images: median, and least. Accuracies and IoUs "
        "of such models, in all tables, are over all draws.",
    )
    return Table("random", "Random models, draw by draw", columns, tuple(rows), notes, keys=3)
