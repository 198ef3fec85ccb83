"""Public paths of updates that begin during backward."""
