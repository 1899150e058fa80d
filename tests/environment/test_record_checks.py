from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import pytest
from fake_installs import digest, install, write_record
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer_compat.environment import FileCheck, RecordState
from flashinfer_compat.environment.records import check_record, record_lists, recorded_paths

FILES = {"pkg/__init__.py": "", "pkg/a.py": "a = 1\n", "pkg/data/b, c.json": "{}", "pkg/é.txt": "é"}


def check(dist_info, level=FileCheck.SIZES):
    return check_record(str(dist_info), str(dist_info.parent), level)


@pytest.mark.parametrize("level", [FileCheck.SIZES, FileCheck.HASHES])
def test_an_untouched_install_matches(tmp_path, level):
    result = check(install(tmp_path, "pkg", files=FILES), level)
    assert (result.state, result.level, result.checked) == (RecordState.MATCHES, level, len(FILES) + 2)
    assert (result.missing, result.changed, result.reason) == ((), (), None)


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(
        st.sampled_from(["keep", "delete", "grow", "same size", "folder"]), min_size=len(FILES), max_size=len(FILES)
    )
)
def test_exactly_the_tampered_files_are_named(actions):
    with tempfile.TemporaryDirectory() as folder:
        dist_info = install(Path(folder), "pkg", files={path: text or "x" for path, text in FILES.items()})
        touched = dict(zip(FILES, actions, strict=True))
        for path, action in touched.items():
            file = Path(folder, path)
            if action in ("delete", "folder"):
                file.unlink()
            if action == "folder":
                file.mkdir()
            if action == "grow":
                file.write_text(file.read_text() + "#")
            if action == "same size":
                file.write_bytes(b"\0" * file.stat().st_size)
        sizes, hashes = check(dist_info), check(dist_info, FileCheck.HASHES)
        missing = tuple(path for path, action in touched.items() if action == "delete")
        assert sizes.missing == hashes.missing == missing
        assert sizes.changed == tuple(path for path, action in touched.items() if action in ("grow", "folder"))
        assert hashes.changed == tuple(
            path for path, action in touched.items() if action in ("grow", "folder", "same size")
        )
        for result in (sizes, hashes):
            expected = RecordState.DIFFERS if result.missing or result.changed else RecordState.MATCHES
            assert result.state is expected


def test_compiled_files_are_ignored_and_entries_without_size_need_only_be_files(tmp_path):
    dist_info = install(tmp_path, "pkg", files={"pkg/__init__.py": "x", "pkg/generated.txt": "anything"})
    rows = [
        ["pkg/__init__.py", f"sha256={digest('x')}", "1"],
        ["pkg/__pycache__/__init__.cpython-311.pyc", "", ""],
        ["pkg/__pycache__/a.cpython-311.pyc", "sha256=AAAA", "12"],
        ["pkg/generated.txt", "", ""],
        ["pkg/absent.txt", "", ""],
        ["pkg/folder", "", ""],
    ]
    write_record(dist_info, rows)
    (tmp_path / "pkg" / "folder").mkdir()
    result = check(dist_info, FileCheck.HASHES)
    assert (result.checked, result.missing, result.changed) == (4, ("pkg/absent.txt",), ("pkg/folder",))


def test_scripts_outside_the_folder_and_absolute_paths_are_followed(tmp_path):
    script = tmp_path / "bin" / "tool"
    script.parent.mkdir()
    script.write_text("#!")
    dist_info = install(tmp_path / "lib" / "site", "pkg")
    write_record(dist_info, [["../../bin/tool", "", "2"], [str(script), "", "2"], ["../../bin/gone", "", "2"]])
    assert check(dist_info).missing == ("../../bin/gone",)


