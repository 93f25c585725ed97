"""Start from quantized checkpoints: read decoded weights, and their scales.

``quantization_config.py`` decides which checkpoints can be read, ``linears.py`` finds the tensors of each Linear,
``tensor.py`` decodes ranges of a Linear's weight, ``checkpoint.py`` adds decoded weights to the tensors of a checkpoint
for the readers of plain weights, and ``scales.py`` loads the scales.
"""
