"""Give a model what it was not trained with: early exits, maps for skipped KV, length heads.

`python -m quadriga.tune MODEL --out DIR` generates with the model itself and learns from what it
says; the model's own weights stay as they are. See docs/own-models.md.
"""
