"""Write checkpoints with this package for upstream to read. Run where this package's requirements are installed:

    PYTHONPATH=. python tests/upstream/write_ours.py FOLDER

Every case of `cases.py` leaves `FOLDER/<name>/`, as `make_fixtures.py` does with upstream; then `check_exchange.py`
runs on FOLDER in upstream's environment.
"""
from __future__ import annotations

from folders import main

if __name__ == "__main__":
    main(__file__, __doc__, of_upstream=False)
