"""A decoder run through its own modules, with nothing but the attention replaced: any model, no fusing."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from engine.model.attention import LayerShape, Step, attending
from engine.model.support import UnsupportedModel
from kernels.attention import PagedBatch


class ModuleDecoder:
    """The model as transformers has it, on packed tokens and our pool."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: PagedBatch,
        pool: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """See `LoadedModel.forward`."""
        with attending(Step(batch, pool)):
            logits = self._run(token_ids, positions, last)
        return logits.float()

    @torch.inference_mode()
    def shape(self, num_layers: int) -> LayerShape:
        """What every layer hands to attention. Raises `UnsupportedModel` if that cannot be served."""
        device = self._model.device
        one = torch.zeros(1, dtype=torch.int64, device=device)
        with attending(Step(None, None)) as step:
            self._run(one, one, one)
        if set(step.seen) != set(range(num_layers)):
            raise UnsupportedModel(
                f"{type(self._model).__name__}: of {num_layers} layers (config.num_hidden_layers), "
                f"{len(step.seen)} use transformers' attention interface; all must"
            )
        shapes = set(step.seen.values())
        if len(shapes) != 1:
            raise UnsupportedModel(f"{type(self._model).__name__}: layers with different heads: {shapes}")
        return shapes.pop()

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        rows = {"logits_to_keep": last} if self._takes_rows else {}
        output = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **rows
        )
        logits: torch.Tensor = output.logits[0]
        return logits if self._takes_rows else logits[last]
