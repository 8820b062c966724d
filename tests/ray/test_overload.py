"""Overload on live replicas: a short answer overtakes long ones that are held; all end whole."""

from __future__ import annotations

from typing import Any

import pytest

from actors.rpc.lookup import scheduler_name
from quadriga.core.request import FinishReason
from tests.ray.apps import App, app_fixture
from tests.ray.ingress import Stream, call
from tests.ray.moves import hold, set_pace
from tests.waiting import wait_until

MAX_LEN, NUM_LONG, LONG, SHORT = 256, 11, 120, 3
PROMPT = 100
"""Of a long one. Each decode replica has room for four of them as they come, whatever is forecast
of their answers, so three or more are held; and the two prefill replicas have memory for them."""
CAPACITY_TOKENS = 2 * MAX_LEN
TOKEN_BYTES = 8 * 2 * 2 * 32 * 4  # quadriga-s in float32


full = app_fixture(
    "overfull",
    **{
        "prefill_replicas": 2,
        "decode_replicas": 2,
        "decode.max_slots": 12,
        "decode.pace": "steady-60ms",
        "engine.max_model_len": MAX_LEN,
        "engine.kv_memory_bytes": CAPACITY_TOKENS * TOKEN_BYTES,
        "scheduler.ares.interval_s": 0.5,
        "lifecycle.orphan_timeout_s": 300.0,
    },
)
"""Two decode replicas, each with memory for two whole long answers and a short one."""


def overload(app: App) -> dict[str, Any]:
    found: dict[str, Any] = call(scheduler_name(app.name), "operators_view", timeout_s=10.0)
    return dict(found["overload"])


@pytest.mark.timeout(300)
def test_a_short_answer_overtakes_long_ones_that_are_held(full: App) -> None:
    replicas, ingress = full.replicas("decode"), full.ingress()
    for name in replicas:
        hold(name, 1.0)  # what runs outlasts what a busy machine does meanwhile
    long = [ingress.submit([5 + i] * PROMPT, LONG, deadline_s=250.0) for i in range(NUM_LONG)]
    ingress.until(lambda: overload(full).get("quadriga-s", {}).get("num_held", 0) >= 2, 150.0)
    plan = overload(full)["quadriga-s"]
    assert len(plan["protected"]) == 1 and plan["protected"][0] in replicas
    assert SHORT + 10 <= plan["short_tokens"] < LONG + PROMPT
    wait_until(lambda: full.metric("quadriga_overload_held_sequences") >= 2.0, 20.0)

    # Room that comes free on the protected replica is not for the long ones that wait.
    def there() -> list[Stream]:
        return [s for s in long if s.replica == plan["protected"][0] and len(s.tokens) > 1]

    ingress.until(lambda: bool(there()), 60.0)
    gone = there()[0]
    long.remove(gone)
    ingress.cancel(gone)
    short = ingress.submit([9] * 10, SHORT, deadline_s=200.0)
    ingress.finish(short, timeout_s=150.0)
    assert short.error is None
    over = [(len(s.tokens), s.finish, s.error) for s in long if s.is_over]
    assert not over, "it came last and was over first"
    for name in replicas:
        hold(name, 0.0)
        set_pace(name, None)
    ingress.finish(*long, timeout_s=200.0)
    assert [s.error for s in long] == [None] * len(long)
    assert {s.finish for s in long} == {FinishReason.LENGTH}
    assert all(len(s.token_ids) == LONG for s in long)
    wait_until(lambda: not overload(full), 60.0)
    full.until_idle()
