"""One rank's failure is everybody's."""
from __future__ import annotations

import pytest

from deepspeed.comm.failures import attempt, raise_together
from deepspeed.errors import CheckpointError, OffloadError


def test_an_attempt_gives_the_result_or_the_error() -> None:
    assert attempt(lambda: 3) == (3, None)
    result, failure = attempt(lambda: 1 // 0)
    assert result is None and isinstance(failure, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0, OffloadError)


def test_the_error_names_each_text_once_with_its_ranks() -> None:
    own = OSError("full")
    with pytest.raises(CheckpointError) as caught:
        raise_together(["full", None, "gone", "full"], lambda found: CheckpointError(f"not saved: {found}."), cause=own)
    assert str(caught.value) == "not saved: rank 0, 3: full; rank 2: gone." and caught.value.__cause__ is own
    with pytest.raises(OffloadError, match="^rank 6: full$"):
        raise_together([None, "full"], OffloadError, ranks=(2, 6))
    raise_together([None, None], OffloadError)
