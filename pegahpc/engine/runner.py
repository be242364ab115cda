"""One step on the device: spans become tensors, the decoder runs over them."""

from __future__ import annotations

import torch

from pegahpc.engine.pages import PADDING_PAGE
from pegahpc.engine.phase_clock import PhaseClock
from pegahpc.engine.readout import Readout, Told
from pegahpc.engine.sequence import Sequence, Span
from pegahpc.kernels.latent_attention import SPLIT_TOKENS
from pegahpc.kernels.program import RowContext
from pegahpc.mla.attention import AttentionStep, LayerCache
from pegahpc.models.decoder import Decoder, StepInput
from pegahpc.vocabulary import Vocabulary


def buckets(max_rows: int) -> list[int]:
    """Row counts that steps are padded to: 0, 2, 4, 6, 8, 12, 16, 24, ... up to max_rows, all even.

    An idle rank's bucket is 0: it comes to every exchange without a row of its own, and its host does next to nothing,
    which counts where ranks share cores. Above that the smallest is 2: a product of one row has other bits than the
    same row among several.
    """
    top = max_rows + max_rows % 2
    ladder = {size for power in range(1, top.bit_length()) for size in (1 << power, 3 << power)} | {0, 2, 4}
    return sorted({size for size in ladder if size < top} | {top})


class Runner:
    """Owns the slab, the block table of running requests and the rope table.

    Args:
        slab: [num_pages, num_layers, page_tokens, row_dim], zeroed: what a padding row reads must be finite.
        cis_table: [max_model_len, qk_rope_head_dim], float32.
    """

    def __init__(
        self,
        decoder: Decoder,
        slab: torch.Tensor,
        cis_table: torch.Tensor,
        *,
        vocabulary: Vocabulary,
        max_num_seqs: int,
        max_rows: int,
    ) -> None:
        self.decoder = decoder
        self._readout = Readout(decoder, vocabulary)
        self.slab = slab
        self._caches = [LayerCache(slab, layer) for layer in range(slab.shape[1])]
        self._cis_table = cis_table
        self._device = slab.device
        self._page_tokens = slab.shape[2]
        self._pages_per_split = SPLIT_TOKENS // self._page_tokens
        num_splits = -(-cis_table.shape[0] // SPLIT_TOKENS)
        # page * num_layers of each running request, a row a slot; one more row for padding, all PADDING_PAGE.
        self._block_table = torch.full(
            (max_num_seqs + 1, num_splits * self._pages_per_split), PADDING_PAGE, device=self._device
        )
        self._num_written = [0] * max_num_seqs  # pages of each slot that its row holds
        self._padding_slot = max_num_seqs
        self._buckets = buckets(max_rows)
        self.clock = PhaseClock()

    def admit(self, sequence: Sequence) -> None:
        """Give a newly admitted request its row of the block table."""
        self._block_table[sequence.slot].fill_(PADDING_PAGE)
        self._num_written[sequence.slot] = 0

    def clean(self, sequence: Sequence) -> None:
        """Zero what no finite logits have vouched for: it must not meet the next owner's masked zeros."""
        assert sequence.cache is not None
        self.slab[sequence.cache.unproven_pages] = 0

    @torch.inference_mode()
    def step(self, spans: list[Span]) -> list[Told]:
        """Run the decoder over the spans (none: no rows, all exchanges); what their logits told."""
        with self.clock.timed("forward"):
            hidden_TH = self.forward(spans)
        with self.clock.timed("sample"):
            return self._readout.tell(hidden_TH, spans)

    @torch.inference_mode()
    def forward(self, spans: list[Span]) -> torch.Tensor:
        """[bucket, hidden]: the spans' rows in order, then padding; their cache rows are written."""
        return self.decoder.forward(self._input(spans), self._caches)

    def _write_blocks(self, sequence: Sequence) -> None:
        """Bring a request's row of the block table up to the pages that it holds."""
        assert sequence.cache is not None
        pages, done = sequence.cache.pages, self._num_written[sequence.slot]
        if len(pages) > done:
            self._block_table[sequence.slot, done : len(pages)] = torch.tensor(pages[done:]) * self.slab.shape[1]
            self._num_written[sequence.slot] = len(pages)

    def _input(self, spans: list[Span]) -> StepInput:
        """Rows in order: chunks, decode rows, padding (token 0, position 0, length 1, the padding page)."""
        for span in spans:
            self._write_blocks(span.sequence)
        num_live = sum(span.num_rows for span in spans)
        num_rows = next(size for size in self._buckets if size >= num_live)
        # Tokens, positions, slots and cache rows, made on the host and brought to the device at once.
        table = [row for span in spans for row in self._rows(span)]
        table += [(0, 0, self._padding_slot, PADDING_PAGE)] * (num_rows - num_live)
        columns = torch.tensor(list(zip(*table, strict=True)) or [[]] * 4, dtype=torch.int64, device=self._device)
        token_ids_T, position_T, slot_T, row_idx_T = columns.unbind()
        return StepInput(
            token_ids_T=token_ids_T,
            num_live=num_live,
            attention=AttentionStep(
                cis_TR=self._cis_table.index_select(0, position_T),
                row_idx_T=row_idx_T,
                contexts=self._contexts(spans, position_T, slot_T),
            ),
        )

    def _rows(self, span: Span) -> list[tuple[int, int, int, int]]:
        """Token, position, slot and cache row (page * num_layers * page_tokens + offset in the page) of each row."""
        sequence, size = span.sequence, self._page_tokens
        assert sequence.cache is not None
        pages, stride = sequence.cache.pages, self.slab.shape[1] * size
        return [
            (token, position, sequence.slot, pages[position // size] * stride + position % size)
            for position, token in enumerate(sequence.tokens[span.start : span.stop], span.start)
        ]

    def _contexts(self, spans: list[Span], position_T: torch.Tensor, slot_T: torch.Tensor) -> tuple[RowContext, ...]:
        """One context a chunk; decode and padding rows share a call, each with its own pages."""
        contexts: list[RowContext] = []
        row = 0
        for span in spans:
            if span.num_rows > 1:
                contexts.append(self._context(row, position_T[row : row + span.num_rows], slot_T[row : row + 1],
                                              span.start + span.num_rows))  # fmt: skip
                row += span.num_rows
        longest = max((span.start + 1 for span in spans if span.num_rows == 1), default=1)
        if row < position_T.shape[0]:
            contexts.append(self._context(row, position_T[row:], slot_T[row:], longest))
        return tuple(contexts)

    def _context(self, first_row: int, position_T: torch.Tensor, slot_G: torch.Tensor, longest: int) -> RowContext:
        num_splits = -(-longest // SPLIT_TOKENS)
        blocks_GP = self._block_table.index_select(0, slot_G)[:, : num_splits * self._pages_per_split]
        return RowContext(
            first_row=first_row, num_rows=position_T.shape[0], block_idx_GP=blocks_GP, seq_lens_T=position_T + 1
        )
