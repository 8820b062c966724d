"""What `simulate` and `paper ares` share: loads, figures, plots, the search for a capacity."""
