"""A process that tries grammars: one that never ends compiling, or eats all memory, ends it alone.

    python -m quadriga.text.grammar_worker

reads JSON lines: first the vocabulary (`tokenizer`, `vocab_size`, `end_ids`, `limit_s`), which it
answers with `{}`, then grammars (`kind`, `text`), each answered with `{"error": …}`, where "" means
that answers can have this form. It ends with its input, and by itself `limit_s` seconds into a
grammar.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time

from quadriga.core.grammar import Grammar
from quadriga.errors import InvalidRequest
from quadriga.text.grammar import TokenGrammars

MEMORY_BYTES = 3 << 30
"""Of address space, of which a vocabulary of 128,000 tokens takes less than half."""
TRIED_TOKENS = 8
"""An answer's first tokens: most grammars that need too much work for a token fail within them."""

TOKEN_LIMIT_S = 0.5
"""All answers of a batch wait while one's next tokens are looked for."""


def main() -> None:
    """Answer until the input ends."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    about = json.loads(sys.stdin.readline())
    grammars = TokenGrammars(about["tokenizer"], about["vocab_size"], about["end_ids"])
    _say({})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, about["limit_s"])  # its signal ends native code too
        error = fault(grammars, Grammar(**json.loads(line)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say({"error": error})


def fault(grammars: TokenGrammars, grammar: Grammar) -> str:
    """What is wrong with a grammar: it is none, or fails within its first tokens; else ""."""
    try:
        grammars.prepare(grammar)
    except InvalidRequest as exc:
        return exc.message
    matcher, said = grammars.matcher(grammar), list[int]()
    for _ in range(TRIED_TOKENS):
        began_s = time.monotonic()
        allowed = (~matcher.banned_after(said)).nonzero()[0]
        took_s = time.monotonic() - began_s
        if matcher.failure or took_s > TOKEN_LIMIT_S:
            return matcher.failure or (
                f"it takes {took_s:.1f} s for a token, above the limit of {TOKEN_LIMIT_S} s; make "
                "it simpler"
            )
        said.append(int(allowed[-1]))
        if said[-1] in grammars.end_ids:
            break
    return ""


def _say(answer: dict[str, str]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
