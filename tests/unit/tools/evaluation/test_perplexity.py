"""Perplexity of a text against a direct computation token by token."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3ForCausalLM

from model.ranks import RankError
from model.save.export_model import export_model
from quant import SCHEMES
from quant.linear import QuantLinear
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import CPU, edit_tensors, load_model, quantized
from tests.lib.published import gptq_checkpoint, modelopt
from tests.lib.tiny import tiny_checkpoint, tiny_config, tiny_model, tiny_tokenizer
from tools.compressed import load_compressed
from tools.evaluation.perplexity import (
    EvalText,
    Questions,
    check_checkpoint,
    evaluate_text,
    load_for_evaluation,
    read_eval_text,
    read_reference,
)
from tools.evaluation.score import CHUNK_TOKENS, Window, reference_of, rolling_windows, score_windows, scoring_model

TEXT = "The quick brown fox.\n  It jumps — twice!  Then 12 plus 30\tis 42.\n"


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", dtype=torch.float32).eval()


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return read_eval_text(tmp_path / "text.txt", tiny_tokenizer())


def scoring(**options):
    """The model of the fixture without its head."""
    return scoring_model(tiny_model("qwen3", dtype=torch.float32, **options), CPU)


def one_at_a_time(model, text, length: int) -> float:
    """Sum of the log-likelihoods; the last window of a longer text reaches back."""
    stream, total = [text.prefix, *text.token_ids], 0.0
    for index, token in enumerate(text.token_ids):
        start = index - index % length
        if start + length > len(text.token_ids):
            start = max(0, len(text.token_ids) - length)
        with torch.no_grad():
            logits = model(torch.tensor([stream[start : index + 1]])).logits[0, -1]
        total += logits.double().log_softmax(-1)[token].item()
    return total


def test_counts_words_and_bytes(text):
    assert text.words == len(TEXT.split()) and text.bytes == len(TEXT.encode("utf-8"))
    assert tiny_tokenizer().decode(text.token_ids) == TEXT


@pytest.mark.parametrize("length", [1, 5, 16, 512])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_one_token_at_a_time(model, text, length, batch_size):
    result = evaluate_text(scoring(), text, length=length, batch_size=batch_size).log_likelihood
    # fp32 forwards of different batch shapes; each token's log-likelihood agrees to about 1e-6.
    assert result == pytest.approx(one_at_a_time(model, text, length), rel=1e-5)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 23])
def test_every_token_is_predicted_once_with_full_windows(count):
    windows = rolling_windows(list(range(count)), -1, 8)
    assert [token for window in windows for token in window.targets] == list(range(count))
    for window in windows:
        assert len(window.inputs) == min(count, 8)
        # The inputs are the predecessors of the targets, and the tokens before these.
        last = len(window.inputs)
        assert window.inputs == list(range(window.targets[-1] - last, window.targets[-1]))


def test_definitions():
    # 8 tokens with probability 1/2 each, 4 words, 16 bytes
    found = EvalText([0] * 8, words=4, bytes=16, prefix=0, digest="").perplexities(-8 * math.log(2))
    per = {"perplexity per token": 2, "perplexity per word": 4, "perplexity per byte": math.sqrt(2)}
    assert found == pytest.approx({**per, "bits per byte": 0.5})


def test_logits_of_a_whole_batch_never_exist(seed):
    """Nor those of positions that predict nothing."""
    rows = 0

    class RecordLogits(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal rows
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() and out.shape[-1] == 301:
                rows = max(rows, out.numel() // 301)
            return out

    model, ids = scoring(seed=seed), torch.randint(0, 300, (3, 401)).tolist()
    for targets, expected in ((400, CHUNK_TOKENS), (40, 3 * 40)):  # more than the 48 of the transposed weight
        rows = 0
        with RecordLogits():
            score_windows(model, [Window(row[:-1], row[-targets:]) for row in ids], batch_size=3, label="")
        assert rows == expected < 3 * 400


def test_greedy_says_whether_each_target_is_the_most_likely(model, seed):
    ids = torch.randint(0, 300, (6,)).tolist()
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    other = [(best[-1] + 1) % 301]
    windows = [Window(ids, best), Window(ids, best[:-1] + other), Window(ids, best[-1:]), Window(ids, other)]
    scores = score_windows(scoring(), windows, batch_size=4, label="")
    assert [score.greedy for score in scores] == [True, False, True, False]
    assert scores[2].log_likelihood > scores[3].log_likelihood


@pytest.mark.parametrize("masked", [False, True])
def test_divergence_from_a_reference_is_that_of_whole_distributions(text, seed, masked):
    """Also where logits are -inf: such a token counts 0 if the reference never predicts it."""
    ours, theirs = (tiny_model("qwen3", dtype=torch.float32, seed=seed + i).eval() for i in range(2))
    if masked:
        for model in (ours, theirs):
            model.set_output_embeddings(Masked(model.lm_head))
    windows = rolling_windows(text.token_ids, text.prefix, 16)
    kl = agreed = 0.0
    for window in windows:
        with torch.no_grad():
            p, q = (model(torch.tensor([window.inputs])).logits[0].double() for model in (theirs, ours))
        for log_p, log_q in zip(*(x[-len(window.targets) :].log_softmax(-1) for x in (p, q)), strict=True):
            likely = log_p.exp() > 0
            kl += (log_p.exp() * (log_p - log_q))[likely].sum().item()
            agreed += log_p.argmax().eq(log_q.argmax()).item()
    reference = reference_of(scoring_model(theirs, CPU), windows, batch_size=3)
    found = evaluate_text(scoring_model(ours, CPU), text, length=16, batch_size=3, reference=reference)
    assert found.kl == pytest.approx(kl, rel=1e-4) and kl > 1
    assert found.agreed == agreed < len(text.token_ids)


def test_a_reference_of_other_windows_or_another_vocabulary_is_refused(text):
    reference = reference_of(scoring(), rolling_windows(text.token_ids, text.prefix, 16), batch_size=3)
    with pytest.raises(RankError, match="computed on other windows"):
        evaluate_text(scoring(), text, length=17, batch_size=3, reference=reference)
    with pytest.raises(RankError, match="logits of 320 tokens and the reference of 301"):
        evaluate_text(replace(scoring(), vocabulary=320), text, length=16, batch_size=3, reference=reference)


class Masked(nn.Linear):
    """A head that masks a token which no text here has."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight

    def forward(self, x):
        return super().forward(x).index_fill(-1, torch.tensor([300]), -math.inf)


