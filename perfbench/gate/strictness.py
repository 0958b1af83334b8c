"""Whether a matrix judges more loosely than the baseline's, and the stricter of both.

Pure. What is ordered is judged by the stricter of both; what is not must be equal. A loosening is a
finding of the whole run, exit 2, until a baseline with it was promoted and reviewed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from perfbench.gate.judgement import Finding
from perfbench.matrix import GatePolicy, JudgeRules, Policies
from perfbench.records import BOUNDS, Expect, Run, Verdict

LOWER: Final = "lower"
HIGHER: Final = "higher"
EQUAL: Final = "equal"
# Key -> which value is the stricter: the lower, the higher, or the later one of a list. Every key
# that is not here must be equal: metric, power, pairs, warm-up, samples, time-out, target, ...
STRICTER: Mapping[str, str | tuple[str, ...]] = MappingProxyType(
    {
        "gate.min_effect_pct": LOWER,
        "gate.tolerance_pct": LOWER,
        "gate.alpha_screen": HIGHER,
        "gate.alpha_confirm": HIGHER,
        "gate.sentinel_band_pct": LOWER,
        # Fewer than these judge nothing, so a higher number lets more pass.
        "gate.min_replicates": LOWER,
        "gate.missing": ("warn", "fail"),
        "gate.new": ("warn", "fail"),
        "measure.processes": HIGHER,
        "measure.profile": ("first", "every"),
    }
)
MAX_SHOWN = 20  # loosenings that a reason spells out


@dataclass(frozen=True, slots=True)
class Loosening:
    """One key that the matrix loosens; ``cell`` is empty where it holds for all."""

    key: str
    cell: str
    got: object
    baseline: object

    def __str__(self) -> str:
        where = f" of {self.cell}" if self.cell else ""
        return f"{self.key}{where}: got {_shown(self.got)}, the baseline's {_shown(self.baseline)}"


@dataclass(frozen=True, slots=True)
class JointRules:
    """What a run is judged by: ``policies`` and ``expect`` are the stricter of its own and the
    baseline's.
    """

    policies: Policies
    expect: Mapping[str, Expect]
    loosened: tuple[Loosening, ...]

    def applied_to(self, run: Run) -> Run:
        """``run``, planned to show what both expect."""
        cells = [
            cell.model_copy(update={"expect": self.expect[cell.cell_id]})
            if cell.cell_id in self.expect
            else cell
            for cell in run.manifest.cells
        ]
        return run.model_copy(update={"manifest": run.manifest.model_copy(update={"cells": cells})})

    def findings(self) -> list[Finding]:
        """Exit 2, and exactly what was loosened."""
        if not self.loosened:
            return []
        shown = "; ".join(map(str, self.loosened[:MAX_SHOWN]))
        more = len(self.loosened) - MAX_SHOWN
        text = (
            f"the matrix loosens what judges it: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}. The run is judged by the stricter of"
            " both. Next: undo it, or promote a run with it and have the baseline reviewed"
        )
        return [Finding(Verdict.LOOSENED, "policy", text)]


def is_looser(key: str, got: object, baseline: object) -> bool:
    """Whether ``got`` judges more loosely than the baseline's value, or cannot be ordered and
    differs.
    """
    return got != baseline and _stricter(key, got, baseline) != got


def joint_rules(
    own: JudgeRules, baseline: JudgeRules, policies: Policies, cells: Collection[str]
) -> JointRules:
    """What judges a run of a matrix with rules ``own`` and ``policies`` by a baseline with those
    rules and ``cells``, by their ids in the baseline.
    """
    renamed = {old: new for old, new in baseline.aliases.items() if old in cells}
    baseline = _under_new_names(baseline, renamed)
    ids = sorted({*(renamed.get(one, one) for one in cells), *own.by_cell})
    whole = _stricter_gate(own.gate, baseline.gate)
    by_cell = {
        one: _stricter_gate(own.of_cell(one), baseline.of_cell(one))
        for one in ids
        if one in own.by_cell or one in baseline.by_cell
    }
    loosened = [*_gate(own.gate, baseline.gate), *_of_cells(own, baseline, ids)]
    loosened += _equal_or_stricter(own.settings, baseline.settings)
    loosened += _expectations(own, baseline)
    if lost := [name for name in baseline.sentinels if name not in own.sentinels]:
        loosened.append(Loosening("sentinels", "", list(own.sentinels), [*own.sentinels, *lost]))
    now = {old: new for old, new in own.aliases.items() if old in cells}
    if now != renamed:
        loosened.append(Loosening("aliases", "", now, renamed))
    joint = Policies(
        GatePolicy.model_validate(whole),
        {one: GatePolicy.model_validate(found) for one, found in by_cell.items()},
        policies.aliases,
    )
    return JointRules(joint, _both_expect(own, baseline), tuple(loosened))


def _under_new_names(rules: JudgeRules, renamed: Mapping[str, str]) -> JudgeRules:
    return JudgeRules(
        gate=rules.gate,
        by_cell={renamed.get(one, one): found for one, found in rules.by_cell.items()},
        settings=rules.settings,
        expect={renamed.get(one, one): found for one, found in rules.expect.items()},
        sentinels=rules.sentinels,
        aliases=rules.aliases,
    )


def _stricter(key: str, got: Any, baseline: Any) -> Any:
    """The stricter of two values; the baseline's where they cannot be ordered."""
    order = STRICTER.get(key, EQUAL)
    if order == EQUAL:
        return baseline
    try:
        if order == LOWER:
            return min(got, baseline)
        if order == HIGHER:
            return max(got, baseline)
        return max(got, baseline, key=order.index)
    except (TypeError, ValueError):  # a value that another version wrote
        return baseline


