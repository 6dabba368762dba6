"""Metrics, tables and pictures."""

from segprox.report.metrics import mean_class_accuracy, mean_image_iou, mean_iou, pixel_accuracy, worst_case_miou

__all__ = ["mean_class_accuracy", "mean_image_iou", "mean_iou", "pixel_accuracy", "worst_case_miou"]
