"""One step on the model: tensors from the schedule, block copies, forward, sample."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.sampler import sample
from kernels.attention import PagedBatch
from kernels.blocks import copy_blocks

if TYPE_CHECKING:
    from cache.copies import BlockCopy
    from engine.model.loader import LoadedModel
    from engine.scheduler import Work


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model is given for one step.

    token_ids, positions: int64 [tokens]; last: int64 [samples], rows of `token_ids` whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    batch: PagedBatch
    last: torch.Tensor


class Runner:
    """Owns the KV pool and the block tables of running sequences.

    pool: [blocks, layers, 2, block_size, kv_heads, head_dim]
    The tables are rows that stay from step to step: a decode step touches one entry of each.
    """

    def __init__(
        self,
        model: LoadedModel,
        pool: torch.Tensor,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.pool = pool
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)

    def run(self, step: ListLike[Work], copies: ListLike[BlockCopy]) -> list[int]:
        """Forward one step and sample. Returns one token id for each work that `samples`, in their order."""
        if copies:
            copy_blocks(self.pool, [copy.source for copy in copies], [copy.target for copy in copies])
        inputs = self.prepare(step)
        with torch.inference_mode():
            logits = self.model.forward(
                inputs.token_ids, inputs.positions, inputs.batch, self.pool, inputs.last
            )
            sampled = [work.sequence for work in step if work.samples]
            if not sampled:
                return []
            return sample(logits, [sequence.sampling for sequence in sampled])

    def prepare(self, step: ListLike[Work]) -> StepInputs:
        """The step's tensors, each built in one go for all sequences."""
        block_size = self.block_size
        counts = np.array([work.count for work in step], dtype=np.int64)  # [seqs]
        first = np.array([work.start for work in step], dtype=np.int64)  # [seqs] position of the first token
        kv_lens = first + counts
        starts = np.zeros(len(step) + 1, dtype=np.int64)  # [seqs + 1]
        np.cumsum(counts, out=starts[1:])

        tables = self._update_tables(step, -(-int(kv_lens.max()) // block_size))
        owner = np.repeat(np.arange(len(step)), counts)  # [tokens] whose token it is
        positions = np.arange(starts[-1]) + (first - starts[:-1])[owner]
        slots = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size

        token_ids: list[int] = []
        for work in step:
            token_ids += work.sequence.token_ids[work.start : work.start + work.count]
        samples = np.array([work.samples for work in step], dtype=bool)
        batch = PagedBatch(
            block_tables=self._to_device(tables),
            query_starts=self._to_device(starts.astype(np.int32)),
            kv_lens=self._to_device(kv_lens.astype(np.int32)),
            slots=self._to_device(slots),
            max_query_len=int(counts.max()),
            max_kv_len=int(kv_lens.max()),
        )
        return StepInputs(
            self._to_device(np.array(token_ids, dtype=np.int64)),
            self._to_device(positions),
            batch,
            self._to_device(starts[1:][samples] - 1),
        )

    def _update_tables(
        self, step: ListLike[Work], width: int
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Bring the rows of this step's sequences up to date; [seqs, width], a copy."""
        for work in step:
            sequence = work.sequence
            table = sequence.table
            assert table is not None
            if table.version != sequence.seated_version:
                sequence.seated_blocks, sequence.seated_version = 0, table.version
            known, total = sequence.seated_blocks, len(table.block_ids)
            if known < total:
                self._tables[sequence.seat, known:total] = table.block_ids[known:]
                sequence.seated_blocks = total
        return self._tables[[work.sequence.seat for work in step], :width]

    def _to_device(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.pool.device, non_blocking=True)
