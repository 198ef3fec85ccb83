"""Bucket plans of models of many shapes: complete, without mixed families, on modules whose hooks fire."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from deepspeed.errors import PlanError
from deepspeed.runtime.zero.grouping import BucketSpec, find_blocks, plan_buckets
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module, set_z3_leaf_modules

UNLIMITED = 2**63 - 1


class Block(nn.Module):
    """Attention and MLP stand-ins: 8*width^2 + 7*width elements in 6 parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


class GPT(nn.Module):
    def __init__(self, layer_count: int = 4, width: int = 8, vocab: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(16, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(layer_count))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[-1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


BLOCK_NUMEL = sum(param.numel() for param in Block().parameters())  # 568


def optimize_all(model: nn.Module, group: int = 0) -> dict[nn.Parameter, int]:
    return {param: group for param in model.parameters() if param.requires_grad}


def plan(
    model: nn.Module,
    group_of: Mapping[nn.Parameter, int] | None = None,
    *,
    is_sharded: bool = True,
    persist: int = -1,
    persist_total: int = UNLIMITED,
    min_numel: int = 500,
    max_numel: int | None = None,
    **options: object,
) -> dict[str, BucketSpec]:
    """The plan by bucket name, after the checks that hold for every plan. No parameter persists unless asked for."""
    group_of = optimize_all(model) if group_of is None else group_of
    specs = plan_buckets(
        model,
        group_of,
        is_sharded=is_sharded,
        persistence_threshold=persist,
        model_persistence_numel=persist_total,
        min_bucket_numel=min_numel,
        max_bucket_numel=max_numel,
        **options,
    )
    planned = [id(param) for spec in specs for param in spec.params]
    expected = [id(param) for param in model.parameters() if is_sharded or param in group_of]
    assert sorted(planned) == sorted(expected)
    modules = list(model.modules())
    order = {param: index for index, param in enumerate(model.parameters())}
    for spec in specs:
        assert len({(p.dtype, p.device.type, p in group_of) for p in spec.params}) == 1
        assert spec.group_ids == tuple(group_of.get(p, -1) for p in spec.params)
        flat_order = [(group_of.get(p, -1), order[p]) for p in spec.params]
        assert flat_order == sorted(flat_order)
        assert spec.scopes and len(set(spec.scopes)) == len(spec.scopes)
        assert all(any(scope is module for module in modules) for scope in spec.scopes)
        assert not any(isinstance(s, (nn.ModuleList, nn.ModuleDict, nn.ParameterList)) for s in spec.scopes)
        assert spec.is_trainable == (spec.params[0] in group_of)
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    return {spec.name: spec for spec in specs}


def names_of(model: nn.Module, spec: BucketSpec) -> set[str]:
    """Parameters of the bucket, by the name under which each is registered first."""
    return {name for name, param in model.named_parameters() if any(param is p for p in spec.params)}


def block_names(model: nn.Module, **options: object) -> list[str]:
    return [name for name, _ in find_blocks(model, **options)]


def test_plain_gpt() -> None:
    model = GPT()
    buckets = plan(model)
    assert list(buckets) == ["before", "embed", "layers.0", "layers.1", "layers.2", "layers.3", "after", "head"]
    assert buckets["layers.1"].scopes == (model.layers[1],)
    assert buckets["embed"].scopes == (model.embed,)
    assert buckets["head"].scopes == (model.head,)
    # A parameter that the root holds itself is used by the root.
    assert names_of(model, buckets["before"]) == {"position"} and buckets["before"].scopes == (model,)
    assert names_of(model, buckets["after"]) == {"norm.weight", "norm.bias"}
    assert all(spec.is_sharded and spec.is_trainable for spec in buckets.values())


def test_small_blocks_merge_until_the_minimum() -> None:
    model = GPT(layer_count=7)
    buckets = plan(model, min_numel=2 * BLOCK_NUMEL)
    # The seventh block alone is too small and joins the run before it.
    assert list(buckets) == ["before", "layers.0-1", "layers.2-3", "layers.4-6", "after"]
    assert buckets["layers.4-6"].scopes == tuple(model.layers[4:7])
    assert names_of(model, buckets["before"]) == {"position", "embed.weight"}


def test_blocks_are_not_merged_beyond_the_maximum() -> None:
    buckets = plan(GPT(), min_numel=10_000, max_numel=2 * BLOCK_NUMEL)
    assert [name for name in buckets if name.startswith("layers")] == ["layers.0-1", "layers.2-3"]


def test_maximum_splits_runs_but_no_block_and_no_parameter() -> None:
    buckets = plan(GPT(), min_numel=UNLIMITED, max_numel=100)
    assert [name for name in buckets if name.startswith("before")] == ["before.0", "before.1"]
    assert {name for name in buckets if name.startswith("layers")} == {f"layers.{i}" for i in range(4)}
    assert all(len(buckets[name].params) == 1 for name in ("before.0", "before.1"))


def test_minimum_of_zero_gives_every_module_outside_the_blocks_its_own_bucket() -> None:
    assert list(plan(GPT(layer_count=2), min_numel=0)) == ["model", "embed", "layers.0", "layers.1", "norm", "head"]


def test_unsharded_plan_keeps_the_same_units_resident() -> None:
    model = GPT()
    buckets = plan(model, is_sharded=False, persist=UNLIMITED)
    assert list(buckets) == list(plan(model))
    assert not any(spec.is_sharded for spec in buckets.values())


def test_persistent_parameters_stay_resident_and_their_scopes_are_the_users() -> None:
    model = GPT(layer_count=2)
    buckets = plan(model, persist=32)
    persistent = buckets["persistent"]
    assert not persistent.is_sharded and persistent.is_trainable
    assert names_of(model, persistent) == {n for n, p in model.named_parameters() if p.numel() <= 32}
    assert persistent.scopes == (model.layers[0], model.layers[1], model.norm)
    assert names_of(model, buckets["layers.0"]) == {"layers.0.up.weight", "layers.0.down.weight"}
    assert "after" not in buckets


def test_persistence_stops_at_the_total() -> None:
    model = GPT(layer_count=2)
    persistent = plan(model, persist=32, persist_total=50)["persistent"]
    # 8 + 8, then 32 fits (48); another 8 does not.
    assert names_of(model, persistent) == {"layers.0.norm.weight", "layers.0.norm.bias", "layers.0.up.bias"}


def test_optimizer_groups_order_the_bucket_and_do_not_split_it() -> None:
    model = GPT(layer_count=2)
    group_of = {param: 0 if param.ndim > 1 else 1 for param in model.parameters()}
    spec = plan(model, group_of)["layers.0"]
    assert spec.group_ids == (0, 0, 1, 1, 1, 1)
    block = model.layers[0]
    expected = [block.up.weight, block.down.weight, block.norm.weight, block.norm.bias, block.up.bias, block.down.bias]
    assert [id(p) for p in spec.params] == [id(p) for p in expected]


def test_frozen_parameters_have_their_own_buckets_only_when_sharded() -> None:
    model = GPT(layer_count=2)
    model.layers[0].requires_grad_(False)
    model.layers[1].up.requires_grad_(False)
    model.embed.requires_grad_(False)
    buckets = plan(model, min_numel=100)
    assert {"layers.0:frozen", "layers.1", "layers.1:frozen", "embed:frozen"} <= set(buckets)
    assert "layers.0" not in buckets
    assert buckets["layers.1:frozen"].scopes == buckets["layers.1"].scopes == (model.layers[1],)
    assert set(buckets["layers.0:frozen"].group_ids) == {-1}
    assert not any("frozen" in name for name in plan(model, is_sharded=False))


def test_small_trainable_adapters_merge_across_blocks_while_frozen_weights_do_not() -> None:
    model = GPT(layer_count=4)
    model.requires_grad_(False)
    for layer in model.layers:
        layer.adapter = nn.Linear(2, 2, bias=False)
    buckets = plan(model)
    assert names_of(model, buckets["layers.0-3"]) == {f"layers.{i}.adapter.weight" for i in range(4)}
    assert {f"layers.{i}:frozen" for i in range(4)} <= set(buckets)


def test_mixed_dtypes_do_not_share_a_bucket() -> None:
    model = GPT(layer_count=2).bfloat16()
    for layer in model.layers:
        layer.norm.float()
    model.norm.float().requires_grad_(False)
    buckets = plan(model)
    assert {"layers.0", "layers.1", "layers.0-1:float32", "after:float32:frozen"} <= set(buckets)
    assert all(param.dtype == torch.bfloat16 for param in buckets["layers.0"].params)


def test_devices_and_labels_do_not_share_a_bucket() -> None:
    model = GPT(layer_count=2)
    model.layers[1].down.to("meta")
    labels = {param: "ep_size_2" for param in model.layers[0].up.parameters()}
    buckets = plan(model, min_numel=100, family_labels=labels)
    assert names_of(model, buckets["layers.1:meta"]) == {"layers.1.down.weight", "layers.1.down.bias"}
    assert names_of(model, buckets["layers.0:ep_size_2"]) == {"layers.0.up.weight", "layers.0.up.bias"}
    assert buckets["layers.0:ep_size_2"].label == "ep_size_2" and buckets["layers.0"].label == ""


def test_tied_weights_are_planned_once_with_every_owner_as_scope() -> None:
    model = GPT(layer_count=2)
    model.head.weight = model.embed.weight
    buckets = plan(model)
    assert "head" not in buckets
    assert buckets["embed"].scopes == (model.embed, model.head)


def test_weights_tied_between_blocks_have_both_blocks_as_scopes() -> None:
    model = GPT(layer_count=3)
    model.layers[2].up = model.layers[0].up
    buckets = plan(model, min_numel=200)
    assert buckets["layers.0"].scopes == (model.layers[0], model.layers[2])
    assert buckets["layers.2"].scopes == (model.layers[2],)
    assert not any(name.startswith("layers.2.up") for name in names_of(model, buckets["layers.2"]))


def test_one_block_used_many_times_is_one_block() -> None:
    model = GPT(layer_count=0)
    block = Block()
    model.layers = nn.ModuleList([block, block, block])
    assert block_names(model) == ["layers.0"]
    assert plan(model)["layers.0"].scopes == (block,)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(100, 8)
        self.encoder = nn.Module()
        self.encoder.block = nn.ModuleList(Block() for _ in range(3))
        self.encoder.final_norm = nn.LayerNorm(8)
        self.decoder = nn.Module()
        self.decoder.block = nn.ModuleList(Block() for _ in range(2))
        self.decoder.final_norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 100, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_encoder_decoder() -> None:
    model = EncoderDecoder()
    assert block_names(model) == [f"encoder.block.{i}" for i in range(3)] + [f"decoder.block.{i}" for i in range(2)]
    buckets = plan(model, min_numel=10_000)
    # Blocks of different stacks never merge; the norms share the run after the first block.
    assert list(buckets) == ["before", "encoder.block.0-2", "after", "decoder.block.0-1"]
    assert buckets["before"].scopes == (model.shared, model.lm_head)
    assert buckets["after"].scopes == (model.encoder.final_norm, model.decoder.final_norm)


def test_hf_like_naming() -> None:
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(100, 8)
    model.model.layers = nn.ModuleList(Block() for _ in range(3))
    model.model.norm = nn.LayerNorm(8)
    model.lm_head = nn.Linear(8, 100, bias=False)
    assert list(plan(model)) == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "after", "lm_head",
    ]  # fmt: skip


def test_lists_inside_a_block_stay_in_the_block() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(nn.Sequential(Block(), Block(), nn.ModuleList([Block()])) for _ in range(2))
    assert block_names(model) == ["stages.0", "stages.1"]
    assert plan(model)["stages.0"].scopes == (model.stages[0],)


def test_lists_without_a_forward_are_looked_through() -> None:
    """A list of lists runs its inner elements one by one; hooks on the inner lists would never fire."""
    model = nn.Module()
    model.down = nn.ModuleList(nn.ModuleList([Block(), nn.Conv1d(8, 16, 8)]) for _ in range(2))
    model.up = nn.ModuleDict({"a": Block(), "b": Block()})
    assert block_names(model) == ["down.0.0", "down.0.1", "down.1.0", "down.1.1", "up.a", "up.b"]
    assert list(plan(model)) == ["down.0.0", "down.0.1", "down.1.0", "down.1.1", "up.a", "up.b"]
    assert "down.0.0-1" in plan(model, min_numel=10_000)


def test_list_without_a_repeated_class_is_no_layer_list() -> None:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Sequential(Block(), nn.GELU(), Block()), nn.Linear(8, 4))
    assert block_names(model) == ["1.0", "1.2"]
    assert list(plan(model)) == ["0", "1.0", "1.2", "after"]


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.moe = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.attention(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x) + self.router(x).sum()