class Doubled(nn.Module):
    """A head that is no nn.Linear, as a quantized one: its weight is made in its forward."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):
        return nn.functional.linear(x, 2 * self.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_any_module_can_be_the_head(text, tied):
    model = tiny_model("qwen3", dtype=torch.float32, tied=tied).eval()
    model.set_output_embeddings(Doubled(model.lm_head))
    expected = one_at_a_time(model, text, 16)
    result = evaluate_text(scoring_model(model, CPU), text, length=16, batch_size=2).log_likelihood
    assert result == pytest.approx(expected, rel=1e-5)


def test_a_model_that_changes_its_logits_keeps_its_head(text):
    model = VARIANTS["gemma2"].model()  # its logits are capped
    expected = one_at_a_time(model, text, 16)
    result = evaluate_text(scoring_model(model, CPU), text, length=16, batch_size=2).log_likelihood
    assert result == pytest.approx(expected, rel=1e-5)


class Changed(Qwen3ForCausalLM):
    """Goes on from its logits, and its configuration does not say so."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


def test_a_model_that_changes_its_logits_in_secret_is_refused(text):
    model = scoring_model(Changed(tiny_config("qwen3")).float(), CPU)
    with pytest.raises(RankError, match="Changed changes its logits after lm_head"):
        evaluate_text(model, text, length=16)


def test_predictions_that_are_not_finite_and_windows_beyond_the_context_are_refused(text):
    model = scoring()
    with torch.no_grad():
        model.head.weight[5] = math.nan
    with pytest.raises(RankError, match="windows of 513 tokens, expected at most 512"):
        evaluate_text(model, text, length=513)
    beyond = replace(text, token_ids=[*text.token_ids, 301])
    with pytest.raises(RankError, match=r"^found token 301, expected ids below 301, the number of tokens of the model"):
        evaluate_text(model, beyond, length=64)
    with pytest.raises(RankError, match=r"of 4 windows have a log-likelihood that is NaN or infinite"):
        evaluate_text(model, text, length=math.ceil(len(text.token_ids) / 4))


