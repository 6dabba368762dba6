"""Proximity operators: of `lambda * ||.||_inf` plus the indicator of a box, in a diagonal metric; and of norms."""

from segprox.prox.norms import prox_norm
from segprox.prox.operator import SOLVERS, Prox, SolverName, prox_linf_box, prox_workspace

__all__ = ["SOLVERS", "Prox", "SolverName", "prox_linf_box", "prox_norm", "prox_workspace"]
