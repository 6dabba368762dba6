"""From samples to outcomes."""

from segprox.run.audit import Finding, audit_sample
from segprox.run.check import Check, check_model
from segprox.run.outcome import Outcome, attack_sample

__all__ = ["Check", "Finding", "Outcome", "attack_sample", "audit_sample", "check_model"]
