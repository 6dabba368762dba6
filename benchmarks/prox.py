"""The paper's comparison of solvers for the proximity operator (Figure 2), and the size of a Cityscapes image.

    python benchmarks/prox.py            # some minutes
    python benchmarks/prox.py --quick    # a minute

d = 2^18, x uniform in [0, 1], delta normal with standard deviation sigma, lambda = 10^U(-1, 3). For each sigma: the
average time of each solver in milliseconds, ternary's time over exact's, and the objective relative to that of the
ternary search. All solvers see the same points, one after the other, in the same run with the same number of threads.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from segprox.prox import SOLVERS, SolverName, prox_linf_box, prox_workspace

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
STYLE = {"exact": "C3", "ternary": "C0", "dfb": "C1", "adfb": "C2", "dr": "C4"}


def random_case(generator: torch.Generator, shape: tuple[int, ...], sigma: float, with_metric: bool) -> Case:
    x = torch.rand(1, *shape, generator=generator)
    point = sigma * torch.randn(1, *shape, generator=generator)
    step = 10 ** (4 * torch.rand(1, generator=generator) - 1)
    metric = 10 ** (2 * torch.rand(1, *shape, generator=generator) - 1) if with_metric else None
    return point, step, -x, 1 - x, metric


def objective(result: Tensor, case: Case) -> float:
    point, step, _, _, metric = (part if part is None else part.double() for part in case)
    square = (result.double() - point) ** 2
    return float(0.5 * (square if metric is None else metric * square).sum() + step * result.abs().max())


def compare(cases: Iterator[Case], solvers: tuple[SolverName, ...]) -> dict[str, tuple[float, float, float]]:
    """Average milliseconds, average and largest objective relative to ternary, of each solver."""
    times: dict[str, list[float]] = {solver: [] for solver in solvers}
    values: dict[str, list[float]] = {solver: [] for solver in solvers}
    for case in cases:
        workspace, out = prox_workspace(case[0]), torch.empty_like(case[0])
        for solver in solvers:
            fast = solver in ("exact", "ternary")  # these need warming up
            for timed in (False, True) if fast else (True,):
                start = time.perf_counter()
                prox_linf_box(*case, solver, out=out, workspace=workspace)
                if timed:
                    times[solver].append(time.perf_counter() - start)
            values[solver].append(objective(out, case))
    ratios = {solver: [v / t for v, t in zip(values[solver], values["ternary"])] for solver in solvers}
    return {solver: (1e3 * mean(times[solver]), mean(ratios[solver]), max(ratios[solver])) for solver in solvers}


def table(title: str, rows: dict[str, dict[str, tuple[float, float, float]]]) -> Table:
    solvers = list(next(iter(rows.values())))
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for solver in solvers:
        result.add_column(f"{solver}\nms", justify="right")
    result.add_column("ternary\n/ exact", justify="right")
    for solver in solvers:
        if solver != "ternary":
            result.add_column(f"{solver}\nobjective", justify="right")
    for name, row in rows.items():
        cells = [f"{row[solver][0]:.2f}" for solver in solvers]
        objectives = [f"{row[solver][1] - 1:+.1e}" for solver in solvers if solver != "ternary"]
        result.add_row(name, *cells, f"{row['ternary'][0] / row['exact'][0]:.1f}", *objectives)
    worst = max(row["exact"][2] for row in rows.values())
    result.caption = (
        f"objective: average relative to ternary, minus 1; exact at most {worst - 1:+.1e} in any single case"
    )
    return result


def draw(rows: dict[float, dict[str, tuple[float, float, float]]], path: Path) -> None:
    figure = Figure(figsize=(10, 3.8), dpi=110, layout="constrained")
    times, objectives = figure.subplots(1, 2)
    for solver in SOLVERS:
        sigmas = list(rows)
        times.loglog(sigmas, [rows[s][solver][0] for s in sigmas], "o-", color=STYLE[solver], label=solver)
        if solver != "exact":
            excess = [rows[s][solver][1] - rows[s]["exact"][1] for s in sigmas]
            objectives.loglog(sigmas, excess, "o-", color=STYLE[solver], label=solver)
    times.set(xlabel="sigma", ylabel="average time [ms]", title="time")
    objectives.set(xlabel="sigma", ylabel="relative", title="objective above that of exact, the optimum")
    times.legend(loc="upper left", ncols=2)
    for axes in (times, objectives):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--large-repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer sigmas and repeats")
    parser.add_argument("--figure", type=Path, help="write the figure here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats, large_repeats = (4, 2) if options.quick else (options.repeats, options.large_repeats)
    sigmas = [1e-3, 3e-2, 1.0] if options.quick else [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
    console, generator = Console(width=140), torch.Generator().manual_seed(0)

    def cases(shape: tuple[int, ...], sigma: float, count: int, with_metric: bool) -> Iterator[Case]:
        return (random_case(generator, shape, sigma, with_metric) for _ in range(count))

    compare(cases((2**18,), sigmas[0], 8, False), ("exact", "ternary"))  # the process's first calls are slower
    rows = {sigma: compare(cases((2**18,), sigma, repeats, False), SOLVERS) for sigma in sigmas}
    console.print(table(f"d = 2^18, {repeats} repeats", {f"sigma {sigma:g}": row for sigma, row in rows.items()}))
    if options.figure:
        draw(rows, options.figure)
    large = {
        f"sigma {sigma:g}{', metric' if with_metric else ''}": compare(
            cases((3, 1024, 2048), sigma, large_repeats, with_metric), ("exact", "ternary")
        )
        for with_metric in (False, True)
        for sigma in (1e-3, 3e-2, 1.0)
    }
    console.print(table(f"3 x 1024 x 2048, {large_repeats} repeats", large))


if __name__ == "__main__":
    main()