def test_a_damaged_reference_is_not_called_a_damaged_model(text):
    model = scoring()
    with torch.no_grad():
        model.head.weight[5] = math.nan
    reference = reference_of(model, rolling_windows(text.token_ids, text.prefix, 16), batch_size=1)
    with pytest.raises(RankError, match=r"windows have a KL divergence from the reference that is NaN or infinite"):
        evaluate_text(scoring(), text, length=16, reference=reference)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_an_export_with_a_quantized_head(tmp_path, text, kind):
    source, int2 = tiny_checkpoint(tmp_path / "source", kind, even=True), SCHEMES["w2a16_g32"]
    export_model(*quantized(source, int2, named={"lm_head": int2}), source, tmp_path / "export")
    whole, _ = load_compressed(tmp_path / "export")
    assert isinstance(whole.get_output_embeddings(), QuantLinear)
    result = evaluate_text(
        load_for_evaluation(tmp_path / "export", torch.float32, CPU), text, length=16, batch_size=2
    ).log_likelihood
    assert result == pytest.approx(one_at_a_time(whole, text, 16), rel=1e-5)
    # What was evaluated is not what it was made of, which is further away than any rounding.
    plain = evaluate_text(load_for_evaluation(source, torch.float32, CPU), text, length=16).log_likelihood
    assert abs(plain / result - 1) > 1e-3


def test_missing_tensors_are_found_without_reading_weights(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    export_model(*quantized(source, SCHEMES["w8a16_channel"]), source, tmp_path / "export")
    keys = {"source": "model.norm.weight", "export": "model.layers.1.mlp.up_proj.weight_scale"}
    for directory, key in ((tmp_path / name, key) for name, key in keys.items()):
        check_checkpoint(directory)
        edit_tensors(directory, key, lambda tensors, key=key: tensors.pop(key))
        with pytest.raises(RankError, match=f"missing: {key}"):
            check_checkpoint(directory)


@pytest.mark.parametrize("kind", ["gptq", "awq", "auto-round"])
def test_a_file_of_another_writer_is_what_its_codes_stand_for(tmp_path, text, kind):
    """In fp32, which holds every product of a code and an fp16 scale."""
    directory, weights = gptq_checkpoint(tmp_path, kind)
    before = evaluate_text(load_for_evaluation(tmp_path / "source", torch.float32, CPU), text, length=16).log_likelihood
    plain = load_model(tmp_path / "source", torch.float32)
    assert before == pytest.approx(one_at_a_time(plain, text, 16), rel=1e-5)
    with torch.no_grad():
        for name, weight in weights.items():
            plain.get_submodule(name).weight.copy_(weight)
    expected = evaluate_text(scoring_model(plain, CPU), text, length=16).log_likelihood
    found = evaluate_text(load_for_evaluation(directory, torch.float32, CPU), text, length=16).log_likelihood
    assert found == pytest.approx(expected, rel=1e-6) and abs(before / expected - 1) > 1e-4


@pytest.mark.parametrize("inside", [True, False])
def test_a_file_of_modelopt_is_not_evaluated_with_unquantized_inputs(tmp_path, inside):
    """Wherever it says how it is quantized: in config.json, or in hf_quant_config.json alone."""
    _, directory = modelopt(tmp_path, "fp8_static", inside=inside)
    for evaluated in (lambda: load_for_evaluation(directory, torch.float32, CPU), lambda: check_checkpoint(directory)):
        with pytest.raises(RankError, match="quant_method is 'modelopt', expected 'compressed-tensors'"):
            evaluated()


def test_first_tokens_only(tmp_path, text):
    first = read_eval_text(tmp_path / "text.txt", tiny_tokenizer(), max_tokens=7)
    assert first.token_ids == text.token_ids[:7]
    assert first.bytes == len(tiny_tokenizer().decode(first.token_ids).encode())
    assert first.digest != text.digest


def test_bad_files(tmp_path):
    for content, message in ((b" \n", r"text\.txt: no text"), (b"\xff\xfe\x00", r"text\.txt: not UTF-8 .*: convert")):
        (tmp_path / "text.txt").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_eval_text(tmp_path / "text.txt", tiny_tokenizer())
    with pytest.raises(RankError, match=r"gone: no config\.json there, expected the directory of a checkpoint"):
        read_reference(tmp_path / "gone", Questions(text=tmp_path / "text.txt"), CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_plain_checkpoint_is_loaded_in_the_dtype_that_is_asked_for(tmp_path, dtype):
    model = load_for_evaluation(tiny_checkpoint(tmp_path / "model"), dtype, CPU)
    assert {parameter.dtype for parameter in (*model.body.parameters(), *model.head.parameters())} == {dtype}
