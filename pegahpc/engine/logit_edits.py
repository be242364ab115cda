"""What moves logits before a draw: penalties, bias, ids that must not be drawn. Only those concerned are touched."""

# Shape suffixes: S = rows to sample, V = vocabulary, N = (row, id) pairs of all rows, each pair once

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pegahpc.wire.messages import Sampling

Ints = npt.NDArray[np.int64]
Pairs = tuple[torch.Tensor, torch.Tensor]
FLOAT32_MAX = torch.finfo(torch.float32).max


class SeenTokens:
    """Tokens of one request, each once, and how often each was generated. Nothing is ever counted anew.

    Args:
        prompt: counts as seen and not as generated.
        most: different tokens that there can ever be.
    """

    def __init__(self, prompt: Iterable[int], most: int) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.zeros(most, np.int64)
        self._ids[: len(self._places)] = list(self._places)
        self._counts = np.zeros(most, np.int64)

    def add(self, token: int) -> None:
        """One more generated token."""
        place = self._places.setdefault(token, len(self._places))
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> Ints:
        """[num_seen], in the order in which they first came."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Ints:
        """[num_seen]; 0 for a token that only the prompt has."""
        return self._counts[: len(self._places)]


class LogitEdits:
    """What one running request asks to be done to its logits: made when it is admitted, a token longer each step."""

    def __init__(self, sampling: Sampling, prompt: ListLike[int], *, most: int) -> None:
        self.penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        is_repetition, has_penalty = self.penalties[0] != 1, self.penalties != (1, 0, 0)
        self.seen = SeenTokens(prompt if is_repetition else (), most) if has_penalty else None
        self.bias_ids = np.array([idx for idx, _ in sampling.logit_bias], np.int64)
        self.bias = np.array([value for _, value in sampling.logit_bias], np.float64)

    @classmethod
    def wanted_by(cls, sampling: Sampling, prompt: ListLike[int], *, most: int) -> LogitEdits | None:
        """None for a request that asks for no edits.

        Args:
            most: different tokens that prompt and answer can ever have.
        """
        edits = cls(sampling, prompt, most=most)
        return edits if edits.seen is not None or sampling.logit_bias else None

    def add(self, token: int) -> None:
        """One more generated token."""
        if self.seen is not None:
            self.seen.add(token)


class Edited(Protocol):
    """What is read of a draw."""

    @property
    def edits(self) -> LogitEdits | None: ...
    @property
    def banned_ids(self) -> ListLike[int]: ...


def edit_logits(logits_SV: torch.Tensor, draws: ListLike[Edited], suppressed_ids: torch.Tensor | None) -> None:
    """Penalties, then bias, then masks, in place, on the rows that ask for them; the suppressed ids on all rows.

    A masked logit is -inf, which no penalty or bias would lift, so all masks can be written last. Everything else stays
    finite: what leaves float32 is cut to its largest number.

    **Source** repetition: Keskar et al. 2019 (CTRL), section 4.1, with the two signs of transformers'
    RepetitionPenaltyLogitsProcessor; presence and frequency: OpenAI's guide to text generation,
    `mu[j] - c[j] * frequency - float(c[j] > 0) * presence`, with c[j] the times that j was generated.

    Args:
        logits_SV: [len(draws), vocab], float32.
        suppressed_ids: [num], int64; None: there are none.
    """
    edited = [(row, draw.edits) for row, draw in enumerate(draws) if draw.edits is not None]
    if penalised := [(row, edits, edits.seen) for row, edits in edited if edits.seen is not None]:
        _penalise(logits_SV, penalised)
    if biased := [(row, edits) for row, edits in edited if len(edits.bias)]:
        pairs = _pairs([(row, edits.bias_ids) for row, edits in biased], logits_SV.device)
        bias_N = torch.from_numpy(np.concatenate([edits.bias for _, edits in biased])).to(logits_SV.device)
        logits_SV[pairs] = _finite(logits_SV[pairs].double() + bias_N)
    if banned := [(row, np.array(draw.banned_ids, np.int64)) for row, draw in enumerate(draws) if draw.banned_ids]:
        logits_SV[_pairs(banned, logits_SV.device)] = -torch.inf
    if suppressed_ids is not None:
        logits_SV.index_fill_(-1, suppressed_ids, -torch.inf)


def _penalise(logits_SV: torch.Tensor, rows: list[tuple[int, LogitEdits, SeenTokens]]) -> None:
    device = logits_SV.device
    pairs = _pairs([(row, seen.ids) for row, _, seen in rows], device)
    counts_N = torch.from_numpy(np.concatenate([seen.counts for _, _, seen in rows])).to(device)
    penalties = np.repeat([edits.penalties for _, edits, _ in rows], [len(seen.ids) for _, _, seen in rows], axis=0)
    repetition_N, frequency_N, presence_N = torch.from_numpy(penalties).to(device).unbind(-1)
    values_N = logits_SV[pairs].double()
    values_N = torch.where(values_N < 0, values_N * repetition_N, values_N / repetition_N)
    values_N -= counts_N * frequency_N + (counts_N > 0) * presence_N
    logits_SV[pairs] = _finite(values_N)


def _pairs(ids_by_row: list[tuple[int, Ints]], device: torch.device) -> Pairs:
    """Index of these ids of these rows, both [N]."""
    rows = np.repeat(np.array([row for row, _ in ids_by_row], np.int64), [len(ids) for _, ids in ids_by_row])
    ids = np.concatenate([ids for _, ids in ids_by_row])
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def _finite(values_N: torch.Tensor) -> torch.Tensor:
    return values_N.clamp(-FLOAT32_MAX, FLOAT32_MAX).float()
