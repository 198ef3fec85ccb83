"""UlyssesSPAttentionHF: the attention of a Hugging Face model over sequences that are spread over ranks.

Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509); Bekman et al., "Arctic Long Sequence Training"
(arXiv:2506.13996), section 3.2.

Note [Whole masks]: a model sees a piece of each sequence, but its attention sees whole sequences, so masks must be
those of whole sequences. A hook at the beginning of the model's forward joins the ranks' padding masks and positions
into a `SequenceView`; while the forward runs, masks are made from it (`registration.py`), by transformers' own
functions and with whatever pattern the layers ask for: causal, sliding window, bidirectional. Packed documents are told
apart by positions that do not go up by one, as transformers does it, when the batch has no attention mask.
"""
from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import ProcessGroup
from deepspeed.errors import PlanError, UsageError
from deepspeed.runtime.sequence_parallel.parallel_state_sp import SequenceParallelState, initialize_sequence_parallel
from deepspeed.sequence.exchange import split_heads, to_heads, to_sequence

logger = logging.getLogger(__name__)

HEAD_DIM, SEQUENCE_DIM = 1, 2  # of query, key and value: [batch, heads, sequence, size]
NO_MASK, PADDING_MASK, OTHER_MASK = range(3)


@dataclass(frozen=True)
class SequenceView:
    """What the ranks hold together in one forward, Note [Whole masks].

    local_length, length: tokens of this rank and of the whole sequence. padding: [batch, length], True where there is a
    token; None if there is no attention mask. documents: [batch, length], the number of each token's packed document,
    or None.
    """

    owner: nn.Module
    local_length: int
    length: int
    padding: torch.Tensor | None
    documents: torch.Tensor | None


