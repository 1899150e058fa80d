"""Policy files: this machine's in the user's cache, beside the self-checks, or the one that a variable names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashinfer_compat.environment import Environment
from flashinfer_compat.environment.reading import read_regular
from flashinfer_compat.files import write_named, write_whole
from flashinfer_compat.policy import SCHEMA_VERSION, Policy, PolicyError, PolicyRow
from flashinfer_compat.verified import facts, file_for, file_of

__all__ = ["VARIABLE", "kept_in", "load_policy", "read_policy", "store_policy"]

VARIABLE = "FLASHINFER_COMPAT_POLICY"
"""Names a policy file to read in place of the one in the cache."""

_MEASURE = "Measure here with: python -m flashinfer_compat bench --write-policy"


def load_policy(environment: Environment, gpu: str | None) -> tuple[PolicyRow, ...]:
    """The rows of the file that FLASHINFER_COMPAT_POLICY names, else of what was kept here with exactly these facts.

    Args:
        environment: this machine's.
        gpu: the name of its first visible GPU; a file of another GPU is refused, other facts of it may differ.

    Raises:
        PolicyError: the named file is missing, no policy, or of another GPU. What is wrong in the cache counts as none.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return _kept(environment)
    rows = read_policy(Path(named), f"{VARIABLE}={named}").rows
    foreign = next((one.origin.gpu for one in rows if one.origin.gpu != gpu), gpu)
    if foreign != gpu:
        expected, actual = (f"a policy measured on {one or 'a machine without a GPU'}" for one in (gpu, foreign))
        raise PolicyError(f"{VARIABLE}={named}", expected, actual, f"Unset {VARIABLE}. {_MEASURE}")
    return rows


def read_policy(path: Path, subject: str = "") -> Policy:
    """The policy in a file.

    Args:
        path: the file.
        subject: how errors name it; its path unless given.

    Raises:
        PolicyError: it is missing, unreadable or no policy file.
    """
    expected = f"a policy file of schema {SCHEMA_VERSION}, as bench --write-policy writes it"
    try:
        return Policy.from_dict(json.loads(read_regular(path)))
    except OSError as error:
        raise PolicyError(subject or str(path), expected, error.strerror or str(error), f"{_MEASURE} FILE") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        actual = f"no {error} in it" if isinstance(error, KeyError) else f"what is none ({error})"
        raise PolicyError(subject or str(path), expected, actual, f"{_MEASURE} FILE") from error


def store_policy(environment: Environment, rows: tuple[PolicyRow, ...], path: Path | None = None) -> Path | None:
    """Keep rows; older ones of the same machine that speak of something else stay.

    Args:
        environment: this machine's.
        rows: what was measured now.
        path: where; None is the user's cache.

    Returns:
        The file, or None where there is no cache directory.

    Raises:
        OSError: it cannot be written.
        PolicyError: `path` is there and no policy file.
    """
    if path is None:
        own = file_for(environment, _name)
        if own is None:
            return None
        place, known = own
        old = Policy(known, _rows(place, known))
    else:
        place, known = path, facts(environment)
        found = read_policy(place) if place.exists() else None
        old = found if found is not None and found.facts == known else Policy(known, ())
    place.parent.mkdir(parents=True, exist_ok=True)
    write = write_whole if path is None else write_named
    write(place, json.dumps(old.with_rows(rows).to_dict(), indent=1) + "\n")
    return place


def kept_in(environment: Environment) -> Path | None:
    """The file in the user's cache that holds for exactly this machine; None where there is no cache directory."""
    own = file_for(environment, _name)
    return None if own is None else own[0]


def _kept(environment: Environment) -> tuple[PolicyRow, ...]:
    own = file_of(environment, _name)
    return () if own is None else _rows(*own)


def _rows(path: Path, known: Mapping[str, Any]) -> tuple[PolicyRow, ...]:
    """What is kept in the cache; what is wrong there counts as none."""
    try:
        policy = read_policy(path)
    except PolicyError:
        return ()
    return policy.rows if policy.facts == known else ()


def _name(print_of_facts: str) -> str:
    return f"policy-{SCHEMA_VERSION}-{print_of_facts}.json"
