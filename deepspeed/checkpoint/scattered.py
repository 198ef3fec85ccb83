"""Checkpoints whose files lie on the disks of several machines, each machine having some of them.

Note [Scattered files]: readers want all files of a checkpoint in one folder, but need few bytes of each. So every machine
gets a *view*: a folder with links to the files that it has and, for each of the others, a sparse file with everything but
the tensors, which is kilobytes. Then the loading is rehearsed: what it reads of the tensors of absent files is noted. The
machines that have those files send these bytes, which go into the sparse files, and the loading can take place. No machine
receives more than what its ranks keep.
"""
from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed import comm
from deepspeed.checkpoint.archive import Archive, is_archive, noting_reads, read_bytes
from deepspeed.comm.failures import attempt, raise_together
from deepspeed.comm.topology import Group
from deepspeed.errors import CheckpointError

Part = tuple[int, bytes]  # offset in a file, and the bytes there
Request = tuple[str, int, int]  # file, first byte, number of bytes


class ScatteredFolder:
    """A tag folder of which every rank sees a part. Collective over `world`.

    leads: whether this rank makes the view of its machine. device: where the world's group sends tensors from.
    """

    def __init__(self, folder: Path, world: Group, leads: bool, device: torch.device):
        self._folder, self._world, self._leads, self._device = folder, world, leads, device
        self.view = folder.parent / f".{folder.name}.view"
        sizes: list[dict[str, int]] = self._share(
            lambda: {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})
        self._owners: dict[str, int] = {}
        for rank, names in enumerate(sizes):
            for name in names:
                self._owners.setdefault(name, rank)
        self._mine = sizes[world.rank]
        self._all_sizes = {name: size for names in reversed(sizes) for name, size in names.items()}
        self.is_scattered = any(names.keys() != self._owners.keys() for names in sizes)

    def make_view(self) -> None:
        """Make the folder `view`, with the tensors of absent files missing."""
        wanted = {name for names in self._share(lambda: sorted(self._absent)) for name in names}
        sent = [name for name in wanted if self._owners[name] == self._world.rank]
        shared = self._share(lambda: {name: _without_tensors(self._folder / name) for name in sent})
        parts = {name: of_file for of_rank in shared for name, of_file in of_rank.items()}
        self._share(lambda: self._write_view(parts) if self._leads else None)

    def _write_view(self, parts: Mapping[str, Sequence[Part]]) -> None:
        shutil.rmtree(self.view, ignore_errors=True)
        self.view.mkdir()
        for name in self._mine:
            (self.view / name).symlink_to((self._folder / name).resolve())
        for name in parts.keys() - self._mine.keys():
            with open(self.view / name, "wb") as file:
                file.truncate(self._all_sizes[name])
                for offset, content in parts[name]:
                    file.seek(offset)
                    file.write(content)

    def fetch(self, rehearse: Callable[[], Any]) -> None:
        """Bring the bytes that `rehearse` reads of absent files into the view."""
        requests = self._share(lambda: self._note(rehearse))
        me = self._world.rank
        outgoing = [[request for request in of_rank if self._owners[request[0]] == me] for of_rank in requests]
        incoming = [[request for request in requests[me] if self._owners[request[0]] == rank]
                    for rank in range(self._world.size)]
        received = self._exchange(outgoing, incoming)
        self._share(lambda: self._fill(received, [request for row in incoming for request in row]))

    @property
    def _absent(self) -> set[str]:
        return self._owners.keys() - self._mine.keys()

    def _note(self, rehearse: Callable[[], Any]) -> list[Request]:
        with noting_reads({self.view / name for name in self._absent}) as notes:
            rehearse()
        return [(path.name, start, count) for path, start, count in dict.fromkeys(notes)]

    def _fill(self, received: memoryview, requests: Sequence[Request]) -> None:
        position = 0
        for name, start, count in requests:
            with open(self.view / name, "r+b", buffering=0) as file:
                file.seek(start)
                file.write(received[position:position + count])
            position += count

    def remove_view(self) -> None:
        """Remove the view when no rank reads it any more."""
        self._share(lambda: None)
        if self._leads:
            shutil.rmtree(self.view, ignore_errors=True)

    def _exchange(self, outgoing: Sequence[Sequence[Request]], incoming: Sequence[Sequence[Request]]) -> memoryview:
        data = bytearray()

        def read() -> None:
            for name, start, count in (request for row in outgoing for request in row):
                data.extend(read_bytes(self._folder / name, start, count))

        self._share(read)
        send = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        receive_bytes = [sum(count for _, _, count in row) for row in incoming]
        received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=self._device)
        comm.all_to_all_single(received, send.to(self._device), receive_bytes,
                               [sum(count for _, _, count in row) for row in outgoing], group=self._world.process_group)
        return memoryview(received.cpu().numpy())

    def _share(self, action: Callable[[], Any]) -> list[Any]:
        """Return what `action` returns on every rank; if it fails on one, raise the same CheckpointError on all."""
        result, failure = attempt(action)
        told = [(result, None if failure is None else str(failure))] * self._world.size
        if self._world.size > 1:
            comm.all_gather_object(told, told[0], group=self._world.process_group)
        raise_together([text for _, text in told],
                       lambda found: CheckpointError(f"{self._folder} cannot be loaded: {found}."), cause=failure)
        return [value for value, _ in told]


def _without_tensors(path: Path) -> list[Part]:
    """Return the parts of a file that are not tensors; all of it if it is no archive."""
    size = path.stat().st_size
    tensors = Archive(path).tensor_ranges() if is_archive(path) else []
    parts, position = [], 0
    for start, stop in [*sorted(tensors), (size, size)]:
        if start < position:
            raise CheckpointError(f"{path}: records overlap, so it is damaged. Load an earlier tag.")
        if start > position:
            parts.append((position, bytes(read_bytes(path, position, start - position))))
        position = stop
    return parts
