"""Open a GGUF file of llama.cpp, read its metadata, and build its tokenizer, with its chat template.

transformers' own reader splits text like GPT-2 if it has no rule for ``tokenizer.ggml.pre``. Here an entry that changes
the tokens and has no equivalent is an error.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from model.checkpoint.safetensors import AGAIN, CheckpointError
from model.ranks import listed
from model.save.gguf_file import open_gguf

# Values that are fractions; all other numbers are integers.
_FRACTIONS = {"attention.layer_norm_rms_epsilon", "final_logit_softcapping", "rope.freq_base", "rope.freq_base_swa"}
_FRACTIONS |= {"rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}
_BY_LAYER = {"attention.head_count_kv", "feed_forward_length"}


class GGUFSource:
    """Opened GGUF file with checked tensors, and its metadata. ``known`` has llama.cpp's names of the supported
    architectures. Raises CheckpointError if the file is missing or damaged, is one part of a split model, holds no
    model, or is of another architecture."""

    def __init__(self, path: Path, known: Sequence[str]) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file, expected a GGUF file")
        reader = open_gguf(path)
        self.path, self.tensors = path, {tensor.name: tensor for tensor in reader.tensors}
        self.values: dict[str, Any] = {}
        for name, entry in reader.fields.items():
            try:
                self.values[name] = entry.contents()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path}: {name} is not UTF-8 ({error}): {AGAIN}") from error
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.data_offset):
            if tensor.data_offset < end or 0 in shape_of(tensor):
                self.refuse(f"{tensor.name} is empty or overlaps another tensor: {AGAIN}")
            end = tensor.data_offset + tensor.n_bytes
        self.architecture = str(self.values.get("general.architecture"))
        if self.values.get("split.count", 1) not in (0, 1):
            self.refuse("it is one file of several: merge them with llama.cpp's llama-gguf-split --merge")
        if (kind := self.values.get("general.type", "model")) != "model":
            self.refuse(f"general.type is {kind!r}, expected 'model'")
        if self.architecture not in known:
            self.refuse(f"general.architecture is {self.architecture!r}, expected one of {', '.join(known)}")

    def refuse(self, problem: str) -> NoReturn:
        """Raise CheckpointError with the file's path and the text ``problem``."""
        raise CheckpointError(f"{self.path}: {problem}")

    def own(self, end: str, default: Any = None) -> Any:
        """Return the value of the metadata key ``<architecture>.<end>``, or ``default`` if the file lacks the key."""
        return self.values.get(f"{self.architecture}.{end}", default)

    def number(self, end: str, default: float | None = None) -> Any:
        """Return the number of the metadata key ``<architecture>.<end>``, or ``default`` if the file lacks the key: a
        float if ``end`` is in ``_FRACTIONS``, else an integer. If ``end`` is in ``_BY_LAYER`` and the value is a list
        (one number per layer), return the first number that is not 0. Raises CheckpointError if the result is not a
        positive number below 2^31, or there is neither the key nor a ``default``."""
        value, fraction = self.own(end, default), end in _FRACTIONS
        if end in _BY_LAYER and isinstance(value, list):
            value = next((number for number in value if number != 0), value)
        if isinstance(value, bool) or not isinstance(value, int | float if fraction else int) or not 0 < value < 2**31:
            expected = "number" if fraction else "integer"
            self.refuse(f"{self.architecture}.{end} is {str(value)[:60]}, expected one positive {expected}")
        return float(value) if fraction else value

    def by_layer(self, end: str, layers: int) -> list[Any]:
        """Return the value of the metadata key ``<architecture>.<end>`` for each of ``layers`` layers. The file has a
        list, or one value for all layers; without the key, values are None. Raises CheckpointError for a list of
        another length."""
        value = self.own(end)
        found = value if isinstance(value, list) else [value] * layers
        if len(found) != layers:
            self.refuse(f"{self.architecture}.{end} is {str(value)[:60]}, expected a value for each of {layers} layers")
        return found

    def token(self, end: str, default: Any = None) -> Any:
        """Return the value of the metadata key ``tokenizer.ggml.<end>``, or ``default`` if the file lacks the key."""
        return self.values.get(f"tokenizer.ggml.{end}", default)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor of the file in PyTorch's order, slowest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))


