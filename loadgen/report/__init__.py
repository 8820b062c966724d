"""Figures of a run or an experiment: computed, written to files, printed, drawn."""
