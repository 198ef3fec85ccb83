"""UlyssesSPDataLoaderAdapter: from whole sequences, others on every rank, to pieces of the same ones on all ranks."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from deepspeed import comm
from deepspeed.comm import ProcessGroup
from deepspeed.errors import UsageError

IGNORED_LABEL = -100
SEQUENCE_DIM = 1
TOKEN_KEYS = ("input_ids", "inputs_embeds", "labels", "shift_labels")  # the first one there tells the sequence length


class BatchError(UsageError, ValueError):
    """A batch cannot be shared by the ranks of a sequence-parallel group."""


class UlyssesSPDataLoaderAdapter(IterableDataset):
    """Yields the batches of all ranks of a sequence-parallel group in turn, of each the piece that this rank holds.

    Each rank reads a batch of its own from `dl`; then the ranks work through these batches together, one after the
    other, so that nothing is read twice: there are `sp_world_size` batches here for one of `dl`.

    dl: yields dictionaries. Tensors [batch, sequence, ...] as long as the batch's tokens are cut along the sequence;
    everything else goes to all ranks as it is. `position_ids` are added where missing; `labels` become `shift_labels`,
    the labels of the next token, so that the cut separates no token from its label. sp_rank, sp_group, sp_world_size:
    this rank's place and its group. device: where tensors are sent and yielded.

    Attributes that it does not have itself are those of `dl`. As `dataset` it gives itself, for those who make a new
    loader of it to skip batches: they get pieces, too.
    """

    # for a new loader made of this one: it yields batches, and collectives forbid reading ahead in other processes
    batch_size = collate_fn = prefetch_factor = worker_init_fn = multiprocessing_context = generator = None
    num_workers = timeout = 0
    drop_last = pin_memory = persistent_workers = False

    def __init__(self, dl: Iterable[dict[str, Any]], sp_rank: int, sp_group: ProcessGroup, sp_world_size: int,
                 device: torch.device | str) -> None:
        self.dl = dl
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # not there yet: a copy or an unpickled object in the making
            raise AttributeError(name)
        return getattr(self.dl, name)

    @property
    def dataset(self) -> UlyssesSPDataLoaderAdapter:
        """The adapter itself."""
        return self

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.dl)
        while True:
            yielded = self._share(next(batches, None))
            if yielded is None:
                return
            yield from yielded

    def _share(self, batch: dict[str, Any] | None) -> list[dict[str, Any]] | None:
        """Return this rank's piece of every rank's batch, None at the end. All ranks of the group must call.

        Raises: BatchError on every rank if any rank's batch cannot be cut or only some ranks have one.
        """
        pieces: list[dict[str, Any]] = []
        problem = None
        try:
            pieces = [] if batch is None else cut(batch, self.sp_world_size)
        except BatchError as error:
            problem = str(error)
        manifest = (problem, batch is None, [_describe(piece) for piece in pieces])
        manifests: list[Any] = [None] * self.sp_world_size
        comm.all_gather_object(manifests, manifest, group=self.sp_group)
        problems = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(manifests) if text is not None]
        ended = [rank for rank, (_, is_end, _) in enumerate(manifests) if is_end]
        if problems:
            raise BatchError("; ".join(problems))
        if len(ended) == self.sp_world_size:
            return None
        if ended:
            raise BatchError(f"the loaders of ranks {ended} of the sequence-parallel group have ended, others have "
                             "not. Give every rank as many batches (an even sampler, or drop_last=True).")
        return self._exchange(pieces, [described[self.sp_rank] for _, _, described in manifests])

    def _exchange(self, pieces: Sequence[dict[str, Any]], coming: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send piece r to rank r as bytes, and return the pieces received, by the rank that they come from."""
        sent = [[_to_bytes(value, self.device) for value in piece.values() if torch.is_tensor(value)]
                for piece in pieces]
        flat = torch.cat([part for parts in sent for part in parts])
        incoming = [sum(value.nbytes for value in piece.values() if isinstance(value, _Tensor)) for piece in coming]
        received = flat.new_empty(sum(incoming))
        comm.all_to_all_single(received, flat, output_split_sizes=incoming, group=self.sp_group,
                               input_split_sizes=[sum(part.numel() for part in parts) for parts in sent])
        return [_unpack(part, piece) for part, piece in zip(received.split(incoming), coming, strict=True)]


def cut(batch: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Return the pieces of a batch for every rank, with `position_ids` and `shift_labels` as the adapter says.

    Raises: BatchError for a batch that is no dictionary with tokens, or whose sequence does not split into equal
    pieces.
    """
    if not isinstance(batch, dict) and not hasattr(batch, "keys"):
        raise BatchError(f"a batch is a {type(batch).__name__}; sequence parallelism needs dictionaries with "
                         "input_ids or inputs_embeds. Let the collate function return one.")
    batch = dict(batch)
    tokens = next((batch[key] for key in TOKEN_KEYS
                   if torch.is_tensor(batch.get(key)) and batch[key].ndim > SEQUENCE_DIM), None)
    if tokens is None:
        raise BatchError(f"a batch has {sorted(batch)}; sequence parallelism needs a tensor [batch, sequence, ...] "
                         f"under one of {', '.join(TOKEN_KEYS)}.")
    length = tokens.shape[SEQUENCE_DIM]
    if length % ranks:
        raise BatchError(f"a batch has sequences of {length} tokens, which {ranks} sequence-parallel ranks do not "
                         f"divide. Pad them to a multiple of {ranks} (pad_to_multiple_of={ranks} of the collator; "
                         f"labels with {IGNORED_LABEL}).")
    if batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(length, device=tokens.device).expand(len(tokens), -1)
    labels = batch.pop("labels", None)
    if batch.get("shift_labels") is None and labels is not None:
        batch["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    for key, value in batch.items():
        if torch.is_tensor(value) and value.ndim > 2 and value.shape[-2:] == (length, length):
            raise BatchError(f"{key} has shape {tuple(value.shape)}: a mask of token pairs cannot be cut. Pass an "
                             "attention mask [batch, sequence], or position_ids that start anew with each packed "
                             "document.")
    return [{key: _piece_of(key, value, length, rank, ranks) for key, value in batch.items()} for rank in range(ranks)]


def _piece_of(key: str, value: Any, length: int, rank: int, ranks: int) -> Any:
    if not torch.is_tensor(value):
        return value
    # rotary positions in several directions are [directions, batch, sequence]
    dim = value.ndim - 1 if key == "position_ids" else SEQUENCE_DIM
    if value.ndim <= SEQUENCE_DIM or value.shape[dim] != length:
        return value
    return value.narrow(dim, rank * (length // ranks), length // ranks)


class _Tensor:
    """Shape and type of a tensor that is on its way."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.nbytes = tensor.numel() * tensor.element_size()


def _describe(piece: dict[str, Any]) -> dict[str, Any]:
    return {key: _Tensor(value) if torch.is_tensor(value) else value for key, value in piece.items()}


def _to_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device).contiguous().view(-1).view(torch.uint8)


def _unpack(flat: torch.Tensor, piece: dict[str, Any]) -> dict[str, Any]:
    parts = iter(flat.split([value.nbytes for value in piece.values() if isinstance(value, _Tensor)]))
    return {key: next(parts).clone().view(value.dtype).view(value.shape) if isinstance(value, _Tensor) else value
            for key, value in piece.items()}