def test_experts_list_stays_in_its_block_marked_or_not() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(MoEBlock() for _ in range(2))
    assert block_names(model) == ["layers.0", "layers.1"]
    set_z3_leaf_modules(model, ["Experts"])
    assert block_names(model) == ["layers.0", "layers.1"]
    assert plan(model)["layers.1"].scopes == (model.layers[1],)


def test_leaf_outside_a_layer_list_wins_over_the_list_in_it() -> None:
    model = MoEBlock()
    assert block_names(model) == [f"moe.experts.{i}" for i in range(4)]
    set_z3_leaf_module(model.moe, True)
    assert block_names(model) == ["moe"]
    buckets = plan(model)
    assert list(buckets) == ["before", "moe"]
    assert buckets["moe"].scopes == (model.moe,)


def test_leaf_that_has_no_forward_puts_hooks_on_what_runs() -> None:
    model = MoEBlock()
    set_z3_leaf_module(model.moe.experts, True)
    buckets = plan(model)
    assert buckets["moe.experts"].scopes == tuple(model.moe.experts)


def test_block_classes_override_layer_lists() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(MoEBlock() for _ in range(2))
    expected = ["layers.0.moe", "layers.1.moe"]
    assert block_names(model, block_classes=("Experts",)) == expected
    assert block_names(model, block_classes=(Experts,)) == expected
    assert {"layers.0.moe", "layers.1.moe"} <= set(plan(model, block_classes=(Experts,)))
    model.ds_block_classes = (Experts,)
    assert block_names(model) == expected
    assert block_names(model, block_classes=(MoEBlock,)) == ["layers.0", "layers.1"]
    with pytest.raises(PlanError, match="block classes 'Expert' do not occur"):
        find_blocks(model, block_classes=("Expert",))


