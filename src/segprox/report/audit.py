"""An audit: a minimal and a fixed-epsilon attack on the same images, and where one missed what the other found."""

from typing import Any

from segprox.errors import SegproxError
from segprox.report.agreement import Finding, agreements
from segprox.report.evaluation import Results, SummaryTable
from segprox.report.groups import group_runs


class Audit(SummaryTable):
    """What two attacks found on the same images, as a table: text where it is printed, HTML in a notebook.

    Args:
        results: a run of a minimal attack and one of a fixed-epsilon attack, on one model and dataset with one goal and
            in one norm, as `segprox.audit` makes them or `segprox.load_results` reads them.

    Example:
        >>> import segprox
        >>> results = segprox.evaluate("demo-standard", "demo", "fmn", limit=2, steps=20, progress=False)
        >>> fixed = segprox.evaluate("demo-standard", "demo", "fgsm", limit=2, epsilon="64/255", progress=False)
        >>> audit = segprox.Audit(segprox.Results([*results, *fixed]))
        >>> [finding.too_weak for finding in audit.findings]
        ['fixed', 'fixed']
    """

    def __init__(self, results: Results) -> None:
        pairs = list(agreements(group_runs(results.runs)))
        if len(pairs) != 1 or len(results) != 2:
            titles = "; ".join(run.run.title for run in results) or "none"
            raise SegproxError(
                "an audit needs two runs, a minimal and a fixed-epsilon attack in one norm on the same model, dataset "
                f"and goal, but there are: {titles}"
            )
        self.results = results
        self.agreement = pairs[0]
        super().__init__([self.agreement.table()])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One for each image that both have tried, by name."""
        return self.agreement.findings

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        return self.agreement.sentence

    def rows(self) -> list[dict[str, Any]]:
        """A row for each image, as plain data; sizes are in units of the image's range, [0, 1]."""
        names = {"minimal": self.agreement.minimal, "fixed": self.agreement.fixed}
        return [
            {
                **names, "image": found.image, "epsilon": found.epsilon, "norm": found.norm, "apsr": found.apsr,
                "broken_by": [*found.broken_by], "too_weak": found.too_weak, "robust": found.robust,
                "masked": found.masked, "errors": found.errors,
            }
            for found in self.findings
        ]  # fmt: skip
