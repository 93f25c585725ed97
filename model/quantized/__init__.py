"""Read quantized checkpoints as a start: decoded weights, and their scales.

``quantization_config.py`` tells which can be read, ``linears.py`` finds the tensors of each Linear, ``tensor.py``
decodes ranges of one, ``checkpoint.py`` adds them to the tensors of a checkpoint for the readers of plain weights, and
``scales.py`` loads the scales.
"""
