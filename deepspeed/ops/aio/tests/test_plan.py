"""Pieces of a transfer: complete, disjoint, aligned where they say so, and evenly shared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.ops.aio.plan import ALIGNMENT, MIN_SHARE_BYTES, Piece, plan_transfer

POSITIONS = st.one_of(st.integers(0, 3 * ALIGNMENT), st.integers(0, 2**40), st.integers(0, 2**20).map(lambda n: n * ALIGNMENT))
SIZES = st.one_of(st.integers(1, 3 * ALIGNMENT), st.integers(1, 2**33), st.integers(1, 2**12).map(lambda n: n * ALIGNMENT))


@given(num_bytes=SIZES, file_offset=POSITIONS, block_bytes=st.integers(1, 2**24), workers=st.integers(1, 9),
       first=st.integers(0, 8))
def test_pieces_cover_the_transfer_once(num_bytes, file_offset, block_bytes, workers, first):
    pieces = plan_transfer(num_bytes, file_offset, block_bytes, workers, first % workers)
    position = file_offset
    for piece in pieces:
        assert piece.file_offset == position and piece.buffer_offset == position - file_offset and piece.num_bytes > 0
        assert 0 <= piece.worker < workers
        position += piece.num_bytes
    assert position == file_offset + num_bytes


@given(num_bytes=SIZES, file_offset=POSITIONS, block_bytes=st.integers(1, 2**24), workers=st.integers(1, 9))
def test_only_whole_pages_are_aligned_and_less_than_two_pages_are_not(num_bytes, file_offset, block_bytes, workers):
    pieces = plan_transfer(num_bytes, file_offset, block_bytes, workers)
    partial = [piece for piece in pieces if not piece.is_aligned]
    for piece in pieces:
        assert not piece.is_aligned or (piece.file_offset % ALIGNMENT == 0 and piece.num_bytes % ALIGNMENT == 0)
    assert all(piece in (pieces[0], pieces[-1]) for piece in partial)
    assert sum(piece.num_bytes for piece in partial) < 2 * ALIGNMENT


@given(blocks=st.integers(1, 64), workers=st.integers(1, 9))
def test_shares_are_whole_blocks_and_differ_by_one_at_most(blocks, workers):
    block_bytes = 2**20
    pieces = plan_transfer(blocks * block_bytes, 0, block_bytes, workers)
    if blocks < workers:
        return
    shares = [piece.num_bytes / block_bytes for piece in pieces]
    assert len({piece.worker for piece in pieces}) == len(pieces) == workers
    assert all(share == int(share) for share in shares) and max(shares) - min(shares) <= 1


def test_one_block_is_shared_by_several_threads():
    pieces = plan_transfer(2**20, 0, 2**20, 4)
    assert [piece.num_bytes for piece in pieces] == [2**18] * 4 and [piece.worker for piece in pieces] == [0, 1, 2, 3]


def test_small_transfers_stay_on_one_thread_and_take_turns():
    for first in range(3):
        (piece,) = plan_transfer(MIN_SHARE_BYTES, 0, 2**20, 3, first)
        assert piece == Piece(0, 0, MIN_SHARE_BYTES, first, True)


def test_a_transfer_across_pages():
    assert plan_transfer(3 * ALIGNMENT, 100, 2**20, 2) == [
        Piece(0, 100, ALIGNMENT - 100, 0, False),
        Piece(ALIGNMENT - 100, ALIGNMENT, 2 * ALIGNMENT, 1, True),
        Piece(3 * ALIGNMENT - 100, 3 * ALIGNMENT, 100, 0, False),
    ]


def test_a_transfer_within_a_page():
    assert plan_transfer(10, 5, 2**20, 4) == [Piece(0, 5, 10, 0, False)]
    assert plan_transfer(ALIGNMENT - 5, 5, 2**20, 4) == [Piece(0, 5, ALIGNMENT - 5, 0, False)]
