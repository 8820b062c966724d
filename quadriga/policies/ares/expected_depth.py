"""How many layers the tokens of a sequence will run, on average: learned while a replica decodes.

A token that leaves early costs a step only the layers that it ran. What a sequence still costs is
therefore its remaining tokens times the layers that each will take. Three things tell how many
that are, and they add up:

- its *position*: beginnings and ends of answers are surer than their middles, or the other way
  round;
- its *prompt*: what is asked makes answers easy or hard. Every token id of a prompt has a weight,
  and a prompt's share is the mean of its tokens' weights;
- its own *past exits*: by how much it has run deeper, or shallower, than these two said. It counts
  for more the more tokens there are, and recent ones more than old ones.

All three are running means over the tokens that left here, and what comes until the next look
corrects what is said of all; so nothing is trained beforehand, and nothing is kept in the
checkpoint. A sequence whose tokens may not leave early runs all its layers; it is not looked at.

Source: ours.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from quadriga.checkpoint.exits import NEVER
from quadriga.core.request import SequenceState

NUM_POSITIONS = 12
"""Positions are told apart by the power of two they lie under; all from 2048 on are one."""
PROMPT_TOKENS = 64
"""Of a prompt's end: the question stands there."""
NUM_WEIGHTS = 4096
PRIOR_TOKENS = 4.0
"""A sequence's own past counts as much as what is known of others once it has so many tokens."""
KEPT_TOKENS = 64.0
"""Of a sequence's past, at most; older tokens are forgotten."""
POSITION_TOKENS = 8192.0
"""Of all sequences, in what is known of one position."""
POSITION_PRIOR = 16.0
"""Tokens at a position from which on more counts what they did than what those before it did."""
PROMPT_RATE = 0.15
BIAS_RATE = 0.003
"""By so much of each error until the next look is everything corrected that is said."""


@dataclass(slots=True)
class ForecastDepths:
    """Tokens that were expected to run about as many layers, and what they ran.

    Attributes:
        expected, run: Sums over the tokens.
    """

    tokens: float = 0.0
    expected: float = 0.0
    run: float = 0.0


@dataclass(slots=True)
class _Seen:
    """One sequence as it was last looked at.

    Attributes:
        features: Places of its prompt's tokens among the weights.
        num_tokens: Output tokens that were counted.
        said: Layers that were last said of its coming tokens; 0 before the first time.
        told: The same, corrected and inside its bounds.
        recent: Layers of its recent tokens, on average.
        num_at: By position, the recent tokens that this is the mean of; older ones are forgotten.
    """

    features: tuple[int, ...]
    num_tokens: int = 1
    said: float = 0.0
    told: float = 0.0
    recent: float = 0.0
    num_at: dict[int, float] = field(default_factory=dict)


