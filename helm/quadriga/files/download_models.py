"""Fetch models into the volume. Each folder gets a marker when it is complete."""

import json
import os
import pathlib
import sys

from huggingface_hub import snapshot_download

MARKER = ".quadriga-complete"
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def main() -> int:
    for model in json.loads(os.environ["MODELS"]):
        origin = f"{model['repo']}@{model['revision']}"
        folder = pathlib.Path(model["path"])
        marker = folder / MARKER
        if marker.is_file() and marker.read_text(encoding="utf-8") == origin:
            print(f"{folder}: {origin} is there", flush=True)
            continue
        marker.unlink(missing_ok=True)
        print(f"{folder}: fetching {origin}", flush=True)
        snapshot_download(
            model["repo"],
            revision=model["revision"],
            local_dir=folder,
            allow_patterns=PATTERNS,
        )
        if not (folder / "config.json").is_file():
            print(f"{folder}: {origin} holds no config.json, so it is no model")
            return 1
        marker.write_text(origin, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
