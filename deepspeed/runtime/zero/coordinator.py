"""ParamCoordinator: decides when sharded parameters are gathered and released.

Vocabulary. A *scope* is a module whose forward and backward use a bucket (normally a transformer block). A bucket is *held*
while a scope uses it. When the last hold ends it becomes *idle*; idle buckets are released just before the next different
bucket is fetched, so several modules of one bucket that run after each other cause one gather.

Note [Trace]: the order of fetches is recorded per phase (forward and backward, training or not). While execution follows
the record, the next buckets are gathered ahead. A fetch that the record does not predict is first agreed upon by all ranks
(comm/consistency.py), then replaces the record from there on.

Note [End of a backward use]: a scope's backward is over when the gradients of its inputs are computed *and* the bucket's
own gradients have come, as many as in the last backward. Either alone is too early: a path inside the scope may not lead to
its inputs. What is still held when the whole backward ends is released then.

Note [Recomputation]: activation checkpointing runs forward again inside backward. A scope that is in its backward is held
already, so the second forward takes and gives no holds, and may be left by an exception (early stop) at any point.
"""
from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.consistency import RankConsistency
from deepspeed.errors import OffloadError
from deepspeed.runtime.policies import FetchLimits
from deepspeed.runtime.zero.bucket import BucketState, ParamBucket
from deepspeed.runtime.zero.storage import Slot
from deepspeed.runtime.zero.swap_file import raise_together

logger = logging.getLogger(__name__)


class Phase(Enum):
    FORWARD = "forward"
    EVALUATION = "evaluation forward"
    BACKWARD = "backward"


@dataclass
class Scope:
    """A module with gather and release hooks, and the buckets that its forward and backward use."""

    module: nn.Module
    name: str
    buckets: list[ParamBucket] = field(default_factory=list)
    backward_uses: int = 0  # forwards of this scope whose backward is running
    owners: list[nn.Module] | None = None  # modules inside that hold sharded parameters (see ZeroHooks)

    @property
    def is_sharded(self) -> bool:
        return any(bucket.is_sharded for bucket in self.buckets)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Trace:
    """The recorded order of fetches of one phase and the position in it."""

    def __init__(self) -> None:
        self.fetches: list[ParamBucket] = []
        self.position = 0

    @property
    def ended_early(self) -> bool:
        return self.position < len(self.fetches)

    def rewind(self) -> None:
        del self.fetches[self.position:]
        self.position = 0

    def advance(self, bucket: ParamBucket) -> bool:
        """Take the next step; return whether it was predicted."""
        is_predicted = self.position < len(self.fetches) and self.fetches[self.position] is bucket
        if not is_predicted:
            del self.fetches[self.position:]
            self.fetches.append(bucket)
        self.position += 1
        return is_predicted

    def ahead(self) -> list[ParamBucket]:
        return self.fetches[self.position:]