def test_other_hash_algorithms_are_honoured_and_unknown_ones_fall_back_to_sizes(tmp_path):
    dist_info = install(tmp_path, "pkg", files={"pkg/a.py": "abc", "pkg/b.py": "abc", "pkg/c.py": "abc"})
    import base64

    right = base64.urlsafe_b64encode(hashlib.sha512(b"abc").digest()).decode().rstrip("=")
    rows = [["pkg/a.py", f"sha512={right}", "3"], ["pkg/b.py", "sha512=AAAA", "3"], ["pkg/c.py", "whirl9=AAAA", "3"]]
    write_record(dist_info, rows)
    assert check(dist_info, FileCheck.HASHES).changed == ("pkg/b.py",)


def test_nothing_is_compared_when_not_asked_for(tmp_path):
    dist_info = install(tmp_path, "pkg", files=FILES)
    (tmp_path / "pkg" / "a.py").unlink()
    result = check(dist_info, FileCheck.NONE)
    assert (result.state, result.checked, result.reason) == (RecordState.NOT_CHECKED, 0, "not asked for")


def test_a_missing_record_is_said(tmp_path):
    dist_info = install(tmp_path, "pkg")
    (dist_info / "RECORD").unlink()
    result = check(dist_info)
    assert result.state is RecordState.NO_RECORD
    assert "has no RECORD" in result.reason
    assert recorded_paths(str(dist_info)) == ()
    assert record_lists(str(dist_info), "pkg/a.py") is None


@pytest.mark.parametrize("record", [b"pkg/a.py,sha256=x,many\n", b"\xff\xfe,,\n", b'"pkg/a.py,,\n', b"pkg/a.py,,-4\n"])
def test_a_record_that_cannot_be_read_is_said(tmp_path, record):
    dist_info = install(tmp_path, "pkg")
    (dist_info / "RECORD").write_bytes(record)
    result = check(dist_info)
    assert result.state is RecordState.NOT_CHECKED
    assert result.reason.startswith("RECORD cannot be read: ")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the csv module of Python 3.10 refuses null bytes")
def test_a_null_byte_in_a_path_is_a_missing_file(tmp_path):
    dist_info = install(tmp_path, "pkg")
    (dist_info / "RECORD").write_bytes(b"pkg/a\0b.py,,3\n")
    assert check(dist_info).missing == ("pkg/a\0b.py",)


def test_a_folder_in_place_of_record_is_said(tmp_path):
    dist_info = install(tmp_path, "pkg")
    (dist_info / "RECORD").unlink()
    (dist_info / "RECORD").mkdir()
    assert check(dist_info).state is RecordState.NOT_CHECKED


def test_a_path_is_listed_only_as_a_whole_entry(tmp_path):
    record = str(install(tmp_path, "pkg", files={"pkg/__init__.py": "", "other/torch/__init__.py": ""}))
    assert record_lists(record, "pkg/__init__.py") is True
    assert record_lists(record, "torch/__init__.py") is False
    assert record_lists(record, "pkg/__init__") is False


def test_an_install_made_by_a_real_installer_matches():
    dist = importlib.metadata.distribution("iniconfig")
    location = Path(str(dist.locate_file("")))
    dist_info = next(location.glob("iniconfig-*.dist-info"))
    assert check_record(str(dist_info), str(location), FileCheck.HASHES).state is RecordState.MATCHES


