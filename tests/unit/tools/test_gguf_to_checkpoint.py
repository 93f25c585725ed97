"""A GGUF file becomes a checkpoint with the same weights, tokens and logits, or is refused in one line."""

import random
import shutil
import struct
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from model.ranks import RankError
from model.save.gguf_file import GGUFNames
from quant import reference
from quant.linear import linears_of
from quant.spec import SCHEMES, Scheme
from tests.lib.checkpoints import edit_json, load_model, quantize, read_tensors
from tests.lib.gguf_files import OPENAI, PATTERNS, VARIANTS, checkpoint, tensors, tokenizer, write_gguf
from tools.gguf_to_checkpoint import convert_gguf
from tools.verify.check import OUR_FORWARD_KL
from tools.verify.engines import engine_logits, in_blocks, installed

gguf = pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")

# llama.cpp's quantizer of Q8_0 uses the codes -127 to 127.
NARROW = replace(SCHEMES["w8a16_g32"], weights=replace(SCHEMES["w8a16_g32"].weights, narrow=True))


def logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        return model.eval()(ids).logits


IDS = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_and_logits_are_those_of_the_original(variant: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", variant)
    file = write_gguf(source, tmp_path / "model.gguf")
    done = convert_gguf(file, tmp_path / "out")
    assert done.rounded == 0 and set(done.kinds) == {"F32"}
    expected, found = read_tensors(source), read_tensors(tmp_path / "out")
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        if key.endswith("A_log"):  # the logarithm of an exponential
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
        elif "norm" not in key or not variant.startswith(("gemma", "qwen3_5")):
            assert torch.equal(found[key], value), key
    torch.testing.assert_close(logits(tmp_path / "out", IDS), logits(source, IDS), rtol=1e-4, atol=1e-4)
    if installed():
        if variant == "gpt_oss":  # llama.cpp rounds the bounds of YaRN, unlike the published models
            edit_json(tmp_path / "out" / "config.json", rope_parameters=OPENAI | {"truncate": True})
        theirs = next(engine_logits(file, [IDS]))
        bound = 1e-2 if "gemma" in variant else 1e-4  # llama.cpp's GELU is a table in fp16
        assert (theirs - logits(tmp_path / "out", IDS)).abs().max() < bound * theirs.std()


def test_the_softcap_of_gemma_4_is_that_of_llama_cpp(tmp_path: Path) -> None:
    """It is 30 if the file has none; 0 is none."""
    source, file = checkpoint(tmp_path / "source", "gemma4_text"), tmp_path / "model.gguf"
    write_gguf(source, file, without=("gemma4.final_logit_softcapping",))
    convert_gguf(file, tmp_path / "default")
    convert_gguf(write_gguf(source, file, final_logit_softcapping=0.0), tmp_path / "none")
    assert AutoConfig.from_pretrained(tmp_path / "default").final_logit_softcapping == 30
    assert AutoConfig.from_pretrained(tmp_path / "none").final_logit_softcapping is None


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_quantized_tensors_are_dequantized_exactly(kind: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "gpt_oss" if kind == "MXFP4" else "qwen3")
    file = write_gguf(source, tmp_path / "model.gguf", kind)
    convert_gguf(file, tmp_path / "out", dtype=torch.float32)
    theirs = {
        t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(file).tensors
    }
    ours = tensors(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name].float().view(value.shape), value), name
    rounded = convert_gguf(file, tmp_path / "bf16").rounded
    assert rounded > 10 if kind.startswith("Q") else rounded == 0


def strings() -> list[str]:
    """Generated texts of digits, spaces, scripts, accents in two forms, contractions and special tokens."""
    pieces = ["12345", "7", " ", "   ", "\n", "\r\n\n", "\t", "it's", "WE'LL", "the", " quick", "naïve", "e\u0301"]
    pieces += ["日本", "١٢٣", "<|im_start|>", "<think>", "<|im_end|>", "🦙", "a_b", "...", "!?", "/", "'", "Ab"]
    pieces += ["x1y22z333", "\u00a0", "[PAD328]", "oneTwo", "ONEtwo", "THEY'LLgo", "?/\n", " don't", "x12345"]
    chosen = random.Random(0)
    return ["", *("".join(chosen.choices(pieces, k=chosen.randint(1, 12))) for _ in range(300))]


