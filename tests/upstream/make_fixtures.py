"""Write the checkpoint folders of `fixtures/`. Run where upstream 0.19.8 is installed:

    python tests/upstream/make_fixtures.py

Every case of `cases.py` leaves `fixtures/<name>/`: `latest`, the tag folder, and `expected.pt` (see `training.write`).
The scripts that upstream puts beside a checkpoint are its own source and are removed unread.
"""
from __future__ import annotations

from pathlib import Path

from folders import main

if __name__ == "__main__":
    main(__file__, __doc__, of_upstream=True, default=Path(__file__).resolve().parent / "fixtures")
