"""Requests that can be resumed, by owner and idempotency key."""

from __future__ import annotations

from quadriga.errors import InvalidRequest
from serve_app.request.request import Request

MAX_KEPT_REQUESTS = 4096
MAX_KEPT_TOKENS = 16 << 20
"""Of those that ended, prompts included: some hundred megabytes."""
MAX_KEY_LENGTH = 256


class RequestStore:
    """Requests under way that have a key, and ended ones for a while.

    Args:
        keep_s: How long a request is kept that has no reader, or that ended.
    """

    def __init__(self, *, keep_s: float) -> None:
        self._keep_s = keep_s
        self._by_key: dict[tuple[str, str], Request] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, request: Request) -> None:
        if request.key is not None:
            self._by_key[request.key] = request

    def find(self, key: tuple[str, str], fingerprint: bytes) -> Request | None:
        """Return the request under this key; None too where another ingress has taken it over.

        Raises: InvalidRequest when the key belongs to a different request.
        """
        request = self._by_key.get(key)
        if request is not None and request.fingerprint != fingerprint:
            raise InvalidRequest(
                "this idempotency key was used for a different request; use a new key",
                param="idempotency-key",
                code="idempotency_key_reused",
            )
        return None if request is None or request.is_elsewhere else request

    def get(self, key: tuple[str, str]) -> Request | None:
        return self._by_key.get(key)

    def expire(self, now_s: float) -> list[Request]:
        """Drop what is over; return the running ones that had no reader for too long."""
        abandoned = []
        for key, request in list(self._by_key.items()):
            if request.ended_s is not None:
                if now_s - request.ended_s > self._keep_s and not request.readers:
                    del self._by_key[key]
            elif request.abandoned_s is not None and now_s - request.abandoned_s > self._keep_s:
                del self._by_key[key]
                abandoned.append(request)
        ended = {k: s for k, s in self._by_key.items() if s.ended_s is not None and not s.readers}
        num_tokens = sum(s.num_kept_tokens for s in ended.values())
        for key, request in ended.items():  # the oldest first
            if len(self._by_key) <= MAX_KEPT_REQUESTS and num_tokens <= MAX_KEPT_TOKENS:
                break
            del self._by_key[key]
            num_tokens -= request.num_kept_tokens
        return abandoned


def check_key(key: str, name: str) -> str:
    """Raises: InvalidRequest unless `key` is 1 to 256 printable ASCII characters."""
    if not key or len(key) > MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"{name}: must be 1 to {MAX_KEY_LENGTH} printable ASCII characters", param=name
        )
    return key


def check_cursors(
    request: Request, cursors: list[int], field: str, *, has_digests: bool = False
) -> list[int]:
    """Check how many tokens a client has of each sequence.

    Args:
        field: The cursors' name, for the error.
        has_digests: The client can compare: tokens it has may still have to be generated again.

    Raises:
        InvalidRequest: There is not one cursor per sequence, or one is beyond the tokens.
    """
    count = len(request.sequences)
    if len(cursors) != count:
        raise InvalidRequest(f"{field}: {len(cursors)} numbers for {count} choices", param=field)
    for cursor, sequence in zip(cursors, request.sequences, strict=True):
        # A sequence that was just taken over from another ingress has its tokens in a moment.
        is_awaited = has_digests or sequence.is_unknown
        num_tokens = len(sequence.state.output_ids)
        if not 0 <= cursor <= (sequence.state.sampling.max_tokens if is_awaited else num_tokens):
            raise InvalidRequest(
                f"{field}: choice {sequence.index} has {num_tokens} tokens so far, not {cursor}",
                param=field,
            )
    return cursors
