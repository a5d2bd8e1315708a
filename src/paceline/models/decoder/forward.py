"""The decoder of all supported families, which runs its passes with the operations of its device. Inference only; call it under
`torch.inference_mode`.
"""

from collections.abc import Sequence

from torch import Tensor

from paceline.kernels.cpu.decoder import DecoderPass
from paceline.kernels.formats.layout import AfterLayer, AttentionLayout, uses_gpu_kernels
from paceline.models.decoder.decoder import DecoderWeights, ForwardOutput
from paceline.models.decoder.ops import CpuOps, LayerCache, NativeCalls, TorchOps, native_calls
from paceline.models.decoder.passes import DecoderInputs, forward_pass


class DecoderModel(DecoderWeights):
    """A decoder on its device. Passes of all models and devices are `forward_pass`, with the operations of the device."""

    _native: tuple[Sequence[LayerCache], NativeCalls] | None = None
    """Cache of the last pass, and the native calls over it."""

    def forward(
        self,
        tokens: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, rotary; siblings of a tree share one
        layout: AttentionLayout,
        cache: Sequence[LayerCache],
        logit_rows: Tensor | None = None,  # [R] int64; None or empty computes no logits
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
    ) -> ForwardOutput:
        """Compute T rows, store their keys and values in `cache`, and return the requested outputs.

        `state_layers` are layers whose hidden states are returned: entry i is the state after i layers. 0 is the embedding,
        `num_layers` the last state before the final norm.
        """
        if uses_gpu_kernels(self.device):
            from paceline.models.decoder.gpu_ops import gpu_forward

            return gpu_forward(
                self, tokens, positions, layout, cache, logit_rows, state_layers, last_hidden, after_layer=after_layer
            )
        layers = None if after_layer is not None else self._native_calls(cache).layers
        where = self.rotary, positions, layout, self.config.rms_eps
        ops = TorchOps(*where, self.query_scale) if layers is None else CpuOps(layers, *where)
        inputs = DecoderInputs(tokens, cache, logit_rows, state_layers, last_hidden, after_layer)
        return forward_pass(self, inputs, ops)

    def native_pass(self, cache: Sequence[LayerCache]) -> DecoderPass | None:
        """A whole pass over `cache` as one native call; None if a part of it needs its own call."""
        return self._native_calls(cache).whole

    def _native_calls(self, cache: Sequence[LayerCache]) -> NativeCalls:
        known = self._native
        if known is None or known[0] is not cache:
            if not self.is_complete:  # a pass waits for each layer
                return NativeCalls()
            known = self._native = (cache, native_calls(self, cache))
        return known[1]
