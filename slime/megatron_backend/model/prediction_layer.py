"""The modules of multi-token prediction: Megatron's layer, with future tokens from `slime.data.ahead`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, checkpoint
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.bridges.megatron_versions import prediction_inputs, prediction_parts
from slime.megatron_backend.model.layer_spec import layer_spec
from slime.megatron_backend.model.norms import RMSNorm
from slime.models import Decoder


class PredictionLayer(MultiTokenPredictionLayer):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's layer, but its `input_ids` are the future tokens. Megatron shifts the tokens of a row by one position,
    which needs a rank with all tokens of the row and every sequence in one piece."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: None,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        **_: Any,
    ) -> tuple[Any, ...]:
        embedded = embedding(input_ids=input_ids, position_ids=None).detach()
        return prediction_inputs(input_ids, embedded, hidden_states)

    def _checkpointed_forward(self, *_: Any, **options: Any) -> Tensor:
        """Runs the layer with recomputation. Megatron's version passes the layout as a tensor, or recomputes with only
        one --recompute-method."""
        forward = self._proj_and_transformer_layer
        tensors = options.pop("hidden_states"), options.pop("decoder_input")
        output: Tensor = checkpoint(
            partial(forward, **options), self.config.distribute_saved_activations, *tensors
        )
        return output


def prediction_spec(core: TransformerConfig, decoder: Decoder) -> MultiTokenPredictionBlockSubmodules:
    """Returns the layers of `Decoder.predictions`."""
    return MultiTokenPredictionBlockSubmodules(
        layer_specs=[
            ModuleSpec(
                module=PredictionLayer,
                submodules=prediction_parts(
                    layer_spec(core, decoder, layer),
                    enorm=RMSNorm,
                    hnorm=RMSNorm,
                    eh_proj=ColumnParallelLinear,
                    layer_norm=RMSNorm,
                ),
            )
            for layer in decoder.predictions
        ]
    )
