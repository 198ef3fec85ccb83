"""Which ranks of a pipeline x tensor grid hold what a rank of a smaller grid will hold."""
from __future__ import annotations

from typing import Any

from deepspeed.checkpoint.reshape_utils import partition_data
from deepspeed.errors import CheckpointError


class meg_2d_parallel_map:  # public path
    """A list of data for each place of a grid of `pp_degree` pipeline stages of `tp_degree` tensor ranks.

    map: "pp,tp" -> list, for the places that have data.
    """

    def __init__(self, pp_degree: int, tp_degree: int):
        self.pp_degree, self.tp_degree = pp_degree, tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Give each place its own number, counted along the tensor ranks first."""
        self.map = {self._key(index // self.tp_degree, index % self.tp_degree): [index]
                    for index in range(self.pp_degree * self.tp_degree)}

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append the entries of the list `data` to those of a place."""
        self._check(pp_index, tp_index)
        if type(data) is not list:
            raise CheckpointError(f"data of a place is a list, not {data!r}.")
        self.map.setdefault(self._key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """Return the entries of a place; None stands for all stages or all tensor ranks.

        Raises: CheckpointError for a place outside the grid, KeyError for one without data.
        """
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        for pp, tp in ((pp, tp) for pp in stages for tp in ranks):
            self._check(pp, tp)
        return [entry for pp in stages for tp in ranks for entry in self.map[self._key(pp, tp)]]

    def print_data(self, tag: str | None) -> None:
        """Print the entries of each place, after `tag` when there is one."""
        if tag:
            print(tag)
        for place, entries in self.map.items():
            print(f"{place} = {entries}")

    def _check(self, pp_index: int, tp_index: int) -> None:
        if not (0 <= pp_index < self.pp_degree and 0 <= tp_index < self.tp_degree):
            raise CheckpointError(f"pipeline stage {pp_index}, tensor rank {tp_index} is outside a grid of "
                                  f"{self.pp_degree} x {self.tp_degree}.")

    @staticmethod
    def _key(pp_index: int, tp_index: int) -> str:
        return f"{pp_index},{tp_index}"


def reshape_meg_2d_parallel(old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int,
                            verbose: bool = False) -> meg_2d_parallel_map:
    """Return which places of an old grid, by number, each place of a new one takes over.

    First neighbouring tensor ranks are joined, then neighbouring stages. verbose: print the three maps.
    Raises: CheckpointError when a new degree does not divide the old one.
    """
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    after_tp = meg_2d_parallel_map(old_pp_degree, new_tp_degree)
    for pp in range(old_pp_degree):
        for tp, data in enumerate(partition_data(old.get_data(pp_index=pp), new_tp_degree)):
            after_tp.add_data(pp, tp, data)
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    for tp in range(new_tp_degree):
        for pp, data in enumerate(partition_data(after_tp.get_data(tp_index=tp), new_pp_degree)):
            new.add_data(pp, tp, data)
    if verbose:
        for tag, grid in (("original_2d_map:", old), ("after_tp_reshape:", after_tp), ("final_2d_map:", new)):
            grid.print_data(tag)
    return new
