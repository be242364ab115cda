"""What a step's hidden rows tell: the tokens that are drawn, and the logprobs that were asked for."""

# Shape suffixes: T = rows of the step, H = hidden, S = rows to sample, L = rows of logprobs, V = vocabulary

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

import torch

from pegahpc.engine.logprobs import Asked, token_logprobs
from pegahpc.engine.sampler import Draw, are_finite, sample
from pegahpc.engine.sequence import Span
from pegahpc.models.decoder import Decoder
from pegahpc.vocabulary import Vocabulary
from pegahpc.wire.messages import TokenLogprob

PROMPT_ROWS = 16  # of a prompt whose logprobs are wanted, rows whose logits are there at once


@dataclass
class Told:
    """What one span's rows told. All of it is void when one of their logits was not finite."""

    span: Span
    token: int | None = None  # drawn from the last row; None while prefill goes on
    logprob: TokenLogprob | None = None  # that token's, where asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens that follow the rows
    bad_position: int | None = None  # of the first token whose logits were not finite


@dataclass(frozen=True)
class _PromptRow:
    """A row whose logits are for the prompt's token at `position`."""

    told: Told
    row: int
    position: int

    @property
    def asked(self) -> Asked:
        sequence = self.told.span.sequence
        return Asked(sequence.tokens[self.position], sequence.request.prompt_logprobs or 0)


class Readout:
    """The end of a step: the decoder's head, and what is done with its logits."""

    def __init__(self, decoder: Decoder, vocabulary: Vocabulary) -> None:
        self._decoder = decoder
        self._vocabulary = vocabulary
        suppressed_ids = torch.tensor(vocabulary.suppressed, dtype=torch.int64, device=decoder.embed_VH.device)
        self._suppressed_ids = suppressed_ids if vocabulary.suppressed else None

    def tell(self, hidden_TH: torch.Tensor, spans: ListLike[Span]) -> list[Told]:
        """For each span that had logits, in order. A span that neither ends its tokens nor owes logprobs has none."""
        all_told = [Told(span) for span in spans]
        prompt_rows: list[_PromptRow] = []
        sampled: dict[int, Told] = {}  # by row
        first_row = 0
        for told in all_told:
            prompt_rows += _prompt_rows(told, first_row)
            first_row += told.span.num_rows
            if told.span.is_sampled:
                sampled[first_row - 1] = told
        for first in range(0, len(prompt_rows), PROMPT_ROWS):
            self._score(hidden_TH, prompt_rows[first : first + PROMPT_ROWS])
        if sampled:
            self._sample(hidden_TH, sampled)
        return [told for told in all_told if told.token is not None or told.prompt_logprobs]

    def _score(self, hidden_TH: torch.Tensor, rows: list[_PromptRow]) -> None:
        logits_LV = self._logits(hidden_TH, [each.row for each in rows])
        finite = are_finite(logits_LV)
        logprobs = token_logprobs(logits_LV, [each.asked for each in rows], self._suppressed_ids)
        for each, logprob, is_finite in zip(rows, logprobs, finite, strict=True):
            each.told.prompt_logprobs.append(logprob)
            if not is_finite and each.told.bad_position is None:
                each.told.bad_position = each.position

    def _sample(self, hidden_TH: torch.Tensor, told_by_row: dict[int, Told]) -> None:
        all_told = list(told_by_row.values())
        logits_SV = self._logits(hidden_TH, list(told_by_row))
        has_logprobs = [place for place, told in enumerate(all_told) if told.span.sequence.request.logprobs is not None]
        raw_LV = logits_SV[has_logprobs] if has_logprobs else None  # a copy: sampling edits
        tokens, finite = sample(logits_SV, [self._draw(told.span) for told in all_told], self._suppressed_ids)
        for told, token, is_finite in zip(all_told, tokens, finite, strict=True):
            told.token = token
            if not is_finite and told.bad_position is None:
                told.bad_position = told.span.stop
        if raw_LV is not None:
            asked = [
                Asked(tokens[place], all_told[place].span.sequence.request.logprobs or 0) for place in has_logprobs
            ]
            logprobs = token_logprobs(raw_LV, asked, self._suppressed_ids)
            for place, logprob in zip(has_logprobs, logprobs, strict=True):
                all_told[place].logprob = logprob

    def _draw(self, span: Span) -> Draw:
        sequence, request = span.sequence, span.sequence.request
        banned_ids = () if sequence.num_generated else self._vocabulary.begin_suppressed
        if sequence.num_generated < request.min_tokens:
            banned_ids += tuple(idx for idx in request.stop_token_ids if 0 <= idx < self._vocabulary.size)
        return Draw(request.sampling, span.stop, edits=sequence.edits, banned_ids=banned_ids)

    def _logits(self, hidden_TH: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """[len(rows), vocab], computed with an even count of rows, by padding: a row alone has other bits."""
        padded = torch.tensor(rows + [0] * (len(rows) % 2), device=hidden_TH.device)
        return self._decoder.logits(hidden_TH.index_select(0, padded))[: len(rows)]


def _prompt_rows(told: Told, first_row: int) -> list[_PromptRow]:
    span, request = told.span, told.span.sequence.request
    if request.prompt_logprobs is None:
        return []
    positions = range(span.start + 1, min(span.stop + 1, len(request.prompt_tokens)))
    return [_PromptRow(told, first_row + position - 1 - span.start, position) for position in positions]
