"""By what a sequence is known to an ingress that never held it, and a caller that comes back."""

from __future__ import annotations

import hashlib
from array import array

from serve_app.request.spec import GenerateSpec


def claims(spec: GenerateSpec, key: tuple[str, str] | None, fingerprint: bytes) -> list[str]:
    """One claim for each choice of a request, empty where nobody may take it over.

    Owner and content are part of it: a key alone shows nobody another one's answer. A sequence
    whose log probabilities are wanted cannot be taken over, as its replica does not keep those of
    the past; nor one whose model is chosen for it.
    """
    count = len(spec.prompts) * spec.n
    sampling = spec.sampling
    is_told_more = sampling.num_logprobs is not None or sampling.num_prompt_logprobs is not None
    if key is None or spec.is_auto or is_told_more:
        return [""] * count
    owner, name = key
    digest = hashlib.sha256()
    for part in (owner.encode(), name.encode(), fingerprint):
        digest.update(len(part).to_bytes(4, "little") + part)
    request = digest.hexdigest()[:32]
    return [f"{request}:{index}" for index in range(count)]


def visitors(spec: GenerateSpec, owner: str) -> list[str]:
    """One name for each choice of a request, the same when its caller asks the same again.

    Of what the request asks for, not of how: clients that try again may change ids and deadlines.
    """
    digest = hashlib.blake2b(digest_size=12)
    sampling = spec.sampling
    asked = (owner, spec.model, spec.n, spec.priority, sampling.max_tokens, sampling.temperature)
    digest.update(repr(asked).encode())
    for prompt in spec.prompts:
        digest.update(len(prompt.token_ids).to_bytes(4, "little"))
        digest.update(array("q", prompt.token_ids).tobytes())
    request = digest.hexdigest()
    return [f"{request}:{index}" for index in range(len(spec.prompts) * spec.n)]
