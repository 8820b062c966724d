"""KV of prompts that were computed before, for prompts that begin alike.

A *block* is a run of prompt tokens whose KV is kept together, of as many tokens as the runner says.
Its key is a hash of its tokens and of the key before it, so equal keys mean equal prefixes:

        key[i] = blake2b(key[i - 1] + tokens[i · n : (i + 1) · n])
        key[-1]: model, layers, adapter, salt

Only whole blocks are kept whose tokens all loaded layers have run: those of prompts, and behind
them those of an answer that was decoded in the same row, up to the first token that left early. So
the next turn of a conversation computes neither. Kept blocks take no memory from sequences: they
lie in what the slots have not promised, and go, least recently used first, as soon as it is
promised. A block is used no earlier than the blocks behind it, so what goes first is the end of a
prefix, never its beginning.

Source: the chained hash and the order of eviction are those of vLLM's automatic prefix caching;
differs: there is one block size a runner, and no block is counted as used between two sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SequenceState
from quadriga.interfaces import ModelRunner, SharingRunner
from quadriga.scheduling.meters import PrefixTotals
from quadriga.scheduling.prefixes.affinity import block_keys
from quadriga.scheduling.prefixes.events import KVEvents
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.slots import SlotTable
from quadriga.scheduling.transfer.rebuild import num_prefill_tokens

MAX_BLANK = 32
"""Blocks whose memory is touched ahead of their use, at most."""


class PrefixCache:
    """Kept blocks of one engine, by key, least recently used first.

    Args:
        slots: Of the same engine; kept blocks and promises never exceed its capacity together.
        model: A name that is another for other weights.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self, runner: SharingRunner, slots: SlotTable, model: str) -> None:
        self.block_tokens = runner.share_tokens
        self.totals = PrefixTotals()
        self._runner = runner
        self._slots = slots
        self._model = model
        self._blocks: OrderedDict[bytes, object] = OrderedDict()
        self._blank: list[object] = []
        self._events = KVEvents()
        slots.on_promise = self._make_room

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV is kept."""
        return len(self._blocks) * self.block_tokens

    def look(self, sequence: RunningSequence) -> None:
        """Mark the blocks of a sequence that is about to be promised memory as used.

        Others go for it then. A prompt is computed whole where its own tokens are scored, or their
        hidden states wanted.
        """
        state = sequence.state
        params = state.sampling
        is_whole = params.num_prompt_logprobs is not None or params.pooling == "mean"
        if not sequence.block_keys and not is_whole:
            sequence.block_keys = self.keys(state)
        self.touch(sequence.block_keys)

    def keys(self, state: SequenceState) -> list[bytes]:
        """The key of every whole block of a prompt."""
        return self._keys(state, state.prompt_ids)

    def _keys(self, state: SequenceState, tokens: Sequence[int]) -> list[bytes]:
        root = f"{self._model}\0{self._runner.num_layers}\0{state.prefix_salt}"
        return list(block_keys(tokens, self.block_tokens, root))

    def count(self) -> PrefixTotals:
        """The totals as they are now, apart from what comes."""
        return self.totals.changed(kept=self.held_tokens)

    def events(self, after: int) -> dict[str, Any]:
        """What was kept and let go since event `after`, and what its hashes were made with."""
        root = {"fingerprint": self._model, "num_layers": self._runner.num_layers}
        return root | {"block_size": self.block_tokens} | self._events.since(after)

    def load(self, sequence: RunningSequence) -> int:
        """Let a sequence's row go on with the blocks that are there; returns their tokens.

        At least one token is left to compute: the next is sampled behind it.
        """
        size, done = self.block_tokens, sequence.num_computed
        most = (num_prefill_tokens(sequence.state) - 1) // size
        if done % size or done // size >= most:
            return 0
        first = done // size
        num_tokens = self.fill(sequence.row, sequence.block_keys[:most], first)
        self.totals.hits += num_tokens
        return num_tokens

    def fill(self, row: int, keys: Sequence[bytes], first: int = 0) -> int:
        """Let a row that has its first blocks have those behind them that are there.

        Returns:
            Their tokens.
        """
        size, stop = self.block_tokens, first
        while stop < len(keys) and keys[stop] in self._blocks:
            self._runner.share(row, stop * size, self._blocks[keys[stop]])
            stop += 1
        if stop > first:
            self.touch(keys[:stop])
        return (stop - first) * size

    def store(self, sequence: RunningSequence, start: int, stop: int) -> None:
        """Keep the blocks that end in positions (start, stop], which were just computed.

        What has no room is not kept: blocks go for newer prefixes, but not for the end of their
        own.
        """
        size, keys = self.block_tokens, sequence.block_keys
        first, end = start // size, min(stop // size, len(keys))
        if end <= first or (first and keys[first - 1] not in self._blocks):
            return
        self.touch(keys[:first])
        own = set(keys)
        for i in range(first, end):
            if keys[i] not in self._blocks and not self._keep(sequence, i, own):
                break
        self.touch(keys[:end])

    def store_answer(self, sequence: RunningSequence) -> None:
        """Keep the blocks of a sequence that has ended, while its row still has its KV.

        The pass that gave an output token computed the token before it: where all passes up to
        there went to the last layer, so has that token's KV.
        """
        state, num_full = sequence.state, sequence.num_full
        depth = self._runner.num_layers
        if not num_full or state.exit_layers[0] < depth:
            return
        num_full += sum(1 for _ in takewhile(depth.__eq__, state.exit_layers[1:]))
        sequence.block_keys = self._keys(state, (state.prompt_ids + state.output_ids)[:num_full])
        there = sum(1 for _ in takewhile(self._blocks.__contains__, sequence.block_keys))
        self.store(sequence, there * self.block_tokens, num_full)

    def prepare(self) -> None:
        """Touch the memory of one block to come, in a step that has nothing else to do.

        The first touch of memory costs several times what a block's copy does.
        """
        num_tokens = self.held_tokens + (len(self._blank) + 1) * self.block_tokens
        if len(self._blank) < MAX_BLANK and num_tokens <= self._room:
            block = self._runner.blank()
            if block is not None:
                self._blank.append(block)

    def clear(self) -> None:
        """Let all blocks go."""
        self._blank.clear()
        while self._blocks:
            self._runner.forget(self._evict())

    def _keep(self, sequence: RunningSequence, index: int, own: set[bytes]) -> bool:
        """Keep one more block, at the cost of none of its own prefix; False: there is no room.

        Where one is let go for it, it takes that one's memory.
        """
        free: list[object] = []
        while self.held_tokens + self.block_tokens > self._room:
            if not self._blocks or next(iter(self._blocks)) in own:
                break
            free.append(self._evict())
        has_room = self.held_tokens + self.block_tokens <= self._room
        if has_room:
            over, start = (free or self._blank or [None]).pop(), index * self.block_tokens
            kept, keys = self._runner.keep(sequence.row, start, over), sequence.block_keys
            self._blocks[keys[index]] = kept
            self._events.stored(keys[index], keys[index - 1] if index else None)
        for block in free:
            self._runner.forget(block)
        return has_room

    @property
    def _room(self) -> int:
        """Tokens that may be kept: each sequence's last block is taken to be promised whole."""
        slots = self._slots
        taken = slots.reserved_tokens + slots.num_held * self.block_tokens
        return slots.kv_capacity_tokens - taken

    def _make_room(self) -> None:
        """Let blocks go that lie in what was just promised."""
        while self._blank and self.held_tokens + len(self._blank) * self.block_tokens > self._room:
            self._blank.pop()
        while self._blocks and self.held_tokens > self._room:
            self._runner.forget(self._evict())

    def _evict(self) -> object:
        """Take the block that was used longest ago out; its memory is the caller's."""
        key, block = self._blocks.popitem(last=False)
        self._events.removed(key)
        self.totals.evicted += self.block_tokens
        return block

    def touch(self, keys: Sequence[bytes]) -> None:
        """These blocks, each behind the one before, are used now."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)


def find_prefix_cache(
    runner: ModelRunner, slots: SlotTable, spec: EngineSpec, enabled: bool
) -> PrefixCache | None:
    """The cache of an engine; None where it is off or the runner cannot share KV."""
    if not enabled or not isinstance(runner, SharingRunner):
        return None
    return PrefixCache(runner, slots, spec.checkpoint.fingerprint)
