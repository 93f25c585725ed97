"""GGUF files as llama.cpp's converter makes them of the tiny checkpoints: what an export takes as its template."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from tests.lib.gguf_files import architecture_of, metadata, tensors


def gguf_template(source: Path, path: Path, *, without: str = "", **values: float) -> Path:
    """Write the template of a checkpoint: metadata, vocabulary, and tensors of zeros.

    ``without``: a tensor or an entry of the metadata that is left out. ``values``: metadata, without the architecture
    before them and with ``__`` for the point, instead of the right ones.
    """
    gguf = pytest.importorskip("gguf")
    config, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    architecture, right = architecture_of(config), metadata(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("template")
    writer.add_uint32("general.file_type", 32)
    for key, value in (right | {key.replace("__", "."): value for key, value in values.items()}).items():
        if key == without:
            continue
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[
            type(value)
        ]
        add(f"{architecture}.{key}", value)
    vocabulary = tokenizer.get_vocab()
    by_id = {index: token for token, index in vocabulary.items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1 if index in by_id else 5 for index in range(config.vocab_size)])
    writer.add_token_merges(["a b"])
    for name, tensor in tensors(source).items():
        if name != without:
            copied = name == "rope_freqs.weight"
            writer.add_tensor(name, tensor.numpy() if copied else np.zeros(tensor.shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
