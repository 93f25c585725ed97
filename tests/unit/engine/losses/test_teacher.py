"""The student as its own teacher leaves no trace: what it says is the original's, and everything is as before."""

import pytest
import torch
import torch.nn.functional as F

from engine.losses.chunked import chunked_losses
from engine.losses.objective import Objective
from engine.losses.teacher import SelfTeacher
from model.head import install_head
from quant import get_scheme, replace_layers
from tests.lib.tiny import tiny_model


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
