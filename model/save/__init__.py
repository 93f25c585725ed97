"""Write checkpoints for transformers and serving engines from partitioned parameters; start at ``export_model.py``."""

from model.save.export_model import ExportReport, check_plan, export_model
from model.save.finish import is_router
from model.save.gguf_file import GGUF_FILE, GGUFNames, interleaved, open_gguf, split
from model.save.loadable import fused_there, is_expert, not_loaded
from model.save.mlx import mlx_module
from model.save.plan import mlx_place
from model.save.save_quantized import save_quantized

__all__ = [
    "GGUF_FILE",
    "ExportReport",
    "GGUFNames",
    "check_plan",
    "export_model",
    "fused_there",
    "interleaved",
    "is_expert",
    "is_router",
    "mlx_module",
    "mlx_place",
    "not_loaded",
    "open_gguf",
    "save_quantized",
    "split",
]