class ParamCoordinator:
    """Owns the trace, the holds and the gathers in flight. Its methods are called by hooks.py alone.

    buckets: all buckets; those kept whole (stages 1 and 2, persistent parameters) are only waited for.
    """

    def __init__(self, buckets: Sequence[ParamBucket], consistency: RankConsistency, limits: FetchLimits):
        self.buckets = list(buckets)
        self._consistency, self._limits = consistency, limits
        self._traces = {phase: _Trace() for phase in Phase}
        self._phase = Phase.EVALUATION
        self._idle: list[ParamBucket] = []
        self._stack: list[Scope] = []  # scopes whose forward is running, outermost first
        self._scopes_in_backward: set[Scope] = set()
        self._backward_open: dict[ParamBucket, int] = {}  # held by a backward use -> scopes whose input gradients are missing
        self._grads_complete: set[ParamBucket] = set()
        self._overlaps: set[tuple[ParamBucket, ParamBucket]] = set()  # held at the same time before slots were assigned
        self._slots_assigned = False

    # ---- forward -----------------------------------------------------------------------------------------------------

    @property
    def current_scope(self) -> Scope | None:
        """The innermost scope whose forward is running."""
        return self._stack[-1] if self._stack else None

    def start_forward(self, is_training: bool) -> None:
        """The outermost module's forward begins."""
        self._drop_holds()
        self._phase = Phase.FORWARD if is_training else Phase.EVALUATION
        if not self._slots_assigned and self._traces[Phase.BACKWARD].fetches:
            self._assign_slots()

    def end_forward(self) -> None:
        """The outermost module's forward is over. Raises: see `raise_failed_reads`."""
        self._end_phase()
        if self._phase is Phase.EVALUATION:
            self.raise_failed_reads(self.buckets)

    def enter(self, scope: Scope) -> None:
        """Gather what the scope's forward needs."""
        if self.is_recomputing(scope):
            for bucket in scope.buckets:
                bucket.finish_gather()
            return
        self._stack.append(scope)
        for bucket in scope.buckets:
            self._hold(bucket, scope)

    def leave(self, scope: Scope) -> None:
        """The scope's forward is over."""
        if scope not in self._stack:
            return
        while self._stack:  # an exception may have skipped the ends of inner scopes
            inner = self._stack.pop()
            for bucket in inner.buckets:
                self._unhold(bucket)
            if inner is scope:
                return

    def use_outside_scope(self, bucket: ParamBucket) -> None:
        """A parameter was read in a forward outside its own scopes: tie the bucket to the scope that is running."""
        scope = self.current_scope
        if bucket not in scope.buckets:
            scope.buckets.append(bucket)
            logger.debug("bucket %s is used by module %s as well; it will be gathered with it", bucket.name, scope.name)
        self._hold(bucket, scope)

    def is_recomputing(self, scope: Scope) -> bool:
        """The scope's backward is running, so a forward of it is a recomputation."""
        return scope.backward_uses > 0

    # ---- backward ----------------------------------------------------------------------------------------------------

    def start_backward(self) -> None:
        """A backward begins (told by the reducer)."""
        self._drop_holds()
        self._phase = Phase.BACKWARD
        self._grads_complete.clear()

    def end_backward(self) -> None:
        """The whole backward is over: nothing is in use."""
        self._backward_open.clear()
        for scope in self._scopes_in_backward:
            scope.backward_uses = 0
        self._scopes_in_backward.clear()
        self._end_phase()

    def enter_backward(self, scope: Scope, has_input_grads: bool) -> None:
        """Gather what the scope's backward needs. has_input_grads: `leave_backward` will be called for this use."""
        scope.backward_uses += 1
        self._scopes_in_backward.add(scope)
        for bucket in scope.buckets:
            if bucket not in self._backward_open:
                self._hold(bucket, scope)
                self._backward_open[bucket] = 0
            # Without input gradients the use ends with the bucket's own gradients. If none are to come, or the scope only
            # reads the bucket beside its own modules (and may do so after those gradients), it ends with the whole
            # backward: an opening that nobody closes.
            is_own = scope.module in bucket.spec.scopes and bucket.spec.is_trainable
            if has_input_grads or not is_own or bucket in self._grads_complete:
                self._backward_open[bucket] += 1

    def leave_backward(self, scope: Scope) -> None:
        """The gradients of the scope's inputs are computed."""
        scope.backward_uses = max(0, scope.backward_uses - 1)
        for bucket in scope.buckets:
            if self._backward_open.get(bucket, 0) > 0:
                self._backward_open[bucket] -= 1
                self._end_backward_use(bucket)

    def grads_complete(self, bucket: ParamBucket) -> None:
        """All gradients that the bucket had in the last backward have come (told by the reducer)."""
        self._grads_complete.add(bucket)
        self._end_backward_use(bucket)

    def _end_backward_use(self, bucket: ParamBucket) -> None:
        if self._backward_open.get(bucket) != 0:
            return
        if bucket in self._grads_complete or not bucket.spec.is_trainable:
            del self._backward_open[bucket]
            self._unhold(bucket)

    # ---- fetch and release -------------------------------------------------------------------------------------------

    def pin(self, buckets: Sequence[ParamBucket], why: str) -> None:
        """Gather buckets and keep them so until `unpin`, whatever runs meanwhile (GatheredParameters). Collective.

        Raises: see `raise_failed_reads`.
        """
        for bucket in buckets:
            if bucket.is_sharded and not bucket.is_held:
                bucket.release()
                bucket.storage.leave_slot()
            bucket.start_gather(why)
            bucket.finish_gather()
            bucket.pins += 1
        try:
            self.raise_failed_reads(buckets)
        except OffloadError:
            self.unpin(buckets)
            raise

    def raise_failed_reads(self, buckets: Sequence[ParamBucket]) -> None:
        """Raise OffloadError on every rank when one of them could not read its shard for a gather of these buckets: what was
        gathered is dropped (Note [Failed reads]). Collective where shards rest on a disk, else free."""
        on_disk = [bucket for bucket in buckets if bucket.shard_is_on_disk]
        if not on_disk:
            return
        failure = next((bucket.read_failure for bucket in on_disk if bucket.read_failure is not None), None)
        if not self._is_true_anywhere(failure is not None, on_disk[0].device):
            return
        for bucket in on_disk:
            bucket.read_failure = None
            bucket.shard_changed()
        raise_together(failure, self._consistency.group)

    def _is_true_anywhere(self, value: bool, device: torch.device) -> bool:
        group = self._consistency.group
        count = torch.tensor(int(value), device=device)
        if group.size > 1:
            work = comm.all_reduce(count, group=group.process_group, async_op=True)
            self._consistency.wait(work, "the check for failed reads")
        return count.item() > 0

    def unpin(self, buckets: Sequence[ParamBucket]) -> None:
        """End one `pin`."""
        for bucket in buckets:
            bucket.pins -= 1
            if bucket.is_sharded and not bucket.is_held:
                bucket.release()
                bucket.storage.return_to_slot()

    def release_all(self) -> None:
        """Release every sharded bucket that is not pinned, also what was gathered ahead."""
        self._drop_holds()

    @property
    def has_order(self) -> bool:
        """An order of execution is recorded."""
        return any(trace.fetches for trace in self._traces.values())

    def forget_order(self) -> None:
        """Record the order of execution anew. Every rank calls, between steps."""
        self._traces = {phase: _Trace() for phase in Phase}

    def finish_pending(self) -> None:
        """Wait for the gathers after an update, so that parameters that are kept whole show their values."""
        for bucket in self.buckets:
            if not bucket.is_sharded:
                bucket.finish_gather()

    def _hold(self, bucket: ParamBucket, scope: Scope) -> None:
        self._fetch(bucket, scope)
        if not bucket.is_sharded:
            return
        bucket.holds += 1
        if bucket.pins and self._phase is Phase.FORWARD:
            bucket.storage.keep_own()
        if not self._slots_assigned:
            self._overlaps.update((bucket, other) for other in self.buckets if other.holds and other is not bucket)

    def _unhold(self, bucket: ParamBucket) -> None:
        if not bucket.is_sharded or bucket.holds == 0:
            return
        bucket.holds -= 1
        if bucket.holds == 0 and bucket not in self._idle:
            self._idle.append(bucket)

    def _fetch(self, bucket: ParamBucket, scope: Scope) -> None:
        """Make the bucket's full values current; gather ahead what the record says comes next."""
        if not bucket.is_sharded:
            bucket.finish_gather()
            return
        if bucket in self._idle:
            self._idle.remove(bucket)
            if bucket.state is BucketState.FULL:
                return  # still gathered since its last use: not a fetch
        elif bucket.is_held:
            return
        self._release_idle()
        trace = self._traces[self._phase]
        is_known_order = bool(trace.fetches)
        if not trace.advance(bucket):
            if is_known_order and self._limits.logs_changes:
                logger.warning("%s left the recorded order at bucket %s (module %s)",
                               self._phase.value, bucket.name, scope.name)
            self._consistency.agree(f"{self._phase.value} {trace.position}: bucket {bucket.name} for module {scope.name}")
        bucket.start_gather(f"module {scope.name}")
        for later in trace.ahead()[:self._limits.read_depth]:
            later.read_ahead()
        self._prefetch(trace)
        bucket.finish_gather()

    def _prefetch(self, trace: _Trace) -> None:
        if self._limits.prefetch_numel == 0:
            return
        live = sum(bucket.full_numel for bucket in self.buckets
                   if bucket.is_sharded and bucket.state is not BucketState.SHARDED)
        ahead_numel = 0
        for bucket in trace.ahead()[:self._limits.prefetch_depth]:
            if bucket.state is not BucketState.SHARDED:
                continue
            ahead_numel += bucket.full_numel
            if self._limits.prefetch_numel is not None and ahead_numel > max(self._limits.prefetch_numel, bucket.full_numel):
                return
            if self._limits.live_numel is not None and live + ahead_numel > self._limits.live_numel:
                return
            if bucket.storage.is_busy_for(bucket):
                return
            bucket.start_gather("a module ahead")

    def _release_idle(self) -> None:
        for bucket in self._idle:
            if not bucket.is_held:
                self._release(bucket)
        self._idle.clear()

    def _release(self, bucket: ParamBucket) -> None:
        bucket.release()
        if self._limits.reuse_numel is not None and bucket.full_numel > self._limits.reuse_numel:
            bucket.storage.is_current = False  # a slot would keep the bytes for the next use

    def _drop_holds(self) -> None:
        """Nothing runs: release every sharded bucket that is not pinned."""
        self._stack.clear()
        self._idle.clear()
        for bucket in self.buckets:
            bucket.holds = 0
            if bucket.is_sharded and not bucket.pins and bucket.state is not BucketState.SHARDED:
                self._release(bucket)

    def _end_phase(self) -> None:
        self._drop_holds()
        trace = self._traces[self._phase]
        if trace.ended_early:  # other ranks may be about to gather what the record says comes next
            self._consistency.agree(f"{self._phase.value} to end after {trace.position} fetches")
        trace.rewind()

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _assign_slots(self) -> None:
        """Give sharded buckets of equal size shared buffers, in the order of the first forward (Note [Fixed slots])."""
        self._slots_assigned = True
        count = self._limits.prefetch_depth + 2
        families: dict[tuple[int, torch.dtype], list[ParamBucket]] = {}
        for bucket in dict.fromkeys(self._traces[Phase.FORWARD].fetches):
            if not bucket.pins:
                families.setdefault((bucket.full_numel, bucket.dtypes.param), []).append(bucket)
        for (numel, dtype), family in families.items():
            in_turn = [family[position::count] for position in range(count)]
            if len(family) <= count or any((a, b) in self._overlaps for turn in in_turn for a in turn for b in turn):
                continue
            for turn in in_turn:
                slot = Slot(numel, dtype, turn[0].device)
                for bucket in turn:
                    bucket.storage.move_to_slot(slot)
