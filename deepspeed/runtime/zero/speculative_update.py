"""Updates in host memory that begin while backward goes on, before it is known whether they count.

Note [Speculation]: the norm of all gradients decides whether they are clipped, or the step is skipped. An update that begins
before it is known guesses that neither happens. It writes the new master, state and rounded parameters beside the old ones,
and changes nothing that anybody sees. At the step the old and the new change places, if all that the guess was made from is as
it was: factor, hyperparameters, gradient. Otherwise the new ones are forgotten and the update is computed from the old ones. So
the numbers are those of an update after backward, bit for bit. While guesses fail, as in the first steps of a training that
clips, none is made. Source: Lian et al., "SuperOffload" (arXiv:2509.21271), section 4.4; there a wrong guess is undone by
inverse arithmetic, which needs no second memory and is exact but for rounding.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from deepspeed.ops.cpu_optimizer import CPUOptimizer
from deepspeed.runtime.zero.bucket import ParamBucket
from deepspeed.runtime.zero.host_memory import Arrival
from deepspeed.runtime.zero.update import Factor, OnePassOnHost, PiecesOf

MEMORY_MARGIN = 2  # second copies are made while the machine has this many times their size free


@dataclass
class _Copy:
    """Memory for what an update writes. states: those of each piece, 1-D. rounded: None where the master needs no rounding."""

    master: torch.Tensor
    states: list[list[torch.Tensor]]
    rounded: torch.Tensor | None
    arrival: Arrival = Arrival()


@dataclass
class _Guess:
    """What an update was begun from. work: None when none was."""

    factor: float
    version: int
    groups: dict[int, dict[str, Any]]
    steps: list[Callable[..., None]]
    work: Future[_Copy | None] | None = None


class SpeculativeOnHost(OnePassOnHost):
    """By the kernels of an optimizer for host memory, begun in another thread as soon as a bucket's gradient is there.

    worker: that thread, in which updates that run behind come as well.
    """

    def __init__(self, inner: CPUOptimizer, pieces_of: PiecesOf, masters: Mapping[ParamBucket, torch.Tensor], threads: int,
                 worker: ThreadPoolExecutor):
        super().__init__(inner, pieces_of, masters, threads)
        self._worker = worker
        self._guesses: dict[ParamBucket, _Guess] = {}
        self._is_right = True  # the last guess, also where it was not acted on
        self._spare: dict[tuple[Any, ...], list[_Copy]] = {}

    def offer(self, bucket: ParamBucket, factor: float) -> None:
        """Begin the update of a bucket whose gradient is complete, by `factor` times it."""
        self.forget(bucket)
        bucket.settle_update()
        grad, pieces = bucket.host_grad, self._pieces_of[bucket]
        factor = self._as_factor(factor)
        steps = [self._inner.prepare_step(self._inner.param_groups[piece.group_id], piece.tensor,
                                          grad.buffer[piece.start:piece.stop], factor, self._threads) for piece in pieces]
        guess = self._guesses[bucket] = _Guess(factor, grad.version, self._groups_of(bucket), steps)
        if self._is_right and self.is_plain():
            guess.work = grad.reader = self._worker.submit(self._compute, bucket, steps)

    def prepare(self, bucket: ParamBucket, factor: Factor) -> Callable[[], None]:
        factor, guess = self._as_factor(factor), self._guesses.pop(bucket, None)
        self._is_right = (guess is not None and bucket.has_grad and guess.factor == factor
                          and guess.version == bucket.host_grad.version and guess.groups == self._groups_of(bucket))
        if not self._is_right:
            self._drop(bucket, guess)
            for other in list(self._guesses):  # before the thread begins them
                self.forget(other)
        if not self._is_right or guess.work is None:
            return super().prepare(bucket, factor)
        guess.work.cancel()  # one that has not begun would come out of turn
        self._inner._opt_called = True
        for piece in self._pieces_of[bucket]:
            self._inner.count_step(piece.tensor)
        return lambda: self._finish(bucket, guess)

    def forget(self, bucket: ParamBucket) -> None:
        """Drop an update that was begun: its state changed, or will."""
        self._drop(bucket, self._guesses.pop(bucket, None))

    def _drop(self, bucket: ParamBucket, guess: _Guess | None) -> None:
        """Give back what an update wrote, or the thread its time."""
        if guess is None or guess.work is None:
            return
        if not guess.work.cancel():
            guess.work.add_done_callback(lambda work: self._give_back(bucket, None if work.exception() else work.result()))
        elif bucket.host_grad.reader is guess.work:
            bucket.host_grad.reader = None

    def _give_back(self, bucket: ParamBucket, copy: _Copy | None) -> None:
        if copy is not None:
            self._spare.setdefault(self._form_of(bucket), []).append(copy)

    def _groups_of(self, bucket: ParamBucket) -> dict[int, dict[str, Any]]:
        """Return the hyperparameters of now."""
        groups = self._inner.param_groups
        return {piece.group_id: {key: value for key, value in groups[piece.group_id].items() if key != "params"}
                for piece in self._pieces_of[bucket]}

    # ---- in the other thread -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _compute(self, bucket: ParamBucket, steps: list[Callable[..., None]]) -> _Copy | None:
        """Return what the update gives; None without memory for it."""
        bucket.host_grad.complete()
        copy = self._take(bucket)
        if copy is not None:
            for piece, step, states in zip(self._pieces_of[bucket], steps, copy.states):
                rounded = None if copy.rounded is None else copy.rounded[piece.start:piece.stop]
                step(rounded, [copy.master[piece.start:piece.stop], *states])
        return copy

    @torch.no_grad()
    def _finish(self, bucket: ParamBucket, guess: _Guess) -> None:
        copy = None if guess.work.cancelled() else guess.work.result()
        if copy is None:
            bucket.host_grad.complete()
            self._update(bucket, list(zip(self._pieces_of[bucket], guess.steps)))
            return
        self._change_places(bucket, copy)
        if copy.rounded is None:
            bucket.receive(self._masters[bucket])
        else:
            copy.arrival = bucket.receive_rounded(copy.rounded)
        self._give_back(bucket, copy)

    def _change_places(self, bucket: ParamBucket, copy: _Copy) -> None:
        """Let master and state be the new values, and the copy hold the old ones' memory."""
        master = self._masters[bucket]
        master.data, copy.master = copy.master, master.data
        for piece, new in zip(self._pieces_of[bucket], copy.states):
            piece.tensor.data = master.data[piece.start:piece.stop].view(piece.tensor.shape)
            state = self._inner.state[piece.tensor]
            for index, key in enumerate(self._inner.STATES):
                old = state[key].data
                state[key].data, new[index] = new[index].view(old.shape), old.view(-1)

    def _take(self, bucket: ParamBucket) -> _Copy | None:
        spare = self._spare.get(self._form_of(bucket))
        if spare:
            copy = spare.pop()
            copy.arrival.wait()
            return copy
        return self._make(bucket)

    def _make(self, bucket: ParamBucket) -> _Copy | None:
        master = self._masters[bucket]
        olds = [[self._inner.state[piece.tensor][key] for key in self._inner.STATES] for piece in self._pieces_of[bucket]]
        num_bytes = master.nbytes + sum(old.nbytes for states in olds for old in states) + bucket.shard.nbytes
        if psutil.virtual_memory().available < MEMORY_MARGIN * num_bytes:
            return None
        empty = bucket.memory.empty
        return _Copy(empty(master.numel(), master.dtype, is_copied=False).zero_(),
                     [[empty(old.numel(), old.dtype, is_copied=False) for old in states] for states in olds],
                     empty(master.numel(), bucket.shard.dtype).zero_() if master.dtype != bucket.shard.dtype else None)

    def _form_of(self, bucket: ParamBucket) -> tuple[Any, ...]:
        """Return what buckets have in common that can use each other's copies."""
        return (self._masters[bucket].dtype, bucket.shard_numel, bucket.shard.dtype,
                *((piece.start, piece.stop) for piece in self._pieces_of[bucket]))