def test_granularity_threshold_makes_fine_grained_modules_units() -> None:
    model = MoEBlock()
    model.attention = nn.Linear(8, 1000)
    # 2304 elements in 19 modules below `moe`: 121.26 each; a Block has 142, the root more than 500.
    assert block_names(model, granularity_threshold=121) == [f"moe.experts.{i}" for i in range(4)]
    assert block_names(model, granularity_threshold=122) == ["moe"]
    assert block_names(model, granularity_threshold=1000) == [""]
    whole = plan(model, granularity_threshold=1000)
    assert list(whole) == ["model"] and whole["model"].scopes == (model,)
    # A module without children is one unit anyway, however small.
    assert block_names(nn.Linear(2, 2), granularity_threshold=1000) == []


def test_model_without_blocks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.big = nn.Linear(8, 800)
            self.last = nn.Linear(800, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.big(self.first(x)))

    model = Net()
    buckets = plan(model, min_numel=1000)
    assert list(buckets) == ["model", "big"]
    assert buckets["model"].scopes == (model.first, model.last)


def test_single_linear_and_no_parameters() -> None:
    model = nn.Linear(4, 4)
    for min_numel in (0, 1000):
        buckets = plan(model, min_numel=min_numel)
        assert list(buckets) == ["model"] and buckets["model"].scopes == (model,)
    assert plan(nn.Identity()) == {}


