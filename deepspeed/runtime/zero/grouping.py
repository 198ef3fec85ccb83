"""Which parameters share a communication unit: from a model to a list of `BucketSpec`.

The unit is the *block*: an element of a list of layers. Its parameters are used together, so they are gathered,
released and reduced together. What stands outside the blocks is grouped by when it is registered; large modules there
(an embedding, a head) stand alone. Nothing here touches a tensor's data or communicates, and equal models give equal
plans on every rank.

Vocabulary. A *unit* is a module whose parameters are fetched as one: a block, or a leaf module. The *owner* of a
parameter is the module that holds it directly; a tied parameter has several, and belongs where it is registered first.
A *family* is a set of parameters that may lie in one flat tensor: same dtype, device type, trainability and label. A
*scope* is a module whose forward and backward need the bucket, and on which hooks fire.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from deepspeed.errors import PlanError
from deepspeed.runtime.policies import OffloadPlan, Placement
from deepspeed.utils.z3_leaf_module import is_instance_of, list_classes, z3_leaf_module

NOT_OPTIMIZED = -1

# Layer lists. The first two have no forward of their own: hooks on them never fire.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# Modules that read the parameters of their children without calling them, so that hooks on the children never fire.
_READS_CHILDREN = (nn.MultiheadAttention,)


# Specs compare by identity: comparing tuples of parameters would compare tensors element by element.
@dataclass(frozen=True, eq=False)
class BucketSpec:
    """One communication unit as planned: which parameters, in which order, used by which modules.

    name: unique in a plan. The block (`layers.0`), merged blocks (`layers.0-3`), a module that stands alone (`embed`),
        `before` or `after` the first block, `model` where there are no blocks, or `persistent`; `.0`, `.1` follow when
        such a run is split for size. A family that is not the model's main one adds its marks, as in `layers.0:frozen`.
    params: in flat order, by optimizer group and then by registration.
    group_ids: optimizer parameter group of each parameter; -1 for one that is not optimised.
    scopes: modules whose forward and backward use the bucket, each once.
    is_sharded: whether the full parameters are released between uses.
    is_trainable: whether the parameters are optimised, and so have gradients to reduce.
    label: what `family_labels` said about the parameters; empty by default.
    """

    name: str
    params: tuple[nn.Parameter, ...]
    group_ids: tuple[int, ...]
    scopes: tuple[nn.Module, ...]
    is_sharded: bool
    is_trainable: bool
    label: str = ""

    @property
    def numel(self) -> int:
        """The number of elements of its parameters."""
        return sum(parameter.numel() for parameter in self.params)


def place_buckets(specs: Sequence[BucketSpec], offload: OffloadPlan) -> list[Placement]:
    """Return where the state and the shard of each bucket rest."""
    return offload.placements([(spec.numel, spec.is_trainable, spec.is_sharded) for spec in specs])


@dataclass(frozen=True)
class _Family:
    dtype: torch.dtype
    device: str
    is_trainable: bool
    label: str


@dataclass(frozen=True, eq=False)
class _Place:
    """One parameter and where the model uses it."""

    index: int  # registration order
    param: nn.Parameter
    owner: str  # name of the first module that holds it
    unit: str | None  # name of the unit that contains the first owner
    scopes: tuple[nn.Module, ...]  # over all owners


@dataclass(frozen=True, eq=False)
class _Draft:
    """A bucket before its family is written into its name."""

    name: str
    places: list[_Place]


def find_blocks(
    model: nn.Module, block_classes: tuple[type[nn.Module] | str, ...] = (), granularity_threshold: int = 0
) -> list[tuple[str, nn.Module]]:
    """The communication units of `model` as (name, module), in registration order; no unit contains another.

    From the root downwards the first of these that applies makes a module a unit, or its elements units:
    - it is marked as a leaf (`deepspeed.utils.set_z3_leaf_modules`);
    - it is of one of `block_classes` (types or names), or of the tuple in the model's attribute `ds_block_classes`;
      when either is given, layer lists are not looked for;
    - it has fewer than `granularity_threshold` parameter elements per module in it;
    - it is a layer list (ModuleList, ModuleDict, Sequential) in which some class with parameters occurs at least twice:
      every element with parameters is a unit. A list without a forward inside such a list is looked through, because
      its elements run one by one. Other lists inside a unit stay in it.
    Raises: PlanError if block classes are given and none of them occurs.
    """
    chosen = block_classes or getattr(model, "ds_block_classes", ())

    def is_unit(module: nn.Module) -> bool:
        is_chosen = z3_leaf_module(module) or is_instance_of(module, chosen)
        return is_chosen or _is_fine_grained(module, granularity_threshold)

    found: dict[nn.Module, str] = {}
    for name, module in _find_units(model, "", is_unit, looks_for_lists=not chosen):
        found.setdefault(module, name)
    if chosen and not any(is_instance_of(module, chosen) for module in model.modules()):
        raise PlanError(
            f"block classes {list_classes(chosen)} do not occur in {type(model).__name__}. Check the names, or leave "
            "them out to have blocks found from the model's layer lists."
        )
    return [(name, module) for module, name in found.items()]


def plan_buckets(
    model: nn.Module,
    group_of: Mapping[nn.Parameter, int],
    *,
    is_sharded: bool,
    persistence_threshold: int,
    model_persistence_numel: int,
    min_bucket_numel: int,
    max_bucket_numel: int | None,
    block_classes: tuple[type[nn.Module] | str, ...] = (),
    granularity_threshold: int = 0,
    family_labels: Mapping[nn.Parameter, str] | None = None,
) -> list[BucketSpec]:
    """The buckets of `model`, ordered by the first parameter that each contains.

    With `is_sharded` every parameter of the model is in exactly one bucket; otherwise every optimised one is.

    group_of: optimizer parameter group of each optimised parameter; the others are frozen.
    is_sharded: whether parameters are released between uses (ZeRO stage 3).
    persistence_threshold: when sharded, parameters of at most this many elements are never released ...
    model_persistence_numel: ... as long as all of them together have at most this many elements.
    min_bucket_numel: sibling blocks are merged until they have this many elements; a module outside the blocks with
        more than this many stands alone.
    max_bucket_numel: buckets of parameters outside the blocks are split, and blocks are not merged, beyond this many
        elements; a block or a parameter that is larger stays whole. None for no limit.
    block_classes, granularity_threshold: see `find_blocks`.
    family_labels: parameters with different labels never share a bucket; for experts, which have their own ranks.
    Raises: PlanError if `group_of` has a parameter that is not in the model.
    """
    places = _survey(model, find_blocks(model, block_classes, granularity_threshold))
    _check_optimized_are_in_model(places, group_of)
    if not is_sharded:
        places = [place for place in places if place.param in group_of]
    persistent = _choose_persistent(places, persistence_threshold, model_persistence_numel) if is_sharded else set()
    first_block_index = min((place.index for place in places if place.unit is not None), default=None)

    drafts: list[tuple[_Family, bool, _Draft]] = []
    for family, members in _by_family(places, group_of, family_labels or {}).items():
        kept = [place for place in members if place.index in persistent]
        rest = [place for place in members if place.index not in persistent]
        blocks = [place for place in rest if place.unit is not None]
        others = [place for place in rest if place.unit is None]
        for draft in _split_run("persistent", kept, max_bucket_numel):
            drafts.append((family, False, draft))
        for draft in _draft_blocks(blocks, min_bucket_numel, max_bucket_numel):
            drafts.append((family, is_sharded, draft))
        for draft in _draft_others(others, first_block_index, min_bucket_numel, max_bucket_numel):
            drafts.append((family, is_sharded, draft))

    drafts.sort(key=lambda entry: entry[2].places[0].index)
    marks = _FamilyMarks(places)
    specs = [_specify(draft, family, marks, group_of, sharded) for family, sharded, draft in drafts]
    return _with_unique_names(specs)


def _find_units(
    module: nn.Module, name: str, is_unit: Callable[[nn.Module], bool], looks_for_lists: bool
) -> Iterator[tuple[str, nn.Module]]:
    if _numel(module) is None:
        return
    if is_unit(module):
        yield name, module
        return
    if looks_for_lists and isinstance(module, _LISTS):
        elements = list(_elements(module, name, is_unit))
        if _has_repeated_class(element for _, element in elements):
            yield from elements
            return
    for child_name, child in module.named_children():
        yield from _find_units(child, _join(name, child_name), is_unit, looks_for_lists)


def _elements(container: nn.Module, name: str, is_unit: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Elements with parameters of a layer list, lists without a forward looked through; repeats are given each time."""
    # named_children() would leave out the second place of a block that is used twice.
    for child_name, child in container._modules.items():
        if child is None or _numel(child) is None:
            continue
        child_name = _join(name, child_name)
        if isinstance(child, _LISTS) and not has_forward(child) and not is_unit(child):
            yield from _elements(child, child_name, is_unit)
        else:
            yield child_name, child


