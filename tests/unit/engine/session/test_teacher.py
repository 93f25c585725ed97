"""The student as its own teacher leaves no trace: what it says is the original's, and everything is as before. Refused:
quantized teachers in int8, and caches of another teacher or another number of tokens."""

import pytest
import torch
import torch.nn.functional as F

from engine.checkpoint.find import changes
from engine.config.errors import RecipeError
from engine.losses.chunked import chunked_losses
from engine.losses.objective import Objective
from engine.session.context import META, stage_0
from engine.session.teacher import SelfTeacher, check_cache, empty_teacher
from model.head import install_head
from model.ranks import RankError
from quant import get_scheme, replace_layers
from tests.lib.checkpoints import edit_json
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_checkpoint, tiny_model, tiny_tokenizer
from tests.unit.data.test_teacher_cache import edit_manifest, random_samples, write
from tools.write_teacher_cache import check_recipe


@pytest.fixture
def student(seed):
    """A quantized student in training mode with switches set differently by layer, its inputs watched."""
    model = tiny_model("llama", seed=seed % 1000, even=True)
    original = tiny_model("llama", seed=seed % 1000, even=True).eval()
    quantization = replace_layers(model, get_scheme("fp8_static"), learn_weight_scale=True, learn_input_scale=True)
    for group in (*quantization.weight_groups, *quantization.input_groups):
        with torch.no_grad():
            group.s0.fill_(0.05)
    for layer in quantization.layers.values():
        layer.keeps_weight_codes = True
    quantization.set_fake_quant(True, False, r".*layers\.0.*")
    quantization.observe(True)
    return model.train(), quantization, original


def test_the_forward_is_the_originals_and_nothing_changes(student):
    model, quantization, original = student
    head = install_head(model)
    ids = torch.randint(0, 300, (2, 9))
    model(input_ids=ids)  # codes are kept, observers have seen something
    states = [group.observer.state_dict() for group in quantization.input_groups]
    before = quantization.fake_quant_state()
    codes = {name: layer._weight_codes for name, layer in quantization.layers.items()}
    assert any(code is not None for code in codes.values()) and len(set(before.values())) == 2
    with pytest.raises((TypeError, ValueError)):  # after an error, too, everything is as before
        SelfTeacher(model, head, quantization).forward({"no_such_input": 1}, {})
    teacher_output = SelfTeacher(model, head, quantization).forward({"input_ids": ids}, {})
    teacher = teacher_output.teacher
    assert not teacher_output.parameters and not teacher.hidden.requires_grad
    found, expected = F.linear(teacher.hidden, teacher.weight).float(), original(input_ids=ids).logits.float()
    # The same arithmetic, 0 where BLAS gives the same bits again; with layer 0 left quantized 0.06 to 0.12.
    assert (found - expected).norm() < 0.01 * expected.norm()
    assert quantization.fake_quant_state() == before and model.training and quantization.observing
    for group, state in zip(quantization.input_groups, states, strict=True):
        for name, value in group.observer.state_dict().items():
            assert torch.equal(value, state[name]), f"{group.owner}: the observer saw the teacher's pass ({name})"
    for name, layer in quantization.layers.items():
        assert layer._weight_codes is codes[name], name


def test_no_gradient_flows_to_the_weight_that_the_teacher_is_computed_with(student):
    model, quantization, _ = student
    head = install_head(model)
    ids = torch.randint(0, 300, (2, 9))
    teacher_output = SelfTeacher(model, head, quantization).forward({"input_ids": ids}, {})
    hidden, weight = teacher_output.teacher.hidden.clone().requires_grad_(), head.weight.detach().clone() * 1.1
    objective = Objective(lm_weight=0.0, kd_weight=1.0)
    chunked_losses(hidden, weight, None, ids, teacher_output.teacher, objective).total.backward()
    assert hidden.grad.abs().sum() > 0 and head.weight.requires_grad and head.weight.grad is None


def test_a_cache_of_another_teacher_or_number_of_tokens_is_refused(tmp_path):
    """301 logits, 300 tokens."""
    model, samples = tiny_checkpoint(tmp_path / "model"), random_samples(5)
    write(tmp_path / "cache", samples, model)
    recipe = minimal(model={"path": str(model)})
    recipe.loss.teacher_cache = str(tmp_path / "cache")
    for vocabulary, recipe.loss.teacher in ((300, str(model)), (301, "not/there/any/more")):
        edit_manifest(vocabulary=vocabulary)(tmp_path / "cache")
        check_cache(recipe, tiny_tokenizer(), 301)
    recipe.loss.teacher = str(tiny_checkpoint(tmp_path / "other", seed=5))
    with pytest.raises(RankError, match="another teacher"):
        check_cache(recipe, tiny_tokenizer(), 301)
    recipe.loss.teacher = None
    edit_manifest(vocabulary=10**6)(tmp_path / "cache")
    with pytest.raises(RankError, match="cache is for a vocabulary of 1,000,000 tokens, expected 301, as"):
        check_cache(recipe, tiny_tokenizer(), 301)


def test_a_teacher_that_is_quantized_is_not_held_in_int8_too(tmp_path):
    model = tiny_checkpoint(tmp_path / "model")
    taught = {"teacher": str(model), "kd_weight": 1.0, "teacher_weights": "int8"}
    recipe = minimal(model={"path": str(model)}, loss=taught)
    held = [
        name for name, own in empty_teacher(recipe, stage_0(recipe), META).named_parameters() if hasattr(own, "held")
    ]
    assert held and all(name.endswith("_proj.weight") for name in held)
    edit_json(model / "config.json", quantization_config={"quant_method": "compressed-tensors", "config_groups": {}})
    with pytest.raises(RankError, match=r"loss.teacher_weights: int8: .*model is quantized: remove that option"):
        empty_teacher(recipe, stage_0(recipe), META)


def test_answers_that_are_not_written_yet_have_no_cache(tmp_path):
    """A cache of the prompts would be empty."""
    taught = {"teacher": "model", "lm_weight": 0.0, "kd_weight": 1.0, "kd": "kl_top_k", "top_k": 4}
    data = {"kind": "on_policy", "server": "http://localhost:8000", "new_tokens": 8}
    with pytest.raises(
        RecipeError, match=r"data\.kind: 'on_policy', expected chat, text or mixed: a teacher cannot be"
    ):
        check_recipe(minimal(data=data, loss=taught), tmp_path / "cache")


def test_a_teacher_in_int8_is_one_of_the_whole_run_and_of_no_cache(tmp_path):
    taught = {"teacher": "model", "kd_weight": 1.0}
    full, coded = (minimal(loss={**taught, "teacher_weights": held}) for held in ("full", "int8"))
    assert changes(full, coded) == ["loss.teacher_weights (was 'full', is 'int8')"]
    with pytest.raises(
        RecipeError, match=r"loss\.teacher_weights: 'int8', expected full: a cache is read by many runs"
    ):
        check_recipe(coded, tmp_path / "cache")
    with pytest.raises(
        RecipeError, match=r"loss\.teacher_weights: 'int8' has no effect unless loss.teacher is a direc"
    ):
        minimal(loss={"teacher": "self", "kd_weight": 1.0, "teacher_weights": "int8"}, learnable={"weight": False})
