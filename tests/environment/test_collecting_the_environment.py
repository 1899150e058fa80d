from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest
from fake_installs import flashinfer_files, install, torch_files

from flashinfer_compat.environment import FileCheck, RecordState, collect

OBSERVED = """
import json, sys
events = []
FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.mkdir", "os.remove",
             "os.rename", "os.rmdir", "os.truncate", "os.chmod", "os.symlink", "socket.connect", "socket.getaddrinfo")
def watch(event, arguments):
    if event in FORBIDDEN or (event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
        events.append([event, str(arguments[0])])
sys.addaudithook(watch)
from flashinfer_compat.environment import FileCheck, collect
environment = collect(check_files=FileCheck.HASHES)
loaded = [name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "flashinfer", "flashinfer_cubin")]
print(json.dumps({"events": events, "loaded": loaded, "environment": environment.to_dict()}))
"""


@pytest.fixture
def site(tmp_path):
    site = tmp_path / "site"
    install(site, "flashinfer-python", "0.7.4", flashinfer_files(), ["torch"])
    install(site, "torch", "2.11.0+cu130", torch_files("2.11.0+cu130", "13.0"))
    install(site, "triton", "3.6.0", {"triton/__init__.py": "raise ImportError\n"})
    install(site, "flashinfer-cubin", "0.7.4", {"flashinfer_cubin/__init__.py": "raise ImportError\n"})
    return site


def test_collecting_imports_runs_and_writes_nothing(site, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    variables = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    command = [sys.executable, "-B", "-c", OBSERVED]
    output = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
    seen = json.loads(output.stdout)
    assert seen["events"] == []
    assert seen["loaded"] == []
    assert list(home.iterdir()) == []
    found = {copy["name"]: copy for copy in reversed(seen["environment"]["distributions"]["value"]["found"])}
    assert found["torch"]["version"] == "2.11.0+cu130"
    assert found["torch"]["files"]["state"] == "matches"
    assert found["torch"]["files"]["level"] == "hashes"
    assert seen["environment"]["torch"]["value"]["cuda"] == "13.0"
    assert seen["environment"]["caches"]["value"][0]["path"] == str(home / ".cache" / "flashinfer")


def test_importing_the_package_loads_no_slow_module():
    code = "import sys; import flashinfer_compat.environment; print(*sys.modules)"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    slow = {"torch", "flashinfer", "importlib.metadata", "email", "packaging", "packaging.version", "ctypes", "json"}
    assert slow.isdisjoint(output.stdout.split())


def test_sections_describe_the_given_path(site, tmp_path):
    found = collect([str(site)], {"HOME": str(tmp_path), "PATH": ""})
    assert [copy.version for copy in found.copies("flashinfer-python")] == ["0.7.4"]
    assert found.copies("vllm") == ()
    flashinfer = found.package("flashinfer")
    assert flashinfer is not None
    assert flashinfer.version_from_source == "0.7.4"
    assert found.package("flashinfer_jit_cache") is None
    assert found.torch.value is not None
    assert found.torch.value.cuda == "13.0"
    assert found.python.value is not None
    assert found.python.value.search_path == (str(site),)


@pytest.mark.parametrize("level", FileCheck)
def test_the_level_of_checking_is_said(site, tmp_path, level):
    (site / "flashinfer" / "fused_moe.py").write_text("x = 2\n")
    (files,) = (copy.files for copy in collect([str(site)], {}, level).copies("flashinfer-python"))
    expected = {
        FileCheck.NONE: (RecordState.NOT_CHECKED, ()),
        FileCheck.MOE: (RecordState.MATCHES, ()),
        FileCheck.SIZES: (RecordState.MATCHES, ()),
        FileCheck.HASHES: (RecordState.DIFFERS, ("flashinfer/fused_moe.py",)),
    }
    assert (files.level, (files.state, files.changed)) == (level, expected[level])


def test_an_empty_machine_gives_reasons_not_errors(tmp_path):
    found = collect([str(tmp_path)], {"HOME": ""})
    assert found.distributions.value is not None
    assert found.distributions.value.found == ()
    assert found.packages.value == ()
    assert found.torch.reason == "torch is not installed"
    assert found.caches.value is not None
    assert [cache.reason for cache in found.caches.value] == ["HOME is not an absolute path: ''"] * 4


def test_a_finder_that_raises_spoils_only_its_own_sections(tmp_path, monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name in ("flashinfer", "torch"):
                raise RuntimeError("this finder is broken")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    found = collect(check_files=FileCheck.NONE)
    assert found.packages.reason == "RuntimeError: this finder is broken"
    assert found.torch.reason == "RuntimeError: this finder is broken"
    assert found.distributions.value is not None
    assert found.python.value is not None


def test_this_interpreter_is_described():
    found = collect(check_files=FileCheck.NONE)
    python = found.python.value
    assert python is not None
    assert python.version == platform.python_version()
    assert (python.executable, python.platform) == (sys.executable, sys.platform)
    assert python.machine == platform.machine()
    assert found.variables.value is not None
    assert {variable.name: variable.value for variable in found.variables.value}.get("HOME") == os.environ.get("HOME")
    json.dumps(found.to_dict())
