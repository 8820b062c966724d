"""`python -m quadriga.tune`."""

from quadriga.tune.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
