"""Metrics, tables and pictures."""

from segprox.report.metrics import mean_iou, worst_case_miou

__all__ = ["mean_iou", "worst_case_miou"]
