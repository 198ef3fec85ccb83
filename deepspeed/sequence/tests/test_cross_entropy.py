"""The loss of a spread sequence and a spread vocabulary against torch's in one process."""
from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from deepspeed import comm
from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from tests.support.pool import distributed

LENGTH, BATCH, VOCABULARY = 8, 3, 12


def logits_and_target() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(LENGTH, BATCH, VOCABULARY, generator=generator) * 4
    target = torch.randint(0, VOCABULARY, (LENGTH, BATCH), generator=generator)
    target[1, 1] = target[6, 0] = -100
    return logits, target


def reference(reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and the gradient of its square's sum."""
    logits, target = logits_and_target()
    logits.requires_grad_()
    loss = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
    loss.square().sum().backward()
    return loss.detach().view(LENGTH, BATCH) if reduction == "none" else loss.detach(), logits.grad


@distributed([1, 2, 4])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_spread_sequence(reduction: str, world_size: int) -> None:
    expected, expected_grad = reference(reduction)
    logits, target = (whole.chunk(world_size)[comm.get_rank()].clone() for whole in logits_and_target())
    logits.requires_grad_()
    loss = vocab_sequence_parallel_cross_entropy(logits, target, comm.get_world_group(), reduction=reduction,
                                                 gather_sequence_loss=reduction == "none")
    torch.testing.assert_close(loss, expected)
    loss.square().sum().backward()
    # every rank holds the loss of the whole sequence; the mean over ranks is the gradient of one process
    torch.testing.assert_close(logits.grad / world_size, expected_grad.chunk(world_size)[comm.get_rank()])


@distributed(2)
def test_local_losses() -> None:
    logits, target = (whole.chunk(2)[comm.get_rank()] for whole in logits_and_target())
    loss = vocab_sequence_parallel_cross_entropy(logits, target, comm.get_world_group(), gather_sequence_loss=False)
    torch.testing.assert_close(loss, reference("none")[0].chunk(2)[comm.get_rank()])


@distributed(4)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_spread_sequence_and_vocabulary(reduction: str) -> None:
    rank = comm.get_rank()
    sequence = [comm.new_group([0, 1]), comm.new_group([2, 3])][rank // 2]
    vocabulary = [comm.new_group([0, 2]), comm.new_group([1, 3])][rank % 2]
    whole, target = logits_and_target()
    logits = whole.chunk(2)[rank % 2].chunk(2, dim=-1)[rank // 2].clone().requires_grad_()
    expected, expected_grad = reference(reduction)
    start = 6 * (rank // 2)
    bounds = {"vocab_start_index": start, "vocab_end_index": start + 6} if reduction == "mean" else {}
    loss = vocab_sequence_parallel_cross_entropy(
        logits, target.chunk(2)[rank % 2], sequence, tp_group=vocabulary, reduction=reduction,
        gather_sequence_loss=reduction == "none", **bounds)
    torch.testing.assert_close(loss, expected)
    loss.square().sum().backward()
    grad = expected_grad.chunk(2)[rank % 2].chunk(2, dim=-1)[rank // 2]
    torch.testing.assert_close(logits.grad / 4, grad)  # four ranks hold the loss


@distributed(2)
def test_all_ignored_counts_nothing() -> None:
    logits = torch.randn(2, BATCH, VOCABULARY, requires_grad=True)
    loss = vocab_sequence_parallel_cross_entropy(logits, torch.full((2, BATCH), 7), comm.get_world_group(),
                                                 ignore_index=7, reduction="mean", gather_sequence_loss=False)
    loss.backward()
    assert loss == 0 and not logits.grad.any()


def test_refusals() -> None:
    logits, target = logits_and_target()
    for arguments, match in (({"reduction": "mean"}, "gather_sequence_loss=False"),
                             ({"reduction": "max"}, "none, sum or mean"), ({"backend": "other"}, "expected torch")):
        with pytest.raises(ValueError, match=match):
            vocab_sequence_parallel_cross_entropy(logits, target, None, **arguments)
    with pytest.raises(ValueError, match="shape"):
        vocab_sequence_parallel_cross_entropy(logits, target[1:], None)