def _has_repeated_class(modules: Iterable[nn.Module]) -> bool:
    return any(count >= 2 for count in Counter(type(module) for module in modules).values())


def _is_fine_grained(module: nn.Module, threshold: int) -> bool:
    """Whether `module` has children, a forward, and fewer than `threshold` parameter elements per module in it."""
    if threshold <= 0 or not has_forward(module):
        return False
    module_count = sum(1 for _ in module.modules())
    return module_count > 1 and (_numel(module) or 0) / module_count < threshold


def _numel(module: nn.Module) -> int | None:
    """Parameter elements in `module`, shared ones counted once; None when it has no parameters at all."""
    numels = [param.numel() for param in module.parameters()]
    return sum(numels) if numels else None


def has_forward(module: nn.Module) -> bool:
    """Whether calling `module` can work, so that hooks on it can fire; lists of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _survey(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> list[_Place]:
    """The places of all parameters, in registration order."""
    unit_names = {module: name or "model" for name, module in blocks}
    paths_of: dict[nn.Parameter, list[tuple[str, tuple[nn.Module, ...]]]] = {}
    for name, path in _walk(model, "", ()):
        for param in path[-1].parameters(recurse=False):
            paths_of.setdefault(param, []).append((name, path))

    places = []
    for index, (param, paths) in enumerate(paths_of.items()):
        owner, first_path = paths[0]
        unit = next((unit_names[module] for module in first_path if module in unit_names), None)
        scopes = tuple(dict.fromkeys(_scope(path, unit_names) for _, path in paths))
        places.append(_Place(index, param, owner or "model", unit, scopes))
    return places


def _walk(
    module: nn.Module, name: str, ancestors: tuple[nn.Module, ...]
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Every module as (name, path from the root to it), parents first; a shared module once for each place."""
    path = (*ancestors, module)
    yield name, path
    for child_name, child in module.named_children():
        yield from _walk(child, _join(name, child_name), path)