def _stricter_gate(own: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _stricter(f"gate.{key}", own[key], baseline[key]) for key in own}


def _gate(own: Mapping[str, Any], baseline: Mapping[str, Any], cell: str = "") -> list[Loosening]:
    return [
        Loosening(f"gate.{key}", cell, own[key], baseline[key])
        for key in own
        if is_looser(f"gate.{key}", own[key], baseline[key])
    ]


def _of_cells(own: JudgeRules, baseline: JudgeRules, ids: Collection[str]) -> list[Loosening]:
    """What single cells loosen, beyond what all do."""
    whole = {(one.key, one.got, one.baseline) for one in _gate(own.gate, baseline.gate)}
    return [
        one
        for cell in ids
        if cell in own.by_cell or cell in baseline.by_cell
        for one in _gate(own.of_cell(cell), baseline.of_cell(cell), cell)
        if (one.key, one.got, one.baseline) not in whole
    ]


def _equal_or_stricter(own: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Loosening]:
    """A setting that only one of the versions knows is not compared."""
    return [
        Loosening(key, "", own[key], baseline[key])
        for key in own
        if key in baseline and is_looser(key, own[key], baseline[key])
    ]


def _expectations(own: JudgeRules, baseline: JudgeRules) -> list[Loosening]:
    """Counters that the baseline expected and the matrix no longer does, and bounds that are higher
    or gone; a cell that is gone is MISSING instead.
    """
    found = []
    for cell, wanted in sorted(baseline.expect.items()):
        if (here := own.expect.get(cell)) is None:
            continue
        for what, got, then in (
            ("engaged", here.engaged, wanted.engaged),
            ("forbidden", here.forbidden, wanted.forbidden),
        ):
            if set(then) - set(got):
                found.append(Loosening(f"expect.{what}", cell, list(got), list(then)))
        for name in BOUNDS:
            most, least = getattr(here, name), getattr(wanted, name)
            if _lower_bound(most, least) != most:
                found.append(Loosening(f"expect.{name}", cell, most, least))
    return found


def _lower_bound(one: float | None, other: float | None) -> float | None:
    """The stricter of two bounds; None is no bound."""
    stated = [bound for bound in (one, other) if bound is not None]
    return min(stated, default=None)


def _both_expect(own: JudgeRules, baseline: JudgeRules) -> dict[str, Expect]:
    """By cell, where the baseline expects more."""
    found = {}
    for cell, here in own.expect.items():
        wanted = baseline.expect.get(cell, Expect())
        bounds = {name: _lower_bound(getattr(here, name), getattr(wanted, name)) for name in BOUNDS}
        joint = Expect.model_validate(
            {
                "engaged": list(dict.fromkeys([*here.engaged, *wanted.engaged])),
                "forbidden": list(dict.fromkeys([*here.forbidden, *wanted.forbidden])),
                **bounds,
            }
        )
        if joint != here:
            found[cell] = joint
    return found


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{old} -> {new}" for old, new in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
