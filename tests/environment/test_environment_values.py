from __future__ import annotations

import json
import pickle

import pytest

from flashinfer_compat import environment
from flashinfer_compat.environment import FileCheck, Gpu, Gpus, RecordCheck, RecordState, Section, collect
from flashinfer_compat.environment.model import to_plain
from flashinfer_compat.environment.reading import NotAvailableError, gather, path_entries
from flashinfer_compat.errors import ArgumentError


@pytest.mark.parametrize(("value", "reason", "found"), [(None, None, "neither"), (1, "broken", "both")])
def test_a_section_has_exactly_one_of_value_and_reason(value, reason, found):
    with pytest.raises(ArgumentError, match=f"got {found}"):
        Section(value, reason)


@pytest.mark.parametrize("value", [0, "", ()])
def test_an_empty_value_is_a_value(value):
    assert Section(value=value).reason is None


def test_whatever_a_gatherer_raises_becomes_the_reason():
    def not_here():
        raise NotAvailableError("no such machine")

    assert gather(not_here) == Section(reason="no such machine")
    assert gather(lambda: int("x")).reason.startswith("ValueError: invalid literal")
    assert gather(lambda: None).value is None
    assert gather(lambda: 3) == Section(value=3)


def test_interrupts_are_not_swallowed():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gather(interrupt)


@pytest.mark.parametrize(
    ("capability", "architecture"), [((9, 0), "sm90"), ((10, 0), "sm100"), ((12, 1), "sm121"), ((8, 9), "sm89")]
)
def test_architecture_joins_the_compute_capability(capability, architecture):
    assert Gpu(0, "GPU", capability, None, None).architecture == architecture


def test_plain_data_holds_only_json_types():
    check = RecordCheck(RecordState.DIFFERS, FileCheck.SIZES, 3, missing=("a",))
    gpus = Gpus("580.1", "13.0", (Gpu(0, "H200", (9, 0), None, 5),), None)
    assert to_plain((Section(value=check), Section(value=gpus))) == [
        {
            "value": {
                "state": "differs",
                "level": "sizes",
                "checked": 3,
                "missing": ["a"],
                "changed": [],
                "reason": None,
            },
            "reason": None,
        },
        {
            "value": {
                "driver_version": "580.1",
                "driver_cuda_version": "13.0",
                "devices": [
                    {"index": 0, "name": "H200", "compute_capability": [9, 0], "uuid": None, "memory_bytes": 5}
                ],
                "visible": None,
                "problems": [],
            },
            "reason": None,
        },
    ]


def test_an_environment_is_hashable_picklable_and_json(tmp_path):
    found = collect([str(tmp_path)], {"HOME": str(tmp_path), "FLASHINFER_X": "1"})
    again = collect([str(tmp_path)], {"HOME": str(tmp_path), "FLASHINFER_X": "1"})
    assert found == again
    assert hash(found) == hash(again)
    assert pickle.loads(pickle.dumps(found)) == found
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data == found.to_dict()
    assert data["variables"]["value"][0] == {"name": "FLASHINFER_X", "value": "1", "origin": "unknown"}


def test_search_path_entries_are_taken_once_however_they_are_linked(tmp_path, monkeypatch):
    lib = tmp_path / "lib"
    lib.mkdir()
    (tmp_path / "lib64").symlink_to("lib")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(lib)
    entries = [str(tmp_path / "lib64"), str(lib), "", str(tmp_path / "loop"), "\0"]
    assert path_entries(entries) == (str(tmp_path / "lib64"), str(tmp_path / "loop"), "\0")


def test_every_exported_name_exists_and_unknown_ones_do_not():
    assert all(getattr(environment, name) is not None for name in environment.__all__)
    with pytest.raises(AttributeError, match="no attribute 'colect'"):
        _ = environment.colect
