"""Read text and chat files into masked samples and batches.

`chat` and `text` make samples, and `loader` makes the micro-batches of a step or an evaluation. `jsonl` parses lines,
and `answers` locates assistant turns in rendered chat templates. Imports neither DeepSpeed nor the other packages.
Results are the same on every rank. An invalid file raises `files.DataError`, which the caller reports to all ranks.
"""
