"""Models in GGUF files: each becomes a Hugging Face checkpoint folder in the cache, once.

`header` reads the file, `model_config`, `tensors` and `tokenizer` translate its parts,
`checkpoint_folder` writes the folder and `cache` finds it again. No torch.
"""

from quadriga.gguf.cache import converted_folder

__all__ = ["converted_folder"]