@pytest.mark.parametrize(
    ("path", "runs"),
    [
        ("flashinfer/__init__.py", True),
        ("flashinfer/fused_moe/core.py", True),
        ("flashinfer/mla/_batch_mla/_wrapper.py", True),
        ("flashinfer/data/aot/fused_moe_trtllm_sm100/fused_moe_trtllm_sm100.so", True),
        ("flashinfer/jit_kernels/a.so", True),
        ("flashinfer/data/csrc/trtllm_fused_moe_kernel_launcher.cu", True),
        ("flashinfer/data/csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_deepseek.cu", True),
        ("flashinfer/data/csrc/nv_internal/tensorrt_llm/thop/fp4Quantize.cpp", True),
        ("flashinfer/data/include/flashinfer/trtllm/fused_moe/runner.h", True),
        ("flashinfer/data/csrc/batch_decode.cu", False),
        ("flashinfer/data/cutlass/python/a.py", False),
        ("flashinfer/experimental/a/b.py", False),
        ("flashinfer/moe_ep/a.py", False),
        ("flashinfer/cake_rmsnorm_train_backend/a.cu", False),
        ("flashinfer_cubin/cubins/8ee504/batched_gemm-fdba-16ba/a.cubin", True),
        ("flashinfer_cubin/cubins/8ee504/fmha/a.cubin", False),
        ("flashinfer_jit_cache/jit_cache/fused_moe_trtllm_sm100/fused_moe_trtllm_sm100.so", True),
        ("b12x/__init__.py", False),
        ("build_backend.py", False),
        ("../../bin/flashinfer", False),
    ],
)
def test_by_default_what_fp4_moe_runs_is_compared_and_on_request_everything(tmp_path, path, runs):
    dist_info = install(tmp_path / "a" / "b", "flashinfer-python", files={path: "x"})
    (tmp_path / "a" / "b" / path).unlink()
    assert check(dist_info, FileCheck.MOE).missing == ((path,) if runs else ())
    assert check(dist_info, FileCheck.SIZES).missing == check(dist_info, FileCheck.HASHES).missing == (path,)


@pytest.mark.parametrize(
    ("path", "runs"),
    [("nvidia_cutlass_dsl/lib/libcute.txt", True), ("nvidia_cutlass_dsl.pth", True), ("../../bin/cutlass", False)],
)
def test_of_the_libraries_what_can_be_imported_is_compared(tmp_path, path, runs):
    dist_info = install(tmp_path / "a" / "b", "nvidia-cutlass-dsl", files={path: "x"})
    (tmp_path / "a" / "b" / path).unlink()
    assert check(dist_info, FileCheck.MOE).missing == ((path,) if runs else ())
    assert check(dist_info, FileCheck.SIZES).missing == (path,)


def test_modules_of_flashinfer_are_told_first(tmp_path):
    files = dict.fromkeys(("a.txt", "flashinfer/data/a.cu", "flashinfer/core.py", "flashinfer/__init__.py"), "x")
    dist_info = install(tmp_path, "flashinfer-python", files=files)
    for path in files:
        (tmp_path / path).unlink()
    expected = ("flashinfer/core.py", "flashinfer/__init__.py", "flashinfer/data/a.cu", "a.txt")
    assert check(dist_info).wrong == expected


def test_a_record_is_read_anew_when_it_changes(tmp_path):
    dist_info = install(tmp_path, "pkg", files={"pkg/a.py": "abc"})
    assert check(dist_info).checked == 3
    (tmp_path / "pkg" / "a.py").write_text("longer")
    assert check(dist_info).changed == ("pkg/a.py",)
    write_record(dist_info, [["pkg/a.py", f"sha256={digest('longer')}", "6"]])
    assert (check(dist_info).state, check(dist_info).checked) == (RecordState.MATCHES, 1)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_may_end_as_on_windows(tmp_path, end):
    dist_info = install(tmp_path, "pkg", files={"pkg/a.py": "abc", "pkg/b, c.py": "abc"})
    record = dist_info / "RECORD"
    record.write_bytes(record.read_text("utf-8").replace("\n", end).encode())
    assert (check(dist_info).state, check(dist_info).checked) == (RecordState.MATCHES, 4)


def test_a_pipe_in_place_of_record_is_said(tmp_path):
    dist_info = install(tmp_path, "pkg")
    (dist_info / "RECORD").unlink()
    os.mkfifo(dist_info / "RECORD")
    result = check(dist_info)
    assert result.state is RecordState.NOT_CHECKED
    assert result.reason == f"RECORD cannot be read: {dist_info}/RECORD is no regular file"
    assert record_lists(str(dist_info), "pkg/a.py") is None
