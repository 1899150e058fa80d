from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import zipfile

import pytest
from fake_installs import flashinfer_files, install, make_editable, torch_files

from flashinfer_compat.environment import Owner
from flashinfer_compat.environment.distributions import is_relevant, scan
from flashinfer_compat.environment.packages import gather_packages, literals, locate


def packages(*entries):
    path = [str(entry) for entry in entries]
    return {package.name: package for package in gather_packages(path, tuple(scan(path, is_relevant)))}


def test_an_installed_package_belongs_to_its_distribution(tmp_path):
    install(tmp_path, "flashinfer-python", "0.7.4", flashinfer_files())
    install(tmp_path, "torch", "2.13.0+cpu", torch_files("2.13.0+cpu", None))
    found = packages(tmp_path)
    assert found.keys() == {"flashinfer", "torch"}
    flashinfer = found["flashinfer"]
    assert flashinfer.origin == str(tmp_path / "flashinfer" / "__init__.py")
    assert flashinfer.location == str(tmp_path / "flashinfer")
    assert flashinfer.owner == Owner("flashinfer-python", "0.7.4")
    assert (flashinfer.version_from_source, flashinfer.shadowed) == ("0.7.4", False)
    assert found["torch"].version_from_source == "2.13.0+cpu"


def test_a_folder_earlier_on_the_path_shadows_the_installed_package(tmp_path):
    install(tmp_path / "site", "flashinfer-python", "0.7.4", flashinfer_files())
    checkout = tmp_path / "checkout" / "flashinfer"
    checkout.mkdir(parents=True)
    (checkout / "__init__.py").write_text("from .version import __version__\n")
    (checkout / "version.py").write_text(
        "try:\n    from ._build_meta import __version__\nexcept ImportError:\n    __version__ = '0.0.0+unknown'\n"
    )
    found = packages(tmp_path / "checkout", tmp_path / "site")["flashinfer"]
    assert found.location == str(checkout)
    assert (found.owner, found.version_from_source, found.shadowed) == (None, "0.0.0+unknown", True)


def test_a_folder_that_record_does_not_list_is_not_the_distributions(tmp_path):
    install(tmp_path, "flashinfer-python", "0.7.4", {"elsewhere.py": ""})
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("")
    found = packages(tmp_path)["flashinfer"]
    assert (found.owner, found.shadowed) == (None, True)


def test_without_a_record_lying_side_by_side_counts(tmp_path):
    dist_info = install(tmp_path, "flashinfer-python", "0.7.4", flashinfer_files())
    (dist_info / "RECORD").unlink()
    found = packages(tmp_path)["flashinfer"]
    assert (found.owner, found.shadowed) == (Owner("flashinfer-python", "0.7.4"), False)


def test_metadata_of_one_copy_and_code_of_another_counts_as_shadowed(tmp_path):
    install(tmp_path / "a", "flashinfer-python", "0.6.7")
    install(tmp_path / "b", "flashinfer-python", "0.7.4", flashinfer_files())
    found = packages(tmp_path / "a", tmp_path / "b")["flashinfer"]
    assert (found.owner, found.shadowed) == (Owner("flashinfer-python", "0.7.4"), True)


def test_the_first_of_two_whole_copies_is_not_shadowed(tmp_path):
    install(tmp_path / "a", "flashinfer-python", "0.7.4", flashinfer_files())
    install(tmp_path / "b", "flashinfer-python", "0.6.7", flashinfer_files("0.6.7"))
    found = packages(tmp_path / "a", tmp_path / "b")["flashinfer"]
    assert (found.owner, found.shadowed) == (Owner("flashinfer-python", "0.7.4"), False)


def test_source_and_metadata_may_disagree(tmp_path):
    install(tmp_path, "flashinfer-python", "0.7.4", flashinfer_files("0.7.2"))
    found = packages(tmp_path)["flashinfer"]
    assert (found.owner, found.version_from_source) == (Owner("flashinfer-python", "0.7.4"), "0.7.2")


