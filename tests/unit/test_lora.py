"""LoRA on a plain model: peft is the judge of what is merged, and the base model of what a switched-off adapter is."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grpo_dist.config import LoraSection, ModelSection, OptimizerSection, Recipe
from grpo_dist.errors import UserError
from grpo_dist.learner.lora import BaseAsReference, add_adapter, is_adapter
from grpo_dist.learner.model import Packed, load_model, replace_head, token_logprobs
from grpo_dist.learner.optimizer import parameter_groups
from grpo_dist.learner.self_check import _micro
from grpo_dist.model_folder import load_config, meta_model, refuse_unknown_targets
from grpo_dist.types import TensorInfo
from grpo_dist.weights.source import ShardedTensor, ZeroWeightSource
from tests.conftest import build_tiny_model, tiny_recipe

SECTION = LoraSection(rank=4, alpha=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("lora") / "m", tied=True)


def base(folder: Path, dtype: str = "float32") -> Any:
    return load_model(ModelSection(path=str(folder), dtype=dtype), torch.device("cpu"))


def trained(folder: Path, section: LoraSection = SECTION, dtype: str = "float32") -> tuple[Any, Any]:
    """A model with adapters that have been somewhere: B is not 0 any more."""
    model = base(folder, dtype)
    adapter = add_adapter(model, section, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model, adapter


def staged(model: Any, adapter: Any) -> dict[str, torch.Tensor]:
    plain = [
        ShardedTensor(TensorInfo(n, str(p.dtype).removeprefix("torch."), tuple(p.shape)), p)
        for n, p in model.named_parameters()
    ]
    source = ZeroWeightSource(
        adapter.published(plain), lambda tensors: nullcontext(), gather_bytes=1 << 20, main=True, pin=False
    )
    weights = source.stage(1)
    assert weights is not None
    return {name: t.clone() for name, t in weights.tensors.items()}


def by_peft(model: Any) -> dict[str, torch.Tensor]:
    from peft.tuners.lora import Linear

    merged = copy.deepcopy(model)
    for module in merged.modules():
        if isinstance(module, Linear):
            module.merge()
    return {n.replace(".base_layer.", "."): p for n, p in merged.named_parameters() if not is_adapter(n)}


def test_only_adapters_train_and_they_start_as_nothing(folder: Path) -> None:
    model, plain = base(folder), base(folder)
    add_adapter(model, SECTION, seed=0)
    for name, p in model.named_parameters():
        assert p.requires_grad is is_adapter(name), name
    assert sum(is_adapter(n) for n, _ in model.named_parameters()) == 2 * 2 * 7  # A and B, 2 layers, 7 linear ones
    groups = parameter_groups(model, OptimizerSection(weight_decay=0.1))
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(28, 0.1)]
    ids = torch.arange(5, 25)[None]
    from grpo_dist.learner.attention import Segments

    segments = Segments.of((20,), torch.device("cpu"))
    with torch.no_grad():
        one, other = (m(input_ids=ids, segments=segments, use_cache=False).logits for m in (model, plain))
    assert torch.equal(one, other)


def test_every_rank_makes_the_same_adapters_whatever_was_drawn_before(folder: Path) -> None:
    one, other = base(folder), base(folder)
    add_adapter(one, SECTION, seed=5)
    torch.rand(17)
    before = torch.get_rng_state()
    add_adapter(other, SECTION, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_what_is_published_is_what_peft_merges(folder: Path) -> None:
    model, adapter = trained(folder)
    before = {n: p.clone() for n, p in model.named_parameters()}
    found, wanted = staged(model, adapter), by_peft(model)
    assert list(found) == list(wanted) == [n for n, _ in base(folder).named_parameters()]
    changed = 0
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
        changed += not torch.equal(found[name], before.get(name, before.get(_inner(name))))
    assert changed == 2 * 7
    for name, p in model.named_parameters():  # merging has changed nothing of the policy
        assert torch.equal(p, before[name]), name


def test_half_precision_is_rounded_once(folder: Path) -> None:
    """peft rounds the change, then the sum; here the sum alone is, so it is as near as the dtype allows."""
    model, adapter = trained(folder, dtype="bfloat16")
    found, by_them = staged(model, adapter), by_peft(model)
    parameters = dict(model.named_parameters())
    name = "model.layers.1.mlp.down_proj"
    low, high = (parameters[f"{name}.lora_{part}.default.weight"].double() for part in "AB")
    exact = parameters[f"{name}.base_layer.weight"].double() + 12 / 4 * high @ low
    ours, theirs = ((f[f"{name}.weight"].double() - exact).abs() for f in (found, by_them))
    assert found[f"{name}.weight"].dtype == torch.bfloat16
    assert bool((ours <= exact.abs() * 2**-8).all())
    assert ours.mean() < theirs.mean()


def _inner(name: str) -> str:
    return name.removesuffix(".weight") + ".base_layer.weight"


def test_with_fresh_adapters_the_base_is_published_bit_for_bit(folder: Path) -> None:
    model = base(folder, "bfloat16")
    found = staged(model, add_adapter(model, SECTION, seed=0))
    for name, p in base(folder, "bfloat16").named_parameters():
        assert torch.equal(found[name], p), name


def test_switched_off_it_is_the_base(folder: Path) -> None:
    model, adapter = trained(folder)
    head, plain = replace_head(model, 1.0, 256), base(folder)
    packed = Packed.of(_micro([torch.arange(4, 20), torch.arange(30, 39)]), torch.device("cpu"))
    own = replace_head(plain, 1.0, 256)
    with torch.no_grad():
        wanted = token_logprobs(plain, own, packed)[0]
        on = token_logprobs(model, head, packed)[0]
        off = BaseAsReference(model, head, adapter).logprobs(packed)
        again = token_logprobs(model, head, packed)[0]
    assert torch.equal(off, wanted)
    assert torch.equal(on, again)
    assert (on - off).abs().max() > 1e-2


def test_the_written_adapter_loads_onto_the_base(folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, adapter = trained(folder)
    adapter.writer(model, lambda tensors: nullcontext(), main=True, base=str(folder))(tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    assert loaded.peft_config["default"].lora_alpha == 12
    found, wanted = dict(loaded.merge_and_unload().named_parameters()), staged(model, adapter)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_targets_are_looked_at_before_anything_starts(folder: Path) -> None:
    """On a model without memory; the learner's own check is the same one."""
    model = meta_model(load_config(str(folder), ModelSection(path=str(folder))), ModelSection(path=str(folder)))
    assert next(model.parameters()).is_meta
    refuse_unknown_targets(model, LoraSection(rank=2, targets=("q_proj", "v_proj")))
    refuse_unknown_targets(model, LoraSection(targets=("unused",)))
    with pytest.raises(UserError, match="found 'lm_head': the head gets no adapter"):
        refuse_unknown_targets(model, LoraSection(rank=2, targets=("lm_head",)))
    with pytest.raises(UserError, match="found 'qproj': no linear layer is called so"):
        refuse_unknown_targets(model, LoraSection(rank=2, targets=("qproj",)))


