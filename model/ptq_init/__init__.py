"""Initialize codes from samples, one decoder layer at a time: by GPTQ, and optionally by training GPTQ's codes."""

from model.ptq_init.initial_codes import choose_initial_codes
from model.ptq_init.layer_samples import decoder_layers
from model.ptq_init.layerwise import quantized_together

__all__ = ["choose_initial_codes", "decoder_layers", "quantized_together"]