def test_a_folder_without_init_is_a_namespace(tmp_path):
    (tmp_path / "flashinfer").mkdir()
    found = packages(tmp_path)["flashinfer"]
    assert (found.origin, found.location) == (None, str(tmp_path / "flashinfer"))
    assert (found.owner, found.version_from_source, found.shadowed) == (None, None, False)


def test_a_plain_module_is_named_by_its_file(tmp_path):
    install(tmp_path, "triton", "3.6.0", {"triton.py": "__version__ = '3.6.0'\n"})
    found = packages(tmp_path)["triton"]
    assert (found.origin, found.location) == (str(tmp_path / "triton.py"), str(tmp_path))
    assert (found.owner, found.shadowed) == (Owner("triton", "3.6.0"), False)


def test_a_nightly_triton_is_owned_by_its_other_distribution(tmp_path):
    install(tmp_path, "pytorch-triton", "3.6.0+git1", {"triton/__init__.py": "__version__ = '3.6.0'\n"})
    found = packages(tmp_path)["triton"]
    assert found.owner == Owner("pytorch-triton", "3.6.0+git1")
    assert (found.version_from_source, found.shadowed) == ("3.6.0", False)


def test_a_version_file_that_is_no_python_is_passed_over(tmp_path):
    files = {"triton/__init__.py": "__version__ = '3.6.0'\n", "triton/version.py": "(", "triton/_build_meta.py": "\0"}
    install(tmp_path, "triton", "3.6.0", files)
    assert packages(tmp_path)["triton"].version_from_source == "3.6.0"


def test_a_package_in_a_zip_file_is_located(tmp_path):
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as bundle:
        bundle.writestr("triton/__init__.py", "")
    found = packages(tmp_path / "bundle.zip")["triton"]
    assert found.location == str(tmp_path / "bundle.zip" / "triton")
    assert (found.owner, found.version_from_source) == (None, None)


class ProjectFinder:
    """Finds one package in a project folder, as the finder of an editable install does."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        init = self.folder / "__init__.py"
        return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(self.folder)])


@pytest.fixture
def no_flashinfer_loaded(monkeypatch):
    for name in ("flashinfer", "flashinfer_cubin"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("no_flashinfer_loaded")
def test_an_editable_install_is_found_through_its_finder(tmp_path, monkeypatch):
    project = tmp_path / "checkout"
    (project / "src" / "flashinfer").mkdir(parents=True)
    (project / "src" / "flashinfer" / "__init__.py").write_text("")
    make_editable(install(tmp_path / "site", "flashinfer-python", "0.7.5.dev1"), project)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "meta_path", [ProjectFinder("flashinfer", project / "src" / "flashinfer"), *sys.meta_path])
    found = {package.name: package for package in gather_packages(None, tuple(scan(None, is_relevant)))}["flashinfer"]
    assert found.location == str(project / "src" / "flashinfer")
    assert (found.owner, found.shadowed) == (Owner("flashinfer-python", "0.7.5.dev1"), False)
    assert "flashinfer" not in sys.modules


@pytest.mark.usefixtures("no_flashinfer_loaded")
def test_a_module_put_into_sys_modules_by_hand_does_not_hide_the_installed_one(tmp_path, monkeypatch):
    install(tmp_path, "flashinfer-cubin", "0.7.4", {"flashinfer_cubin/__init__.py": ""})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "flashinfer_cubin", types.ModuleType("flashinfer_cubin"))
    spec = locate("flashinfer_cubin", None)
    assert isinstance(spec, importlib.machinery.ModuleSpec)
    assert spec.origin == str(tmp_path / "flashinfer_cubin" / "__init__.py")


def test_only_literal_strings_and_none_are_taken_from_source(tmp_path):
    source = tmp_path / "version.py"
    source.write_text(
        "a = '1'\nb: str | None = None\nc = a + 'x'\nd = 3\n"
        "e, f = '1', '2'\ng.h = 'x'\nif d:\n    i = j = '5'\nk: str\n"
    )
    assert literals(source) == {"a": "1", "b": None, "i": "5", "j": "5"}