def tokenize_in_engine(file: Path) -> Callable[[str], list[int]]:
    """Return llama.cpp's function from a text to its tokens."""
    from cyllama.llama import llama_cpp

    model = llama_cpp.LlamaModel(str(file), llama_cpp.LlamaModelParams(), verbose=False)
    return lambda text: list(model.get_vocab().tokenize(text, True, True))


@pytest.mark.parametrize("pre", PATTERNS)
def test_tokens_and_chats_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "llama biases" if pre != "qwen2" else "qwen3", pre)
    file = write_gguf(source, tmp_path / "model.gguf", pre=pre)
    convert_gguf(file, tmp_path / "out")
    original, found = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(original) == len(found)
    engine = tokenize_in_engine(file) if installed() else None
    for text in strings():
        ids = tokenizer(pre)(text).input_ids
        assert original(text).input_ids == ids
        assert found(text).input_ids == ids, text
        # llama.cpp leaves out the normalization of Qwen's texts.
        if engine is not None and text and ("qwen" not in pre or unicodedata.is_normalized("NFC", text)):
            assert engine(text) == ids, text
        assert found.decode(ids) == original.decode(ids)
    chat = [{"role": "user", "content": "12 plus 30?"}]
    assert found.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)
    assert (found.bos_token, found.eos_token, found.pad_token) == (original.bos_token, "<|im_end|>", "<|endoftext|>")


def sentencepiece(variant: str) -> dict[str, Any]:
    """Metadata of a small SentencePiece tokenizer with a byte for each unknown character."""
    gemma = "gemma" in variant
    named = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    words = ["the", "▁the", "▁quick", "it", "'s", "▁▁▁▁", "12"]
    pieces = sorted(
        {word[:end] for word in words for end in range(2, len(word) + 1)}, key=lambda piece: (len(piece), piece)
    )
    pieces += sorted(set("".join(words)))
    special = [*named, "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    padding = [f"[PAD{index}]" for index in range(len(tokens), 330)]
    types = [2 if token == "<unk>" else 3 for token in special] + [6] * 256 + [1] * len(pieces) + [5] * len(padding)
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))] + [-1e3] * len(padding)
    values = {"model": "llama", "tokens": tokens + padding, "token_type": types, "scores": scores}
    values |= {"pre": None, "merges": None, "add_space_prefix": not gemma, "add_bos_token": True}
    values |= {f"{name}_token_id": at for name, at in (("bos", 2 if gemma else 1), ("eos", 1 if gemma else 2))}
    values |= {"unknown_token_id": tokens.index("<unk>")}
    if variant == "gemma4_text":
        splits = [(piece[:end], piece[end:]) for piece in pieces for end in range(1, len(piece))]
        merges = [" ".join(split) for split in splits if set(split) <= set(pieces)]
        values |= {"model": "gemma4", "merges": merges}
    return {f"tokenizer__ggml__{key}": value for key, value in values.items()}


