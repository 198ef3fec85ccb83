"""Files exchanged with upstream; README.md tells how the fixtures were made and how the other direction is checked."""
