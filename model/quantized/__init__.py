"""Quantized checkpoints as a start: the weights that their codes stand for, and their scales.

``config.py`` says what can be read, ``compressed_tensors.py`` which tensors of a file are a Linear's, ``tensor.py``
decodes ranges of one, ``checkpoint.py`` puts them into the list of what a checkpoint holds, where the readers of plain
weights find them, and ``scales.py`` takes the scales.
"""
