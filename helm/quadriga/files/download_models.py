"""Fetch models into the volume. Each folder gets a marker when it is complete."""

import json
import os
import pathlib
import sys

from huggingface_hub import snapshot_download

from quadriga.checkpoint.folder import HUB_IGNORED, HUB_PATTERNS
from quadriga.files import write_atomically
from serve_app.fetched_models import FETCHED_FILE


def main() -> int:
    for model in json.loads(os.environ["MODELS"]):
        origin = f"{model['repo']}@{model['revision']}"
        folder = pathlib.Path(model["path"])
        marker = folder / FETCHED_FILE
        held = marker.read_text(encoding="utf-8") if marker.is_file() else None
        if held == origin:
            print(f"{folder}: {origin} is there", flush=True)
            continue
        if held is not None:
            print(
                f"{folder} holds {held}, which replicas may be reading, and not {origin}; delete "
                "the folder first, or name a revision, which has one of its own"
            )
            return 1
        print(f"{folder}: fetching {origin}", flush=True)
        snapshot_download(
            model["repo"],
            revision=model["revision"],
            local_dir=folder,
            allow_patterns=HUB_PATTERNS,
            ignore_patterns=HUB_IGNORED,
        )
        if not (folder / "config.json").is_file():
            print(f"{folder}: {origin} holds no config.json, so it is no model")
            return 1
        write_atomically(marker, origin.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
