"""Wait until every model's folder is complete; its marker is written last."""

import json
import os
import pathlib
import sys
import time

MARKER = ".quadriga-complete"
POLL_INTERVAL_S = 2.0


def main() -> int:
    models = json.loads(os.environ["MODELS"])
    deadline_s = time.monotonic() + float(os.environ["TIMEOUT_S"])
    for model in models:
        marker = pathlib.Path(model["path"]) / MARKER
        origin = f"{model['repo']}@{model['revision']}"
        while not marker.is_file() or marker.read_text(encoding="utf-8") != origin:
            if time.monotonic() > deadline_s:
                print(f"{model['path']}: {origin} is not there; see the download job's log")
                return 1
            time.sleep(POLL_INTERVAL_S)
        print(f"{model['path']}: {origin} is complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