def test_targets(folder: Path) -> None:
    model = base(folder)
    add_adapter(model, LoraSection(rank=2, targets=("q_proj", "v_proj")), seed=0)
    names = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n, _ in model.named_parameters() if is_adapter(n)}
    assert names == {"q_proj", "v_proj"}
    for wrong in ("query", "lm_head", "embed_tokens"):
        with pytest.raises(
            UserError, match=rf"targets: wanted linear layers of this model \(down_proj, gate_proj.*found '{wrong}': "
        ):
            add_adapter(base(folder), LoraSection(rank=2, targets=("q_proj", wrong)), seed=0)


def test_a_reference_that_moves_is_refused() -> None:
    keys = {"kl": {"beta": 0.1, "reference": "refresh", "refresh_every": 5}}
    with pytest.raises(ValidationError, match=r"algorithm\.kl\.reference: refresh needs a second model"):
        Recipe.model_validate(tiny_recipe(learner={"lora": {"rank": 4}}, algorithm=keys))
    Recipe.model_validate(tiny_recipe(learner={"lora": {"rank": 4}}, algorithm={"kl": {"beta": 0.1}}))


def test_norms_and_biases_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    decaying, not_decaying = parameter_groups(model, OptimizerSection(weight_decay=0.3, beta1=0.5, eps=1e-5))
    assert [tuple(p.shape) for p in decaying["params"]] == [(5, 4), (4, 4)]
    assert [tuple(p.shape) for p in not_decaying["params"]] == [(4,)] * 3
    assert (decaying["weight_decay"], not_decaying["weight_decay"]) == (0.3, 0.0)
    assert all(g["betas"] == (0.5, 0.99) and g["eps"] == 1e-5 for g in (decaying, not_decaying))
    shard = torch.nn.Parameter(torch.empty(0))
    shard.ds_shape = torch.Size((4, 4))  # type: ignore[attr-defined]
    flat = torch.nn.Module()
    flat.register_parameter("weight", shard)
    (only,) = parameter_groups(flat, OptimizerSection(weight_decay=0.3))  # a ZeRO-3 shard goes by its full shape
    assert only["weight_decay"] == 0.3


def test_adapters_are_counted_before_anything_is_loaded(folder: Path) -> None:
    from grpo_dist.plan.memory import adapter_parameters, learner_memory
    from grpo_dist.plan.shapes import shape_of_folder

    shape = shape_of_folder(folder)
    for section in (SECTION, LoraSection(rank=3, targets=("q_proj", "down_proj"))):
        model = base(folder)
        add_adapter(model, section, seed=0)
        assert adapter_parameters(shape, section) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    sections: dict[str, Any] = {"algorithm": {"kl": {"beta": 0.1}}}
    whole = learner_memory(Recipe.model_validate(tiny_recipe(**sections)), shape)
    recipe = Recipe.model_validate(tiny_recipe(learner={"lora": {"rank": 4}}, **sections))
    small = learner_memory(recipe, shape)
    assert small.device["Adam"] == 8 * adapter_parameters(shape, SECTION)
    assert small.device["Adam"] < whole.device["Adam"] / 4
    assert "reference" in whole.device
    assert "reference" not in small.device
