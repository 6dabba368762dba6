"""From images to records."""

from segprox.run.check import Check, check_model

__all__ = ["Check", "check_model"]