# Tokenizers of byte-level BPE by tokenizer.ggml.pre: the pattern that splits text (None: GPT-2's), the normalizer, True
# if a word of the vocabulary is not merged, True if llama.cpp begins a text with bos unless the file denies it.
_ENDING, _START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASHES = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD, _NAME = f"{_START}{_UPPER}*{_LOWER}+", f"{_START}{_UPPER}+{_LOWER}*"
_DIGITS = "digits"
_QWEN2 = rf"{_ENDING}|{_START}\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = rf"{_ENDING}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}|" + _REST.replace(r"\p{L}", r"\p{L}\p{M}")
_LLAMA3 = (rf"{_ENDING}|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", None, True, True)
_PRE: dict[str, tuple[str | None, Any, bool, bool]] = {
    "gpt-2": (None, None, False, False),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (_DIGITS, None, False, False)),
    "qwen2": (_QWEN2, normalizers.NFC, False, False),
    "qwen35": (_QWEN35, normalizers.NFC, False, False),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "lfm2"), _LLAMA3),
    "tekken": (rf"{_WORD}|{_NAME}|\p{{N}}|{_SLASHES}", None, True, True),
    "gpt-4o": (rf"{_WORD}{_ENDING}?|{_NAME}{_ENDING}?|\p{{N}}{{1,3}}|{_SLASHES}", None, False, False),
}
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # types of tokens
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ENDS = ("eos", "eot", "eom")  # tokens that end an answer
_TOKENIZER = {f"{name}_token_id" for name in (*_NAMED, *ENDS, "seperator", "separator", "mask", "cls")}
_TOKENIZER |= {"model", "pre", "tokens", "token_type", "token_type_count", "merges", "scores", "add_bos_token"}
_TOKENIZER |= {"add_eos_token", "add_space_prefix"}


def build_tokenizer(file: GGUFSource) -> PreTrainedTokenizerFast:
    """Build the file's tokenizer. Raises CheckpointError for an unknown or inconsistent entry of its metadata."""
    kind, tokens, types = file.token("model"), file.token("tokens"), file.token("token_type")
    keys = [key.removeprefix("tokenizer.ggml.") for key in file.values if key.startswith("tokenizer.ggml.")]
    if unknown := [f"tokenizer.ggml.{key}" for key in keys if key not in _TOKENIZER and not key.startswith("fim_")]:
        file.refuse(f"metadata that changes the tokens and is not supported: {listed(unknown, 6)}")
    lists = [tokens, types, *([file.token("scores")] if kind == "llama" else [])]
    for one, type_ in zip(lists, (str, int, float), strict=False):
        if not isinstance(one, list) or len(one) != len(tokens) or not all(isinstance(value, type_) for value in one):
            file.refuse("tokenizer.ggml.tokens, token_type or scores are missing, or not lists of one length")
    if len(tokens) > (rows := shape_of(file.tensors["token_embd.weight"])[0]):
        file.refuse(f"tokenizer.ggml.tokens has {len(tokens)} tokens, but token_embd.weight has {rows} rows")
    for key in (key for key in keys if key.endswith("_token_id")):
        if type(file.token(key)) is not int or not 0 <= file.token(key) < len(tokens):
            file.refuse(f"tokenizer.ggml.{key} is {file.token(key)!r}, but there are {len(tokens)} tokens")
    vocabulary = {
        token: index
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ != _UNUSED or token != f"[PAD{index}]"  # rows that the converter padded
    }
    if twice := [token for index, token in enumerate(tokens) if vocabulary.get(token, index) != index]:
        file.refuse(f"tokenizer.ggml.tokens has {listed(twice, 3)} twice")
    if kind not in ("gpt2", "llama", "gemma4"):
        file.refuse(f"tokenizer.ggml.model is {kind!r}, expected 'gpt2', 'llama' or 'gemma4'")
    made, begins = (_byte_level if kind == "gpt2" else _sentencepiece)(file, vocabulary)
    for wanted in (_CONTROL, _USER_DEFINED):
        found = [token for token, type_ in zip(tokens, types, strict=True) if type_ == wanted]
        found = [token for token in found if made.token_to_id(token) is not None]
        made.add_tokens([AddedToken(token, special=wanted == _CONTROL, normalized=False) for token in found])
    named = {
        attribute: tokens[file.token(f"{name}_token_id")]
        for name, attribute in _NAMED.items()
        if f"{name}_token_id" in keys
    }
    start = "tokenizer.chat_template"
    templates = {
        key.removeprefix(start)[1:]: file.values[key] for key in file.values if re.match(rf"{start}(\.|$)", key)
    }
    if not all(isinstance(template, str) for template in templates.values()):
        file.refuse(f"{start} is not a text")
    added = [
        named.get(f"{name}_token") if file.token(f"add_{name}_token", default) else ""
        for name, default in (("bos", begins), ("eos", False))
    ]
    if None in added:
        file.refuse(f"tokenizer.ggml.add_{('bos', 'eos')[added.index(None)]}_token is set, but there is no such token")
    if not added[0] and "bos_token" not in "".join(templates.values()):
        named.pop("bos_token", None)  # llama.cpp's converter adds one, for example for Qwen
    made.post_processor = processors.TemplateProcessing(
        single=[part for part in (added[0], "$A", added[1]) if part],
        special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(added) if token],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=file.own("context_length"), **named)
    if templates:
        names = {name or "default": template for name, template in templates.items()}
        tokenizer.chat_template = names["default"] if list(names) == ["default"] else names
    return tokenizer


