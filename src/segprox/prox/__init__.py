"""The proximity operator of `lambda * ||.||_inf` plus the indicator of a box, in a diagonal metric."""

from segprox.prox.ternary import prox_linf_box

__all__ = ["prox_linf_box"]