class UlyssesSPAttentionHF(nn.Module):
    """Runs an attention function of transformers on all tokens of this rank's heads.

    attn: the function, called as (module, query, key, value, attention_mask, ...). batch_size, attn_head_count,
    attn_head_size, kv_head_count, num_hidden_layers: of the model; layers may differ from them. process_group: the
    ranks that share each sequence. seq_length_is_variable: whether lengths may differ from `local_seq_length` and
    `global_seq_length`, the tokens of a rank and of a whole sequence. disable_in_eval: in evaluation mode every rank
    runs sequences of its own.
    """

    def __init__(self, attn: Callable[..., Any], batch_size: int | None, attn_head_count: int, attn_head_size: int,
                 kv_head_count: int, num_hidden_layers: int, process_group: ProcessGroup,
                 seq_length_is_variable: bool = False, local_seq_length: int | None = None,
                 global_seq_length: int | None = None, disable_in_eval: bool = False) -> None:
        super().__init__()
        if not seq_length_is_variable and (local_seq_length is None or global_seq_length is None):
            raise UsageError("seq_length_is_variable is False, which needs local_seq_length and global_seq_length.")
        self.attn = attn
        self.batch_size, self.num_hidden_layers = batch_size, num_hidden_layers
        self.attn_head_count, self.attn_head_size, self.kv_head_count = attn_head_count, attn_head_size, kv_head_count
        self.process_group = process_group
        self.world_size, self.rank = comm.get_world_size(process_group), comm.get_rank(process_group)
        self.seq_length_is_variable = seq_length_is_variable
        self.local_seq_length, self.global_seq_length = local_seq_length, global_seq_length
        self.disable_in_eval = disable_in_eval
        self.view: SequenceView | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._calls = 0  # since the running forward began
        self._positions: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        split_heads(attn_head_count, kv_head_count, self.world_size)

    def forward(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Return (context of this rank's tokens [batch, local sequence, heads, size], None).

        query, key, value: [batch, heads, local sequence, size] with all heads. attention_mask: of whole sequences.
        Attention weights are not returned: each rank has those of some heads only.
        Raises: UsageError for a mask of local sequences, another sequence length than agreed, or biases per head.
        """
        if self._is_off(module):
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)
        self._calls += 1
        self._check(query, attention_mask, kwargs)
        split = split_heads(query.shape[HEAD_DIM], key.shape[HEAD_DIM], self.world_size)
        query, key, value = to_heads((query, key, value), (split.queries, split.keys, split.keys), self.process_group,
                                     head_dim=HEAD_DIM, sequence_dim=SEQUENCE_DIM)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = self._whole_positions(kwargs["position_ids"])
        if kwargs.get("s_aux") is not None:  # one learned sink per head
            own = split.queries[self.rank]
            kwargs["s_aux"] = kwargs["s_aux"][own[0]:own[-1] + 1]
        with _key_value_groups(module, split.group_size(self.rank)):
            context = self.attn(module, query, key, value, attention_mask, *args, **kwargs)[0]
        widths = [len(heads) for heads in split.queries]
        return to_sequence(context, widths, self.process_group, head_dim=2, sequence_dim=1), None

    @classmethod
    def register_with_transformers(
        cls, model_name_or_path: Any, core_attn_implementation: str | None, sequence_parallel_size: int,
        micro_batch_size: int | None, seq_length: int | None = None, seq_length_is_variable: bool = True,
        disable_in_eval: bool = False, max_length: int | None = None,
    ) -> SequenceParallelState:
        """Make a model's attention run over `sequence_parallel_size` ranks; return the mpu for `deepspeed.initialize`.

        model_name_or_path: a model of transformers (also inside a PEFT model); or the name or path of its
        configuration, and then the model given to `deepspeed.initialize` together with the mpu.
        core_attn_implementation: the attention to run, "sdpa", "flash_attention_2", "eager" ...; None keeps the model's
        own. micro_batch_size: of one rank. seq_length: of whole sequences, needed unless `seq_length_is_variable`;
        `max_length` is its old name. disable_in_eval: in evaluation mode every rank runs whole sequences of its own.
        Every rank must call.
        Raises: PlanError if the sizes do not fit the ranks or the model; UsageError for a model whose layers exchange
        tokens in other ways than attention.
        """
        from deepspeed.runtime.sequence_parallel.registration import attach, config_of

        if not comm.is_initialized():
            comm.init_distributed(dist_backend=get_accelerator().communication_backend_name())
        seq_length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and (seq_length is None or seq_length % sequence_parallel_size):
            raise PlanError(f"seq_length is {seq_length}; with seq_length_is_variable=False it must be a multiple of "
                            f"the sequence-parallel size {sequence_parallel_size}.")
        state = initialize_sequence_parallel(sequence_parallel_size)
        config = config_of(model_name_or_path)
        heads = config.num_attention_heads
        fixed = None if seq_length_is_variable else seq_length
        ulysses = cls(
            _not_registered, micro_batch_size, heads, getattr(config, "head_dim", None) or config.hidden_size // heads,
            getattr(config, "num_key_value_heads", None) or heads, config.num_hidden_layers,
            state.get_sequence_parallel_group(), seq_length_is_variable=seq_length_is_variable,
            local_seq_length=None if fixed is None else fixed // sequence_parallel_size, global_seq_length=fixed,
            disable_in_eval=disable_in_eval)
        if isinstance(model_name_or_path, nn.Module):
            attach(ulysses, model_name_or_path, core_attn_implementation)
            return state
        return state.with_preparation(lambda model: attach(ulysses, model, core_attn_implementation))

    # ---- the model's forward, Note [Whole masks] ---------------------------------------------------------------------

    def bind(self, model: nn.Module, core: Callable[..., Any]) -> None:
        """Become the attention of `model`, with `core` as the attention function."""
        self._model, self.attn = weakref.ref(model), core

    def begin_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Join what the ranks hold into `view`; return the forward's (args, kwargs) with positions and a mask in them.

        Called before the forward of the model and of the models inside it; the outermost one counts.
        Raises: UsageError on every rank if the ranks' batches do not fit together or a mask is not [batch, sequence].
        """
        if self.view is not None or self._is_off(model):
            return None
        names = [name for name, parameter in inspect.signature(model.forward).parameters.items()
                 if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        kwargs = {**dict(zip(names, args)), **kwargs}
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        if tokens is None:
            raise UsageError("sequence parallelism needs input_ids or inputs_embeds in the call of "
                             f"{type(model).__name__}.")
        batch, local = tokens.shape[:2]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        kind = NO_MASK if mask is None else PADDING_MASK if torch.is_tensor(mask) and mask.ndim == 2 else OTHER_MASK
        has_positions = torch.is_tensor(positions) and positions.ndim <= 2
        self._compare((batch, local, kind, int(has_positions)), tokens.device)
        padding = documents = None
        if kind == PADDING_MASK:
            padding = self._gather(mask.ne(0))
        elif has_positions:
            documents = _find_documents(self._gather(positions.expand(batch, local)))
        self.view = SequenceView(model, local, local * self.world_size, padding, documents)
        self._calls = 0
        if kind == NO_MASK and "attention_mask" in names:  # else the model looks for packed documents in its piece
            kwargs["attention_mask"] = torch.ones(batch, local, dtype=torch.long, device=tokens.device)
        if positions is None and "position_ids" in names:
            start = self.rank * local
            kwargs["position_ids"] = torch.arange(start, start + local, device=tokens.device).expand(batch, -1)
        return (), kwargs

    def end_forward(self, model: nn.Module, has_failed: bool = False) -> None:
        """Forget `view`. Raises: UsageError if no layer's attention came through here: that would be silently wrong."""
        if self.view is None or self.view.owner is not model:
            return
        self.view = None
        if self._calls == 0 and not has_failed:
            raise UsageError(f"the attention of {type(model).__name__} did not go through transformers' attention "
                             "interface, so every rank attended to its own tokens only. This model cannot use "
                             "sequence parallelism.")

    def _compare(self, mine: tuple[int, int, int, int], device: torch.device) -> None:
        theirs = torch.empty(self.world_size * len(mine), dtype=torch.long, device=device)
        comm.all_gather_into_tensor(theirs, torch.tensor(mine, device=device), group=self.process_group)
        rows = theirs.view(self.world_size, -1).tolist()
        if any(row != rows[0] for row in rows):
            raise UsageError("the ranks of a sequence-parallel group run different batches: (batch, tokens, mask, "
                             f"positions) are {rows}. Take them from a UlyssesSPDataLoaderAdapter.")
        if mine[2] == OTHER_MASK:
            raise UsageError("sequence parallelism needs an attention mask [batch, sequence] or none. Pass "
                             "position_ids that start anew with each packed document instead of a mask of token "
                             "pairs.")
        if not self.seq_length_is_variable and mine[1] != self.local_seq_length:
            raise UsageError(f"the sequence has {mine[1] * self.world_size} tokens, but seq_length is "
                             f"{self.global_seq_length} and seq_length_is_variable is False.")

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return [batch, length] of all ranks' [batch, local length]."""
        is_bool = local.dtype == torch.bool
        local = (local.to(torch.uint8) if is_bool else local).contiguous()
        whole = local.new_empty((self.world_size * local.shape[0], local.shape[1]))
        comm.all_gather_into_tensor(whole, local, group=self.process_group)
        whole = whole.view(self.world_size, *local.shape).transpose(0, 1).reshape(local.shape[0], -1)
        return whole.bool() if is_bool else whole

    def _whole_positions(self, local: torch.Tensor) -> torch.Tensor:
        """Return positions of whole sequences; all layers of a forward pass the same tensor, which is gathered once."""
        if local.ndim != 2:
            return local
        if self._positions is None or self._positions[0]() is not local:
            self._positions = (weakref.ref(local), self._gather(local))
        return self._positions[1]

    def _is_off(self, module: nn.Module) -> bool:
        model = None if self._model is None else self._model()
        return self.world_size == 1 or (self.disable_in_eval and not (module if model is None else model).training)

    def _check(self, query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        local = query.shape[SEQUENCE_DIM]
        if torch.is_tensor(mask) and mask.shape[-1] != local * self.world_size:
            raise UsageError(f"the attention mask has shape {tuple(mask.shape)}, but {self.world_size} ranks with "
                             f"{local} tokens each need one of {local * self.world_size} tokens. Let the model make "
                             "its mask with transformers' mask functions.")
        if not self.seq_length_is_variable and local != self.local_seq_length:
            raise UsageError(f"a rank has {local} tokens, but local_seq_length is {self.local_seq_length} and "
                             "seq_length_is_variable is False.")
        if kwargs.get("position_bias") is not None:
            raise UsageError("attention with a bias per head and position cannot be spread over sequence-parallel "
                             "ranks.")


def _not_registered(*args: Any, **kwargs: Any) -> Any:
    raise UsageError("the model has not been seen yet: pass it to deepspeed.initialize together with the mpu.")


def _find_documents(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the document of every token, [batch, sequence], or None if each row is one document."""
    starts = positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1
    return starts.cumsum(dim=-1) if starts.any() else None


@contextmanager
def _key_value_groups(module: nn.Module, group_size: int) -> Iterator[None]:
    """Let attention functions repeat key heads as often as this rank's heads need it."""
    whole = getattr(module, "num_key_value_groups", None)
    if whole in (None, group_size):
        yield
        return
    module.num_key_value_groups = group_size
    try:
        yield
    finally:
        module.num_key_value_groups = whole
