"""From images to records."""

from segprox.run.audit import Finding, audit_sample
from segprox.run.check import Check, check_model

__all__ = ["Check", "Finding", "audit_sample", "check_model"]
