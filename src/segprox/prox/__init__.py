"""The proximity operator of `lambda * ||.||_inf` plus the indicator of a box, in a diagonal metric."""

from segprox.prox.operator import SOLVERS, Prox, SolverName, prox_linf_box, prox_workspace

__all__ = ["SOLVERS", "Prox", "SolverName", "prox_linf_box", "prox_workspace"]
