import pytest
import torch

from paceline.tools.train import loss as module
from paceline.tools.train.loss import soft_loss


def test_value_and_gradient_match_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 40)  # three rows at a time, the last part shorter
    torch.manual_seed(0)
    students = torch.randn(2, 10, 8, requires_grad=True)
    teacher, head, weights = torch.randn(10, 8), torch.randn(40, 8), torch.rand(2, 10)
    weights[0, 3] = 0
    scale = torch.tensor([1.0, 0.3])

    found = soft_loss(students, teacher, head, weights)
    (found.kl * scale).sum().backward()
    gradient, students.grad = students.grad, None

    log_p, log_q = (teacher @ head.T).log_softmax(-1), (students @ head.T).log_softmax(-1)
    rows = (log_p.exp() * (log_p - log_q)).sum(-1)  # [2, 10]
    expected = (rows * weights).sum(1) / weights.sum(1)
    (expected * scale).sum().backward()
    torch.testing.assert_close(found.kl, expected)
    torch.testing.assert_close(gradient, students.grad)
    agrees = (log_p.argmax(-1) == log_q.argmax(-1)).float()
    torch.testing.assert_close(found.agreement, (agrees * weights).sum(1) / weights.sum(1))


def test_loss_of_the_teacher_is_zero() -> None:
    teacher, head = torch.randn(6, 8), torch.randn(20, 8)
    found = soft_loss(teacher[None].clone().requires_grad_(), teacher, head, torch.ones(1, 6))
    torch.testing.assert_close(found.kl, torch.zeros(1), atol=1e-6, rtol=0)
    assert found.agreement.item() == pytest.approx(1.0)