def _scope(path: tuple[nn.Module, ...], unit_names: Mapping[nn.Module, str]) -> nn.Module:
    """The module whose forward stands for the use of parameters that the last module of `path` holds.

    Inside a unit: the unit, or below it where the unit has no forward. Outside: the owner, or the nearest module above
    it that really runs.
    """
    start = next((depth for depth, module in enumerate(path) if module in unit_names), None)
    if start is not None:
        candidates = (*path[start:], *reversed(path[:start]))
    else:
        readers = (module for module in path if isinstance(module, _READS_CHILDREN))
        candidates = (*readers, *reversed(path))
    return next((module for module in candidates if has_forward(module)), path[0])


def _choose_persistent(places: list[_Place], threshold: int, total_numel: int) -> set[int]:
    """Indices of the parameters never released: small ones, in registration order, each that still fits the total."""
    chosen, left = set(), total_numel
    for place in places:
        numel = place.param.numel()
        if numel <= min(threshold, left):
            chosen.add(place.index)
            left -= numel
    return chosen


def _by_family(
    places: list[_Place], group_of: Mapping[nn.Parameter, int], labels: Mapping[nn.Parameter, str]
) -> dict[_Family, list[_Place]]:
    families: dict[_Family, list[_Place]] = {}
    for place in places:
        param = place.param
        family = _Family(param.dtype, param.device.type, param in group_of, labels.get(param, ""))
        families.setdefault(family, []).append(place)
    return families


def _draft_blocks(places: list[_Place], min_numel: int, max_numel: int | None) -> list[_Draft]:
    """One draft per unit; siblings (`layers.0`, `layers.1`, ...) merged up to `min_numel` elements."""
    by_unit: dict[str, list[_Place]] = {}
    for place in places:
        by_unit.setdefault(place.unit, []).append(place)
    by_parent: dict[str, list[_Draft]] = {}
    for unit, members in by_unit.items():
        by_parent.setdefault(_parent(unit), []).append(_Draft(unit, members))
    return [draft for siblings in by_parent.values() for draft in _merge(siblings, min_numel, max_numel)]


def _merge(siblings: list[_Draft], min_numel: int, max_numel: int | None) -> list[_Draft]:
    runs: list[list[_Draft]] = []
    for draft in siblings:
        if runs and _total(*runs[-1]) < min_numel and _fits(max_numel, *runs[-1], draft):
            runs[-1].append(draft)
        else:
            runs.append([draft])
    # Small leftovers join the run before them: one collective less.
    if len(runs) > 1 and _total(*runs[-1]) < min_numel and _fits(max_numel, *runs[-2], *runs[-1]):
        leftover = runs.pop()
        runs[-1].extend(leftover)
    return [_Draft(_run_name(run), [place for draft in run for place in draft.places]) for run in runs]