@pytest.mark.parametrize("variant", ["mistral", "gemma3_text", "gemma4_text"])
def test_tokens_of_sentencepiece_are_those_of_llama_cpp(variant: str, tmp_path: Path) -> None:
    source, gemma = checkpoint(tmp_path / "source", variant), "gemma" in variant
    file = write_gguf(source, tmp_path / "model.gguf", **sentencepiece(variant))
    convert_gguf(file, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = ["<bos>", "▁▁", "<0x41>"] if gemma else ["<s>", "▁▁▁", "<0x41>"]
    assert found.convert_ids_to_tokens(found("  A").input_ids) == expected
    if installed():
        engine = tokenize_in_engine(file)
        for text in filter(None, strings()):
            assert found(text).input_ids == engine(text), text


REFUSED = [
    ({"attention__scale": 0.5}, "qwen3.attention.scale = 0.5"),
    ({"expert_count": 4}, "qwen3.expert_count = 4"),
    ({"attention__sliding_window": 16}, "qwen3.attention.sliding_window = 16"),
    ({"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "rope.scaling.type is 'longrope'"),
    ({"rope__dimension_count": 16}, "qwen3.rope.dimension_count is 16, but qwen3.attention.key_length is 32"),
    ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon is nan, expected one positive number"),
    ({"attention__head_count": [4, 4]}, r"qwen3.attention.head_count is \[4, 4\], expected one positive integer"),
    ({"attention__key_length": 2**30, "attention__value_length": 2**30}, "4 heads of 1073741824 .*attn_q.weight is"),
    ({"attention__head_count_kv": 2**31 - 1}, r"count_kv is 2147483647 heads of 32 .*attn_k.weight is \[64, 256\]"),
    ({"embedding_length": 2**31 - 1}, r"qwen3.embedding_length is 2147483647, but token_embd.weight is \[330, 256\]"),
    ({"feed_forward_length": 7}, r"qwen3.feed_forward_length is 7, but blk.0.ffn_gate.weight is \[512, 256\]"),
    ({"context_length": 0.5}, "qwen3.context_length is 0.5, expected one positive integer"),
    ({"rope__freq_base": 1.0}, "qwen3.rope.freq_base is 1.0, expected more than 1"),
    ({"tokenizer__ggml__pre": [1]}, r"tokenizer.ggml.pre is \[1\], expected one of gpt-2, "),
    ({"tokenizer__ggml__padding_token_id": 0.5}, "tokenizer.ggml.padding_token_id is 0.5, but there are 330 tokens"),
    ({"block_count": 3}, "qwen3.block_count is 3, but there are tensors for 2"),
    ({"vocab_size": 300}, "qwen3.vocab_size is 300, but the number of rows of token_embd.weight is 330"),
    ({"tokenizer__ggml__pre": "viking"}, "tokenizer.ggml.pre is 'viking', expected one of gpt-2, "),
    ({"tokenizer__ggml__model": "t5"}, "tokenizer.ggml.model is 't5'"),
    ({"tokenizer__ggml__precompiled_charsmap": "x"}, "tokenizer.ggml.precompiled_charsmap"),
    ({"tokenizer__ggml__merges": ["a b c"]}, "tokenizer.ggml.merges is missing, or"),
    ({"tokenizer__ggml__merges": ["zzz b"]}, "tokenizer.ggml.merges and tokens contradict each other"),
    ({"tokenizer__ggml__token_type": [1]}, "or not lists of one length"),
    ({"tokenizer__ggml__eos_token_id": 400}, "eos_token_id is 400, but there are 330 tokens"),
    ({"split__count": 2}, "one file of several"),
    ({"general__type": "adapter"}, "general.type is 'adapter'"),
    ({"without": ("blk.1.attn_k.weight",)}, "lacks blk.1.attn_k.weight"),
    ({"without": ("qwen3.feed_forward_length",)}, "metadata lacks qwen3.feed_forward_length"),
    ({"without": ("qwen3.embedding_length",)}, "metadata lacks qwen3.embedding_length"),
]  # fmt: skip


def assert_refused(file: Path, message: str) -> str:
    """Check that a file is refused in one line, and that nothing is written; return the line."""
    with pytest.raises((ValueError, RankError), match=message) as caught:
        convert_gguf(file, file.parent / "out")
    assert "\n" not in str(caught.value)
    assert not list(file.parent.glob("out*"))
    return str(caught.value)


def test_what_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "qwen3")
    for changes, message in REFUSED:
        file = write_gguf(source, tmp_path / "model.gguf", **changes)
        assert_refused(file, message)


REFUSED_BY_LAYER = [
    ("lfm2", {"attention__head_count_kv": [0, 2, 2]}, r"_kv is \[0, 2, 2\], expected a value for each of 2 layers"),
    ("lfm2", {"attention__head_count_kv": [0.0, 2.5]}, "_kv is 2.5, expected one positive integer"),
    ("lfm2_moe", {"expert_gating_func": 1}, "lfm2moe.expert_gating_func is 1, expected 2"),
    ("lfm2_moe", {"leading_dense_block_count": 2}, "lacks blk.1.ffn_gate.weight"),
    ("lfm2_moe", {"expert_feed_forward_length": 2**31 - 1}, r"but blk.1.ffn_gate_exps.weight is \[5, 256, 256\]"),
    ("lfm2_moe", {"without": ("blk.2.exp_probs_b.bias",)}, "lacks blk.2.exp_probs_b.bias"),
    ("gemma4_text", {"attention__head_count_kv": [2, 2, 2, 1]}, r"_kv is \[2, 2, 2, 1\], expected \[2, 2, 2, 2\]"),
    (
        "gemma4_text",
        {"feed_forward_length": [512, 512, 512, 7]},
        r"length is \[512, 512, 512, 7\], expected \[512, 512,",
    ),
    ("gemma4_text", {"attention__shared_kv_layers": 1}, "feed_forward_length is .*, expected"),
    ("gemma4_text", {"without": ("rope_freqs.weight",)}, "it lacks rope_freqs.weight"),
    ("gemma4_text", {"expert_count": 4}, "metadata lacks gemma4.expert_used_count, gemma4.expert_feed"),
    ("gemma4_text experts", {"expert_feed_forward_length": 64}, r"gate_up_exps.weight is .*, expected \[5, 128, 256\]"),
    ("gemma4_text experts", {"without": ("blk.1.ffn_down_exps.scale",)}, "lacks blk.1.ffn_down_exps.scale"),
    ("qwen3_5_text", {"ssm__group_count": 4}, "ssm_conv1d.weight is .*, expected rows of 4, 4 and 6 heads of 32"),
    ("qwen3_5_text", {"ssm__inner_size": 7}, "qwen35.ssm.inner_size is 7, expected 192"),
    ("qwen3_5_text", {"nextn_predict_layers": 1}, "qwen35.nextn_predict_layers = 1"),
    ("qwen3_5_moe_text", {"expert_shared_feed_forward_length": 2**31 - 1}, r"but blk.0.ffn_gate_shexp.weight is \[128"),
    ("qwen3_5_moe_text", {"without": ("blk.1.ffn_gate_inp_shexp.weight",)}, "lacks blk.1.ffn_gate_inp_shexp.weight"),
]


@pytest.mark.parametrize(("variant", "changes", "message"), REFUSED_BY_LAYER)
def test_values_of_layers_that_contradict_are_refused(
    variant: str, changes: dict, message: str, tmp_path: Path
) -> None:
    file = write_gguf(checkpoint(tmp_path / "source", variant), tmp_path / "model.gguf", **changes)
    assert_refused(file, message)


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "qwen3")
    file = write_gguf(source, tmp_path / "model.gguf", "Q8_0")
    good = file.read_bytes()
    reader = gguf.GGUFReader(file)
    scale = next(t.data_offset for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    name = good.index(b"blk.1.attn_q.weight")
    for data, message in (
        (good[: len(good) // 2], "is not a GGUF file"),
        (good[:-40], "is not a GGUF file"),
        (good[:scale] + b"\x00\x7e" + good[scale + 2 :], "blk.1.ffn_up.weight holds NaN"),
        (good[: name + 4] + b"9" + good[name + 5 :], r"block_count|blk\.9|lacks"),
        (b"", "is not a GGUF file"),
        (good.replace(b"<think>", b"<th\xffnk>"), "tokenizer.ggml.tokens is not UTF-8"),
    ):
        file.write_bytes(data)
        assert "model.gguf" in assert_refused(file, message)


@pytest.mark.parametrize(
    "variant",
    ["qwen3 yarn", "mixtral", "gpt_oss", "gemma3_text", "gemma4_text experts", "qwen3_5_moe_text", "lfm2_moe"],
)
def test_damaged_headers_are_refused_in_one_line_or_are_another_model(variant: str, tmp_path: Path) -> None:
    """Bytes, ends and entries at random, from a fixed seed."""
    source, path = checkpoint(tmp_path / "source", variant), tmp_path / "model.gguf"
    write_gguf(source, path)
    reader, chosen = gguf.GGUFReader(path), random.Random(0)
    prefix = f"{reader.fields['general.architecture'].contents()}."
    good, head = path.read_bytes(), min(int(tensor.data_offset) for tensor in reader.tensors)
    entries = {name: (entry.offset, sum(part.nbytes for part in entry.parts)) for name, entry in reader.fields.items()}
    numbers = [at + size - 4 for name, (at, size) in entries.items() if name.startswith(prefix)]
    refused = 0
    for kind in ("bytes", "numbers", "end") * 40:
        data = bytearray(good)
        if kind == "end":
            del data[chosen.randrange(len(data)) :]
        elif kind == "numbers":
            at = chosen.choice(numbers)
            data[at : at + 4] = struct.pack("<I", chosen.choice([0, 1, 2, 3, 2**24, 2**31 - 1, 2**32 - 1, 0x3F800000]))
        for _ in range(3 * (kind == "bytes")):
            data[chosen.randrange(head)] = chosen.randrange(256)
        path.write_bytes(data)
        try:
            convert_gguf(path, tmp_path / "out")
            shutil.rmtree(tmp_path / "out")
        except (ValueError, RankError) as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error) and "out.tmp" not in str(error)
            refused += 1
        assert not list(tmp_path.glob("out*"))
    assert refused > 80


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_0", SCHEMES["q4_0"]), ("Q8_0", NARROW)])
def test_training_starts_with_the_codes_and_scales_of_the_file(kind: str, scheme: Scheme, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", "qwen3")
    file = write_gguf(source, tmp_path / "model.gguf", kind)
    convert_gguf(file, tmp_path / "out", dtype=torch.float32)
    blocks = {t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(file).tensors}
    quantization = quantize(load_model(tmp_path / "out", torch.float32), scheme, learn=False)
    names = {"q_proj": "attn_q", "o_proj": "attn_output", "down_proj": "ffn_down", "up_proj": "ffn_up"}
    compared = 0
    for name, layer in quantization.layers.items():
        for part in linears_of(name, layer):
            _, _, number, _, leaf = part.name.split(".")
            if leaf in names:
                bytes_ = blocks[f"blk.{number}.{names[leaf]}.weight"].unflatten(1, (-1, 18 if kind == "Q4_0" else 34))
                d, body = bytes_[..., :2].contiguous().view(torch.float16).squeeze(-1), bytes_[..., 2:]
                codes = (
                    body.view(torch.int8)
                    if kind == "Q8_0"
                    else torch.cat([body & 15, body >> 4], -1).to(torch.int8) - 8
                )
                scale, weight = part.scale(layer.weight_scale(), scheme.weights), part.weight(layer.weight)
                assert torch.equal(scale.float(), d.float()), name
                assert torch.equal(reference.quantize(weight, scale, scheme.weights).view(codes.shape), codes), name
                compared += 1
    assert compared == 8


# File types of llama.cpp's quantizer, by the type of most tensors.
MIXED = {"Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "IQ4_NL": 25, "IQ4_XS": 30}
MIXED |= {"Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}


def rounded_inputs_logits(directory: Path, kinds: dict[str, str]) -> torch.Tensor:
    """Logits with inputs of Linears rounded to 8 bits as in llama.cpp: in blocks of 256 for the K-quants and IQ4_XS, of
    32 otherwise. ``kinds`` are the types of the file's tensors."""

    def in_wide_blocks(x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, 256))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        return ((groups / scale).round() * scale).flatten(-2)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    names = GGUFNames(model.config, "llama")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind = kinds[names.places(f"{name}.weight")[0].name]
            rounded = in_wide_blocks if "_K" in kind or kind == "IQ4_XS" else in_blocks
            module.register_forward_pre_hook(lambda _, inputs, rounded=rounded: (rounded(inputs[0]), *inputs[1:]))
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.skipif(not installed(), reason="pip install -e '.[llama-cpp]'")
@pytest.mark.parametrize("kind", MIXED)
def test_files_of_the_engine_s_own_quantizer_have_its_logits(kind: str, tmp_path: Path) -> None:
    from cyllama.llama import llama_cpp

    source = checkpoint(tmp_path / "source", "llama")
    options = llama_cpp.LlamaModelQuantizeParams()
    options.ftype, options.nthread = MIXED[kind], 1
    file = tmp_path / "quantized.gguf"
    llama_cpp.model_quantize(str(write_gguf(source, tmp_path / "model.gguf")), str(file), options)
    assert kind in convert_gguf(file, tmp_path / "out", dtype=torch.float32).kinds
    theirs = next(engine_logits(file, [IDS]))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    ours = rounded_inputs_logits(tmp_path / "out", kinds)
    kl = (ours.softmax(-1) * (ours.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1).mean()
    # Inputs of Q4_1 and Q5_1 are multiplied by the minimum in sums that are rounded to fp16.
    assert kl < (OUR_FORWARD_KL if {"Q4_1", "Q5_1"} & set(kinds.values()) else OUR_FORWARD_KL / 5)
