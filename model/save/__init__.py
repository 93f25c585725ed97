"""Checkpoints for transformers and serving engines, written from the partitions; ``export.py`` says how."""

from model.save.export import ExportReport, check_plan, export_model
from model.save.finish import is_router
from model.save.loadable import fused_there, is_expert, not_loaded

__all__ = ["ExportReport", "check_plan", "export_model", "fused_there", "is_expert", "is_router", "not_loaded"]
