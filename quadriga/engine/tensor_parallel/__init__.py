"""One model over several ranks: rank 0 leads, the others do their part of each operation."""
