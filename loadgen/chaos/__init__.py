"""Break a running service in every way it promises to survive, and judge what its clients saw."""
