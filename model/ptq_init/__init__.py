"""Initialize codes from samples, one decoder layer at a time: by GPTQ, and optionally by training GPTQ's codes."""

from model.ptq_init.gptq import quantized_together
from model.ptq_init.samples import decoder_layers
from model.ptq_init.start import choose_initial_codes

__all__ = ["choose_initial_codes", "decoder_layers", "quantized_together"]
