from __future__ import annotations

import json
from pathlib import Path

from packaging.version import Version

from flashinfer_compat.doctor.variables import DATA, decode, encode, known_variables, read_by, spans
from flashinfer_compat.signatures.recorded import releases
from tools.record_variables import names_in


def test_every_recorded_release_is_in_the_table() -> None:
    assert tuple(json.loads(DATA.read_text("utf-8"))["releases"]) == releases()


def test_the_data_survives_decoding_and_encoding() -> None:
    data = json.loads(DATA.read_text("utf-8"))
    assert encode(decode(data)) == data


def test_when_variables_came() -> None:
    # Read in FlashInfer's source: jit/env.py, jit/core.py, jit/cubin_loader.py, compilation_context.py.
    first = {name: spans(name)[0][0] for name in known_variables()}
    assert first["FLASHINFER_WORKSPACE_BASE"] == releases()[0]
    assert first["FLASHINFER_CUDA_ARCH_LIST"] == "0.3.1"
    assert first["FLASHINFER_DISABLE_VERSION_CHECK"] == "0.4.0"
    assert first["FLASHINFER_DISABLE_JIT"] == "0.4.0"
    assert first["FLASHINFER_NO_DOWNLOAD"] == "0.6.7.post1"
    assert first["FLASHINFER_NVFP4_4OVER6"] == "0.6.12rc1"
    assert "FLASHINFER_CACHE_DIR" not in first


def test_a_version_between_releases_reads_what_the_one_before_reads() -> None:
    assert read_by(Version("0.7.3")) == read_by(Version("0.7.2.post1"))
    assert read_by(Version("99")) == read_by(Version(releases()[-1]))
    assert read_by(Version("0.2.8")) is None


def test_names_are_taken_from_whole_strings_of_flashinfers_own_files() -> None:
    files = [
        ("flashinfer/jit/env.py", b'os.getenv("FLASHINFER_CUBIN_DIR", x); f"-DFLASHINFER_MACRO"; FLASHINFER_CSRC_DIR'),
        ("flashinfer/data/csrc/a.cu", b'std::getenv("FLASHINFER_FROM_CPP")'),
        ("tests/test_a.py", b'os.environ["FLASHINFER_TEST_ONLY"]'),
        ("flashinfer/data/cutlass/x.h", b'getenv("FLASHINFER_FOREIGN")'),
        ("README.md", b'"FLASHINFER_PROSE"'),
    ]
    assert names_in(files) == {"FLASHINFER_CUBIN_DIR", "FLASHINFER_FROM_CPP"}


def test_the_file_is_shipped_with_the_package() -> None:
    text = (Path(__file__).parents[2] / "setup.cfg").read_text("utf-8")
    assert "doctor/data/*.json" in text
