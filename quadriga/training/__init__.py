"""The bundled model family: tasks, tokenizer, models, training, evaluation.

Importing this package, or `quadriga.tasks`, loads neither torch nor ray.
"""