class ExpectedDepth:
    """The layers that tokens of the sequences on one replica will run.

    Attributes:
        depth: Layers that are loaded; changes with them.
        by_tenth: What was expected and what came until the next look, by the tenth of the layers
            that was expected, "0.1" to "1.0".

    Not thread-safe: the engine's thread calls everything.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.by_tenth: dict[str, ForecastDepths] = {}
        self._mean = float(depth)  # of all tokens, wherever they stand
        self._num = 0.0
        self._position = [0.0] * NUM_POSITIONS  # by how much tokens there differ from that
        self._num_at = [0.0] * NUM_POSITIONS
        self._at = [float(depth)] * NUM_POSITIONS  # what follows of these for each position
        self._bias = 0.0  # of all that is said, by what came until the next look
        self._weights = [0.0] * NUM_WEIGHTS
        self._seen: dict[str, _Seen] = {}

    def look(self, states: Sequence[SequenceState], remaining: Sequence[float]) -> list[float]:
        """Return the layers that each sequence's coming tokens are expected to run, on average.

        What the sequences generated since the last look is learned from; so is what became of
        those that are not among `states` any more.

        Args:
            remaining: Tokens that each is expected to generate still.
        """
        gone, self._seen = self._seen, {}
        self._note_positions()
        expected = []
        for state, tokens in zip(states, remaining, strict=True):
            exits = state.exits
            limit = min(self.depth, exits.max_depth or self.depth)
            if exits.threshold >= NEVER:
                expected.append(float(limit))
                continue
            seen = gone.pop(state.sequence_id, None) or _Seen(_features(state.prompt_ids))
            self._learn(state, seen)
            self._seen[state.sequence_id] = seen
            seen.said = self._layers_of(seen, len(state.output_ids), tokens)
            seen.told = min(max(seen.said + self._bias, 1.0), float(limit))
            state.expected_layers = state.expected_layers or seen.told
            expected.append(seen.told)
        for seen in gone.values():
            self._end(seen)
        return expected

    def _layers_of(self, seen: _Seen, position: int, tokens: float) -> float:
        prompt, own = self._prompt(seen.features), 0.0
        if seen.num_at:
            weight = sum(seen.num_at.values())
            own = (seen.recent - self._said(seen) - prompt) * weight / (weight + PRIOR_TOKENS)
        return self._ahead(position, tokens) + prompt + own

    def _said(self, seen: _Seen) -> float:
        """What the positions of a sequence's recent tokens say of them, as it is known now."""
        said = sum([count * self._at[place] for place, count in seen.num_at.items()])
        return said / sum(seen.num_at.values())

    def _note_positions(self) -> None:
        """Where few tokens stood so far, a position is taken to be like the one before it."""
        differs = 0.0
        for place, count in enumerate(self._num_at):
            mine = count * self._position[place] + POSITION_PRIOR * differs
            differs = mine / (count + POSITION_PRIOR)
            self._at[place] = self._mean + differs

    def _prompt(self, features: tuple[int, ...]) -> float:
        weights = self._weights
        return sum([weights[i] for i in features]) / len(features)

    def _ahead(self, position: int, tokens: float) -> float:
        """What positions say of the next `tokens` tokens, on average."""
        end = position + max(tokens, 1.0)
        total, start = 0.0, float(position)
        for at in range(_place(position), NUM_POSITIONS):
            stop = end if at == NUM_POSITIONS - 1 else min(end, float((2 << at) - 1))
            total += (stop - start) * self._at[at]
            start = stop
            if stop >= end:
                break
        return total / (end - position)

    def _learn(self, state: SequenceState, seen: _Seen) -> None:
        """Count the tokens that came since the last look; the first of all came with the prompt."""
        start, end = seen.num_tokens, len(state.exit_layers)
        if seen.said and end > start:
            came = sum(state.exit_layers[start:end]) / (end - start)
            self._bias += BIAS_RATE * (came - seen.said - self._bias)
            tenth = min(max(math.ceil(10.0 * seen.told / self.depth), 1), 10) / 10
            known = self.by_tenth.setdefault(str(tenth), ForecastDepths())
            known.tokens += end - start
            known.expected += (end - start) * seen.told
            known.run += (end - start) * came
        prompt = self._prompt(seen.features)
        while start < end:
            place = _place(start)
            stop = end if place == NUM_POSITIONS - 1 else min(end, (2 << place) - 1)
            self._count(seen, place, prompt, sum(state.exit_layers[start:stop]), stop - start)
            start = stop
        seen.num_tokens = max(seen.num_tokens, end)

    def _count(self, seen: _Seen, place: int, prompt: float, total: int, count: int) -> None:
        """Learn from `count` tokens at one place that ran so many layers in all."""
        layers = total / count
        self._num = min(self._num + count, POSITION_TOKENS)
        self._mean += min(1.0, count / self._num) * (layers - prompt - self._mean)
        self._num_at[place] = min(self._num_at[place] + count, POSITION_TOKENS)
        excess = layers - prompt - self._mean
        share = min(1.0, count / self._num_at[place])
        self._position[place] += share * (excess - self._position[place])
        weight = sum(seen.num_at.values())
        kept = min(1.0, max(0.0, KEPT_TOKENS - count) / weight) if weight else 0.0
        seen.num_at = {at: kept * number for at, number in seen.num_at.items() if kept * number}
        seen.num_at[place] = seen.num_at.get(place, 0.0) + count
        seen.recent += count / (kept * weight + count) * (layers - seen.recent)

    def _end(self, seen: _Seen) -> None:
        """A sequence is not here any more: its prompt's tokens take a part of what it taught."""
        count = seen.num_tokens - 1
        if count <= 0:
            return
        wrong = seen.recent - self._said(seen) - self._prompt(seen.features)
        step = PROMPT_RATE * count / (count + PRIOR_TOKENS) * wrong
        for place in seen.features:
            self._weights[place] += step


def _place(position: int) -> int:
    """Which of the powers of two an output index lies under: 0, 1..2, 3..6, …"""
    return min((position + 1).bit_length() - 1, NUM_POSITIONS - 1)


def _features(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Places of a prompt's tokens among the weights; tokens that share a place share its weight."""
    distinct = dict.fromkeys(prompt_ids[-PROMPT_TOKENS:])
    return tuple(zlib.crc32(t.to_bytes(8, "little")) % NUM_WEIGHTS for t in distinct)
