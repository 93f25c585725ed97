"""Text to batches: files to masked samples (`chat`, `text`), samples to the micro-batches of a step (`loader`) and of
an evaluation (`held_out`).

`jsonl` reads lines, `template` finds the assistant's turns in what a chat template writes, `order` says which samples
stand in which row of an epoch, `packing` which share one.

Imports neither DeepSpeed nor the other folders: every function here gives the same result on every rank, and what it
finds wrong in a file is a `samples.DataError`, which the caller makes known to all ranks.
"""