def _byte_level(file: GGUFSource, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Build a byte-level BPE tokenizer; also return True if llama.cpp begins a text with bos by default. Raises
    CheckpointError if ``tokenizer.ggml.pre`` is unknown, or the merges are not valid."""
    pre = file.token("pre")
    if not isinstance(pre, str) or pre not in _PRE:
        file.refuse(f"tokenizer.ggml.pre is {pre!r}, expected one of {', '.join(_PRE)}")
    pattern, normalizer, ignore_merges, begins = _PRE[pre]
    made = _bpe(file, vocabulary, _merges(file), ignore_merges=ignore_merges)
    if normalizer is not None:
        made.normalizer = normalizer()
    first: Any = pre_tokenizers.Digits(individual_digits=True) if pattern == _DIGITS else None
    if pattern not in (None, _DIGITS):
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, _DIGITS))
    made.pre_tokenizer = last if first is None else pre_tokenizers.Sequence([first, last])
    made.decoder = decoders.ByteLevel()
    return made, begins


def _merges(file: GGUFSource) -> list[tuple[str, str]]:
    """Return the pairs of tokens to merge, in order. Raises CheckpointError if the file has no valid list of them."""
    merges = file.token("merges")
    if not isinstance(merges, list) or any(str(merge).count(" ") != 1 for merge in merges):
        file.refuse("tokenizer.ggml.merges is missing, or has an entry that is not a pair of tokens")
    return [tuple(merge.split(" ")) for merge in merges]


def _bpe(file: GGUFSource, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    """Build a BPE without rules to split text. Raises CheckpointError if a merge has unknown tokens."""
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.merges and tokens contradict each other: {error}"
        ) from error


def _ranked(file: GGUFSource, vocabulary: dict[str, int], *, by_id: bool) -> list[tuple[str, str]]:
    """Derive merges: for each token, all pairs of tokens that it can be split into. They are ordered by the token's id
    if ``by_id``, else by its score, highest first. Raises CheckpointError if a score is not finite."""
    scores = file.token("scores")
    if not all(map(math.isfinite, scores)):
        file.refuse("tokenizer.ggml.scores holds NaN or infinite values")
    ranked: list[tuple[float, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        splits = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        splits.sort(key=lambda split: (len(split[0]), len(split[1])))
        ranked += [(index if by_id else -scores[index], split) for split in splits]
    ranked.sort(key=lambda item: item[0])
    return [split for _, split in ranked]


def _sentencepiece(file: GGUFSource, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Build a BPE tokenizer of SentencePiece; also return True, as a text begins with bos by default. Only Gemma 4's
    files list merges. For others :func:`_ranked` orders them by the score of the merged token; for Gemma 3, whose
    scores have another order, by its id (as in transformers' reader). Raises CheckpointError for invalid metadata."""
    gemma = file.architecture.startswith("gemma")
    prefix = bool(file.token("add_space_prefix", True))
    if prefix is gemma:
        file.refuse(f"tokenizer.ggml.add_space_prefix is {prefix}, expected {not gemma} for {file.architecture}")
    if gemma:  # tokens of several spaces are spelled with spaces in the file
        vocabulary = {token.replace(" ", "▁") if not token.strip() else token: i for token, i in vocabulary.items()}
    merges = _merges(file) if file.token("model") == "gemma4" else _ranked(file, vocabulary, by_id=gemma)
    unknown = file.token("unknown_token_id")
    options = {"fuse_unk": True, "byte_fallback": True}
    if unknown is not None:
        options["unk_token"] = file.token("tokens")[unknown]
    made = _bpe(file, vocabulary, merges, **options)
    last = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        last.append(decoders.Strip(content=" ", left=1))
    made.decoder = decoders.Sequence(last)
    return made, True