def _run_name(run: list[_Draft]) -> str:
    if len(run) == 1:
        return run[0].name
    return f"{run[0].name}-{run[-1].name.rpartition('.')[2]}"


def _draft_others(
    places: list[_Place], first_block_index: int | None, min_numel: int, max_numel: int | None
) -> list[_Draft]:
    """Drafts for parameters outside all units: large owners alone, the rest by whether it comes before the blocks."""
    by_owner: dict[str, list[_Place]] = {}
    for place in places:
        by_owner.setdefault(place.owner, []).append(place)
    drafts, runs = [], {"model": [], "before": [], "after": []}
    for owner, members in by_owner.items():
        draft = _Draft(owner, members)
        if _total(draft) > min_numel:
            drafts.append(draft)
        elif first_block_index is None:
            runs["model"].extend(members)
        else:
            runs["before" if members[0].index < first_block_index else "after"].extend(members)
    for name, run in runs.items():
        drafts.extend(_split_run(name, run, max_numel))
    return drafts


def _split_run(name: str, places: list[_Place], max_numel: int | None) -> list[_Draft]:
    """Drafts that share out `places` in order, each of at most `max_numel` elements or of one parameter."""
    parts: list[list[_Place]] = []
    part_numel = 0
    for place in places:
        numel = place.param.numel()
        if parts and (max_numel is None or part_numel + numel <= max_numel):
            parts[-1].append(place)
            part_numel += numel
        else:
            parts.append([place])
            part_numel = numel
    if len(parts) == 1:
        return [_Draft(name, places)]
    return [_Draft(f"{name}.{number}", part) for number, part in enumerate(parts)]


def _fits(max_numel: int | None, *drafts: _Draft) -> bool:
    return max_numel is None or _total(*drafts) <= max_numel


def _total(*drafts: _Draft) -> int:
    return sum(place.param.numel() for draft in drafts for place in draft.places)


class _FamilyMarks:
    """Writes into a bucket's name what sets its family apart from the dtype and device that most elements have."""

    def __init__(self, places: list[_Place]) -> None:
        self.dtype = _most_common((place.param.dtype, place.param.numel()) for place in places)
        self.device = _most_common((place.param.device.type, place.param.numel()) for place in places)

    def of(self, family: _Family) -> str:
        marks = [
            family.label,
            "" if family.dtype == self.dtype else str(family.dtype).removeprefix("torch."),
            "" if family.device == self.device else family.device,
            "" if family.is_trainable else "frozen",
        ]
        return "".join(f":{mark}" for mark in marks if mark)


def _most_common(weighted: Iterable[tuple[torch.dtype | str, int]]) -> torch.dtype | str | None:
    counts: Counter[torch.dtype | str] = Counter()
    for value, weight in weighted:
        counts[value] += weight
    return max(counts, key=counts.__getitem__, default=None)


def _specify(
    draft: _Draft, family: _Family, marks: _FamilyMarks, group_of: Mapping[nn.Parameter, int], is_sharded: bool
) -> BucketSpec:
    def group(place: _Place) -> int:
        return group_of.get(place.param, NOT_OPTIMIZED)

    ordered = sorted(draft.places, key=lambda place: (group(place), place.index))
    return BucketSpec(
        name=draft.name + marks.of(family),
        params=tuple(place.param for place in ordered),
        group_ids=tuple(group(place) for place in ordered),
        scopes=tuple(dict.fromkeys(scope for place in draft.places for scope in place.scopes)),
        is_sharded=is_sharded,
        is_trainable=family.is_trainable,
        label=family.label,
    )


def _with_unique_names(specs: Sequence[BucketSpec]) -> list[BucketSpec]:
    """The same specs; where a module happens to be named like a run ("before"), later ones get a number."""
    seen: Counter[str] = Counter()
    unique = []
    for spec in specs:
        seen[spec.name] += 1
        number = seen[spec.name]
        unique.append(spec if number == 1 else replace(spec, name=f"{spec.name}#{number}"))
    return unique


def _check_optimized_are_in_model(places: list[_Place], group_of: Mapping[nn.Parameter, int]) -> None:
    known = {place.param for place in places}
    strangers = [param for param in group_of if param not in known]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:3])
        raise PlanError(
            f"{len(strangers)} parameters of the optimizer are not in the model (shapes {shapes}"
            f"{', ...' if len(strangers) > 3 else ''}). Register the module that holds them as a submodule of the "
            "model, or give the optimizer model.parameters()."
        )


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
