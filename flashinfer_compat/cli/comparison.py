"""Prints a comparison of two releases for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashinfer_compat.cli.console import columns, heading, paragraph
from flashinfer_compat.doctor.compare import Comparison, FeatureChange, StrategyChange
from flashinfer_compat.doctor.question import Source
from flashinfer_compat.doctor.requirements import RequirementChange
from flashinfer_compat.features.known_issues import Effect, KnownIssue
from flashinfer_compat.signatures.changes import EntryPointChange, NumbersChange, ParameterAdded, ParameterMoved
from flashinfer_compat.vocabulary import Evidence

__all__ = ["print_comparison"]

_CALLED = (
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "fp4_quantize",
    "nvfp4_quantize",
    "mm_fp4",
    "silu_and_mul_nvfp4_quantize",
)
"""Entry points whose changes are told in any case; those of others where they break callers."""

_EFFECTS = {
    Effect.REFUSED: "fp4_moe refuses what meets it.",
    Effect.AVOIDED: "fp4_moe avoids it.",
    Effect.TOLD: "fp4_moe cannot avoid it.",
}


def print_comparison(comparison: Comparison, *, verbose: bool = False) -> None:
    """The summary, then every part in which something changes."""
    paragraph(comparison.summary, indent=0)
    if comparison.architecture.source is not Source.ASKED:
        here = comparison.architecture.source is Source.THIS_MACHINE
        whose = "this machine's" if here else "assumed, since this machine has none"
        paragraph(f"The GPU is {whose}; --arch names another.")
    _print_strategies(comparison.strategies)
    _print_features("Features gained", [one for one in comparison.features if one.gained])
    _print_features("Features lost", [one for one in comparison.features if one.lost])
    other = [one for one in comparison.features if not one.gained and not one.lost]
    _print_features("Features that change, but are not usable on this GPU", other)
    _print_entry_points(comparison.entry_points, verbose=verbose)
    _print_enumerations(comparison.enumerations)
    _print_issues("Known issues that end", comparison.issues_ended)
    _print_issues("Known issues that begin", comparison.issues_begun)
    _print_requirements(comparison.requirements, verbose=verbose)


def _print_strategies(changes: Iterable[StrategyChange]) -> None:
    heading("Strategies for DeepSeek-R1")
    for change in changes:
        old, new = (f"{one.strategy.value} on {one.backend.value}" for one in (change.old, change.new))
        status = change.new.status.value
        text = f"{old}, then {new} ({status})." if old != new else f"{new} ({status}), as before."
        paragraph(text, label=f"from {change.routing_input.value}:")
        for one in change.alternatives:
            lost = one.new.rank < one.old.rank
            what = f"{one.strategy.value} on {one.backend.value} {'is lost' if lost else 'becomes possible'}"
            why = " ".join(str(reason) for reason in one.reasons)
            paragraph(f"{what}. {'Now' if lost else 'Before'}: {why}", indent=4)


def _print_features(title: str, changes: Sequence[FeatureChange]) -> None:
    if changes:
        heading(title)
        columns([(one.new.feature.name, one.new.evidence.value, _remark(one)) for one in changes])


def _remark(change: FeatureChange) -> str:
    # Of what is absent the reason says no more than that.
    told = change.new.reasons and change.new.evidence is not Evidence.ABSENT
    reason = f". {change.new.reasons[0].message}" if told else ""
    return f"was {change.old.evidence.value}: {change.new.feature.title}{reason}"


def _print_entry_points(changes: Sequence[EntryPointChange], *, verbose: bool) -> None:
    if changes:
        heading("Arguments")
    changed = [one for one in changes if one.kind == "changed"]
    told = [one for one in changed if verbose or one.name in _CALLED or one.breaks_callers]
    for one in told:
        paragraph("; ".join(_parts(one)) + ".", label=f"{one.name}:", style="warning" if one.breaks_callers else "")
    lists = {
        "Gone:": [one.name for one in changes if one.kind == "removed"],
        "New:": [one.name for one in changes if one.kind == "added"],
        "Changed, and calls stay right (--verbose tells more):": [one.name for one in changed if one not in told],
    }
    for label, names in lists.items():
        if names:
            paragraph(f"{', '.join(names)}.", label=label)


def _parts(change: EntryPointChange) -> Iterable[str]:
    if change.breaks_positional_from:
        yield f"positional calls go wrong from argument {change.breaks_positional_from} on"
    inserted = [one for one in change.added if one.inserted or one.instead_of]
    appended = [one.name + (" (required)" if one.required else "") for one in change.added if one not in inserted]
    lists = {
        "inserted": [_inserted(one) for one in inserted],
        "gone": change.removed,
        "moved": [_moved(one) for one in change.moved],
        "now required": change.required,
        "new": appended,
        "default of": [
            f"{one.name} {one.new}, was {one.old}" for one in change.defaults if one.old is not None and one.new
        ],
        "now optional": [one.name for one in change.defaults if one.old is None],
    }
    for title, names in lists.items():
        if names:
            yield f"{title} {', '.join(names)}"
    for one in change.choices:
        before, after = ((text or "").split(", ") for text in (one.old, one.new))
        gone, come = [x for x in before if x and x not in after], [x for x in after if x and x not in before]
        yield f"{one.name} takes " + " and ".join(
            f"{title} {', '.join(names)}" for title, names in (("also", come), ("no more", gone)) if names
        )


def _inserted(parameter: ParameterAdded) -> str:
    where = f"argument {parameter.position}"
    instead = f", where {parameter.instead_of} was" if parameter.instead_of else ""
    return f"{parameter.name} ({where}{instead}{', required' if parameter.required else ''})"


def _moved(parameter: ParameterMoved) -> str:
    old, new = ("keyword only" if one is None else f"argument {one}" for one in (parameter.old, parameter.new))
    return f"{parameter.name} ({old}, then {new})"


def _print_enumerations(changes: Sequence[NumbersChange]) -> None:
    if changes:
        heading("Enumerations")
    for one in changes:
        parts = [f"{value} is {new}, was {old}" for value, old, new in one.reused]
        parts += [f"{member} is {new}, was {old}" for member, old, new in one.renumbered]
        parts += [f"new {member}={value}" for member, value in one.added if value not in {x for x, _, _ in one.reused}]
        parts += [
            f"gone {member}={value}" for member, value in one.removed if value not in {x for x, _, _ in one.reused}
        ]
        whole = {"added": ["is new"], "removed": ["is gone"]}.get(one.kind, parts)
        paragraph("; ".join(whole) + ".", label=f"{one.name}:")


def _print_issues(title: str, issues: Sequence[KnownIssue]) -> None:
    if issues:
        heading(title)
    for issue in issues:
        effect = f" {_EFFECTS[issue.effect]}" if title.endswith("begin") else ""
        paragraph(f"{issue.title}.{effect}", label=f"{issue.id}:")


def _print_requirements(changes: Sequence[RequirementChange], *, verbose: bool) -> None:
    told = [one for one in changes if verbose or not one.condition]
    if told:
        heading("Requirements")
    for one in told:
        name = f"{one.name} ({one.condition}):" if one.condition else f"{one.name}:"
        if one.new is None:
            text = "no longer required."
        elif one.old is None:
            text = f"new, {one.new or 'any version'}."
        else:
            text = f"{one.new or 'any version'}, was {one.old or 'any version'}."
        paragraph(text, label=name)
    left = len(changes) - len(told)
    if left:
        paragraph(f"{left} of optional extras (--verbose tells).", label="Also:" if told else "")
