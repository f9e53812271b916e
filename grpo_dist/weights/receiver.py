"""The receiving end of a publication, inside a vLLM worker, whatever carries the bytes.

    start ──► receive: check names and shapes ─► transport ─► digest ─► layer-wise load ──► finish: everything loaded?

What it adds to vLLM's own engines (each was a silent fault before):

* an update that did not finish is finalised before the next one starts: the layer-wise reload skips layers that are
  still loading, and then mixes two streams into garbage;
* a stream that misses a tensor, or brings one of another shape, is refused by name;
* a tied ``lm_head`` is packed again on CPU: its packed copy is not part of the layer-wise reload and would stay old;
* a digest of every tensor as it arrived, to be compared with the tensor as it was gathered.

It does not move bytes: ``gloo.py`` and ``nccl.py`` do. vLLM's model code is imported inside the functions, because the
learner loads this module too (the sending classes live beside the receiving ones) and has no use for 90 MB of models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from grpo_dist.weights.digest import tensor_digest

# vLLM warns "ParallelLMHead: Failed to load weights" at each publication of tied models; `_unfilled` decides that.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

Layout = dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape)


class CheckedReload:
    """Mixin before a vLLM ``WeightTransferEngine``; needs ``model`` and ``model_config`` of that class."""

    model: torch.nn.Module
    model_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[str, str] = {}  # name -> digest of the last update, when asked for
        self._updating = False
        self._layout: Layout = {}  # of the update under way
        self._accepted: Layout | None = None  # of the first update that finished: later ones must equal it
        self._tied = _tied_heads(self.model)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.abandon()
        self.received, self._layout = {}, {}
        self._updating = True
        initialize_layerwise_reload(self.model)

    def abandon(self) -> None:
        """Close an update that did not finish. The model is usable again only after a whole update."""
        if self._updating:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
            self._updating = False

    def expect(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Refuse, before a byte is received, a stream that is not laid out like the ones before.

        Needed because some of vLLM's loaders take the first rows of a tensor that is too large.
        """
        layout = {name: (dtype, tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)}
        if len(layout) != len(names):
            raise ValueError(f"weight update names a tensor twice: {sorted({n for n in names if names.count(n) > 1})}")
        if self._accepted is not None:
            _same_layout(self._accepted, layout)
        self._layout = layout

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, digest: bool) -> None:
        pairs = list(tensors)
        if digest:
            for name, tensor in pairs:
                self.received[name] = tensor_digest(tensor.cpu())
        self.model.load_weights(pairs)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        missing = _unfilled(self.model, self._tied)
        self.abandon()
        if missing:
            shown = ", ".join(missing[:8])
            raise ValueError(f"weight update left {len(missing)} layers without all their weights: {shown}")
        for head in self._tied:
            head.quant_method.process_weights_after_loading(head)
        self._accepted = self._layout


class WorkerExtension:
    """Methods that vLLM adds to its worker (``worker_extension_cls``) and that the engine calls by name."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def received_digests(self) -> dict[str, str]:
        return dict(self.weight_transfer_engine.received)

    def abandon_weight_update(self) -> None:
        self._weight_update_active = False
        self.weight_transfer_engine.abandon()


def _tied_heads(model: torch.nn.Module) -> list[Any]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    embeddings = {id(m.weight) for m in tables if not isinstance(m, ParallelLMHead)}
    return [m for m in tables if isinstance(m, ParallelLMHead) and id(m.weight) in embeddings]


def _unfilled(model: torch.nn.Module, tied: Sequence[torch.nn.Module]) -> list[str]:
    """Layers that did not get all elements of their parameters, with how many they got."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # got everything and was processed
            continue
        parameters = {k: p for k, p in layer._parameters.items() if p is not None and k not in SKIP_LOAD_TENSORS}
        wanted = sum(get_tensor_load_numel(p) for p in parameters.values())
        padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0  # rows beyond the vocabulary
        if wanted > info.load_numel and not padded and not any(layer is head for head in tied):
            missing.append(f"{name} ({info.load_numel} of {wanted} elements)")
    return missing


def _same_layout(wanted: Layout, came: Layout) -> None:
    faults = [f"{name} is missing" for name in wanted if name not in came]
    faults += [f"{name} is unknown" for name in came if name not in wanted]
    faults += [
        f"{name} is {came[name][0]}{list(came[name][1])}, wanted {wanted[name][0]}{list(wanted[name][1])}"
        for name in wanted
        if name in came and came[name] != wanted[name]
    ]
    if faults:
        shown = "; ".join(faults[:8])
        raise ValueError(f"weight update refused, {len(faults)} tensors differ from earlier ones: {shown}")