def test_parameters_in_lists_are_used_by_the_module_above() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompts = nn.ParameterList([torch.zeros(3), torch.zeros(0)])

        def forward(self) -> torch.Tensor:
            return self.prompts[0]

    model = nn.Sequential(Prompted())
    assert plan(model)["model"].scopes == (model[0],)


def test_attention_reads_its_output_projection_without_calling_it() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert plan(model, min_numel=0)["0.out_proj"].scopes == (model[0],)


def test_empty_parameters_are_planned() -> None:
    model = GPT(layer_count=2)
    model.layers[0].extra = nn.Parameter(torch.zeros(0, 8))
    model.nothing = nn.Parameter(torch.zeros(0))
    assert "layers.0.extra" in names_of(model, plan(model)["layers.0"])
    assert {"nothing", "layers.0.extra"} <= names_of(model, plan(model, persist=0)["persistent"])


def test_module_named_like_a_run_keeps_names_unique() -> None:
    model = GPT(layer_count=2)
    model.before = nn.Linear(8, 100)
    assert {"before", "before#2"} <= set(plan(model))


def test_equal_models_have_equal_plans() -> None:
    model = GPT()
    other = copy.deepcopy(model)
    for options in ({}, {"min_numel": 2000}, {"persist": 32, "persist_total": 300}):
        ours, theirs = plan(model, **options), plan(other, **options)
        assert list(ours) == list(theirs)
        for name in ours:
            assert [p.shape for p in ours[name].params] == [p.shape for p in theirs[name].params]
            assert names_of(model, ours[name]) == names_of(other, theirs[name])


def test_optimizer_parameters_outside_the_model_are_refused() -> None:
    model = GPT()
    group_of = {**optimize_all(model), nn.Parameter(torch.zeros(3, 2)): 0}
    with pytest.raises(PlanError, match=r"1 parameters of the optimizer are not in the model \(shapes \(3, 2\)\)"):
        plan(model, group_of)
