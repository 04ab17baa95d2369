"""From what a recipe keeps, as shares or counts, to a shape that stock transformers can load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from compress.model.anatomy import Anatomy
from compress.model.checkpoint import Checkpoint
from compress.model.prunable import heads_refusal, layers_refusal, prunable
from compress.model.pruned import layer_kinds, must_divide, stateable
from compress.model.shapes import Shape
from compress.recipe.origin import Fault
from compress.recipe.prune import Keep

_NAMES = {
    "ffn": "feed-forward channels",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "layers": "layers",
}


@dataclass(frozen=True)
class Legal:
    """What a model can be pruned to.

    Attributes:
        before: its own shape.
        multiple: pruned feed-forward networks have a multiple of this many channels.
        heads: (query heads, key and value heads), ascending: its own, and all that a config.json can state and where
            every key and value head serves as many query heads as another.
        divided: what a number of query heads has to divide, None where it need not.
        refusals: {"heads" or "layers": why none of these can go}.
        kinds: of layers that the model has, which is how many have to stay at least.
    """

    model_type: str
    before: Shape
    multiple: int
    heads: tuple[tuple[int, int], ...]
    divided: int | None
    refusals: Mapping[str, str]
    kinds: int = 1

    @property
    def widths(self) -> tuple[int, ...]:
        """All numbers of channels, ascending, its own included."""
        return tuple(sorted({*range(self.multiple, self.before.ffn + 1, self.multiple), self.before.ffn}))

    @property
    def group(self) -> int:
        """Query heads that each key and value head serves."""
        return self.before.heads // self.before.kv_heads

    def heads_of(self, kv_heads: int) -> tuple[int, ...]:
        """Numbers of query heads beside so many key and value heads."""
        return tuple(heads for heads, kv in self.heads if kv == kv_heads)


@dataclass(frozen=True)
class Resolved:
    """Attributes:
    shape: what is left; where there are faults, only what could be told.
    faults: all that cannot be, with its path inside the step.
    notes: shares that were rounded.
    """

    shape: Shape
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Choice:
    """One kind: the count that is meant, or why there is none."""

    count: int
    fault: str | None = None
    note: str | None = None


def legal_shapes(checkpoint: Checkpoint, anatomy: Anatomy, before: Shape, multiple: int) -> Legal:
    """Everything that `resolve` and the search choose from."""
    group, own = before.heads // before.kv_heads, (before.heads, before.kv_heads)
    pairs = {(kv * kept, kv) for kv in range(1, before.kv_heads + 1) for kept in range(1, group + 1)}
    refusals = {"heads": heads_refusal(checkpoint, anatomy), "layers": layers_refusal(checkpoint)}
    hidden = checkpoint.config.get(prunable(anatomy).hidden)
    return Legal(
        model_type=anatomy.model_type,
        before=before,
        multiple=multiple,
        heads=tuple(sorted(pair for pair in pairs if pair == own or stateable(checkpoint, anatomy, pair[0]))),
        divided=hidden if isinstance(hidden, int) and must_divide(checkpoint, anatomy) else None,
        refusals={name: reason for name, reason in refusals.items() if reason is not None},
        kinds=len(set(layer_kinds(checkpoint, anatomy))),
    )


def resolve(keep: Keep, legal: Legal) -> Resolved:
    """The shape that is asked for. Shares become the nearest legal number, of two as near the larger one."""
    choices = {name: choice for name, choice in _choices(keep, legal).items() if choice is not None}
    faults: list[Fault] = [(("keep", name), one.fault) for name, one in choices.items() if one.fault is not None]
    if keep.ffn is not None and legal.widths == (legal.before.ffn,):
        faults = [fault for fault in faults if fault[0] != ("keep", "ffn")]
        sentence = f"there is no multiple of {legal.multiple} below the model's {legal.before.ffn} channels"
        faults.append((("ffn_multiple",), sentence))
    counts = {name: one.count for name, one in choices.items() if one.fault is None}
    if keep.heads is None and "kv_heads" in counts:
        counts["heads"] = counts["kv_heads"] * legal.group
    if keep.kv_heads is None and "heads" in counts and legal.group == 1:
        counts["kv_heads"] = counts["heads"]
    shape = replace(legal.before, **counts)
    if keep.named and shape == legal.before and not faults:
        faults.append((("keep",), f"this is all that there is: nothing would be removed ({_told(legal.before)})"))
    return Resolved(shape, tuple(faults), tuple(one.note for one in choices.values() if one.note is not None))


def _choices(keep: Keep, legal: Legal) -> dict[str, _Choice | None]:
    before = legal.before
    kv = heads = None
    if (refusal := legal.refusals.get("heads")) is not None:
        others = "`ffn`" if "layers" in legal.refusals else "`ffn` and `layers`"
        refused = _Choice(0, f"heads of {legal.model_type} cannot be pruned: {refusal}. {others} can be")
        heads = None if keep.heads in (None, before.heads) else refused
        kv = None if keep.kv_heads in (None, before.kv_heads) else refused
    else:
        if keep.kv_heads is not None:
            kv = _kv_heads(keep.kv_heads, legal, alone=keep.heads is None)
        if keep.heads is not None and kv is None and legal.group == 1:
            pairs = {kv for heads, kv in legal.heads if heads == kv}  # without a number of its own, as many of these
            heads = _choose("heads", keep.heads, before.heads, pairs, _divisor_rule(legal))
        elif keep.heads is not None and (kv is None or kv.fault is None):
            heads = _heads(keep.heads, legal, before.kv_heads if kv is None else kv.count)
    return {
        "ffn": None if keep.ffn is None else _choose("ffn", keep.ffn, before.ffn, legal.widths, _widths_rule(legal)),
        "heads": heads,
        "kv_heads": kv,
        "layers": None if keep.layers is None else _layers(keep.layers, legal),
    }


def _kv_heads(asked: int | float, legal: Legal, *, alone: bool) -> _Choice:
    """Without a number of query heads, each head that stays keeps all of its own."""
    counts = {kv for heads, kv in legal.heads if not alone or heads == kv * legal.group}
    rule = f"each goes with all {legal.group} query heads that it serves" if legal.group > 1 and alone else ""
    rule = "; ".join(part for part in (rule, _divisor_rule(legal)) if part)
    return _choose("kv_heads", asked, legal.before.kv_heads, counts, rule)


def _heads(asked: int | float, legal: Legal, kv_heads: int) -> _Choice:
    shared = ""
    if kv_heads > 1:
        shared = f"each of the {kv_heads} key and value heads serves as many query heads as another"
    elif legal.before.kv_heads > 1:
        shared = "one key and value head serves all of them"
    shared += f", {legal.group} at most" if shared else ""
    rule = "; ".join(part for part in (shared, _divisor_rule(legal)) if part)
    choice = _choose("heads", asked, legal.before.heads, legal.heads_of(kv_heads), rule)
    others = [str(kv) for heads, kv in legal.heads if heads == asked and kv != kv_heads]
    if choice.fault is None or not others:
        return choice
    return replace(choice, fault=f"{choice.fault}. With kv_heads {' or '.join(others)} it can be {asked}")


def _layers(asked: int | float, legal: Legal) -> _Choice:
    total = legal.before.layers
    refusal = legal.refusals.get("layers")
    if refusal is not None and asked != total:
        return _Choice(0, f"layers of this model cannot be removed: {refusal}")
    rule = f"the model has {legal.kinds} kinds of layers, and one of each stays" if legal.kinds > 1 else ""
    return _choose("layers", asked, total, range(legal.kinds, total + 1), rule)


def _widths_rule(legal: Legal) -> str:
    return f"the number of channels is a multiple of {legal.multiple}"


def _divisor_rule(legal: Legal) -> str:
    if legal.divided is None:
        return ""
    return (
        f"transformers' config class of {legal.model_type} takes only numbers of query heads that divide the hidden "
        f"size {legal.divided}"
    )


def _choose(kind: str, asked: int | float, total: int, counts: Iterable[int], rule: str) -> _Choice:
    """Args:
    asked: a count or a share.
    total: how many there are.
    counts: the legal numbers.
    rule: what makes them legal, for messages.
    """
    legal, name = sorted(counts), _NAMES[kind]
    below = [count for count in legal if count < total]
    because = f" ({rule})" if rule else ""
    if isinstance(asked, int):
        if asked in legal:
            return _Choice(asked)
        if asked > total:
            most = f"; to remove any, keep at most {below[-1]}{because}" if below else ""
            return _Choice(0, f"{asked} is more than the {total} {name} that there are{most}")
        told = f"{asked} {name} are" if asked > 1 else f"1 {name.removesuffix('s')} is"
        return _Choice(0, f"{told} not possible{because}: {_nearest(asked, legal, total)}")
    exact = Decimal(repr(asked)) * total
    nearest = min(legal, key=lambda count: (abs(count - exact), -count))
    meant = f"{asked:g} of {total} {name} is {exact.normalize():f}"
    if nearest == total:
        other = f"the nearest number below is {below[-1]}" if below else "there is no smaller one"
        return _Choice(
            0, f"{meant}, and the nearest possible number is all {total}{because}: nothing would be removed; {other}"
        )
    note = None if nearest == exact else f"{kind}: {meant}; {nearest} is the nearest possible number{because}"
    return _Choice(nearest, note=note)


def _nearest(asked: int, legal: list[int], total: int) -> str:
    lower, upper = [one for one in legal if one < asked], [one for one in legal if one > asked]
    named = [str(one[index]) for one, index in ((lower, -1), (upper, 0)) if one]
    all_of_them = ", which is all of them" if upper and upper[0] == total else ""
    verb = "numbers are" if len(named) == 2 else "number is"
    return f"the nearest possible {verb} {' and '.join(named)}{all_of_them}"


def _told(shape: Shape) -> str:
    return f"ffn {shape.ffn}, heads {shape.heads}, kv_heads {shape.kv_heads}, layers {shape.layers}"
