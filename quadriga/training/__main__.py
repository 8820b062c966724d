"""Command line: `python -m quadriga.training {tokenizer,train,evaluate,export}`."""

from quadriga.training.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
