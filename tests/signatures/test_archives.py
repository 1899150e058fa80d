"""The shipped record against the published archives themselves."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pypi_simple")

from pypi_simple import DistributionPackage, PyPISimple

from flashinfer_compat.signatures.archives import ArchiveSource
from flashinfer_compat.signatures.recorded import recorded, releases
from tools.record_signatures import archives, read_archive

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.archives

VERSIONS = ["0.2.14.post1", "0.4.1", "0.5.3", "0.6.15.post1", "0.6.17", "0.7.0", "0.7.4"]


@pytest.fixture(scope="module")
def client() -> Iterator[PyPISimple]:
    with PyPISimple() as found:
        yield found


@pytest.fixture(scope="module")
def published(client: PyPISimple) -> dict[str, DistributionPackage]:
    return archives(client)


@pytest.fixture
def archive(
    version: str, client: PyPISimple, published: dict[str, DistributionPackage], tmp_path: Path
) -> Iterator[Path]:
    path = tmp_path / published[version].filename
    client.download_package(published[version], path)
    yield path
    path.unlink()


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that are in no function and no class."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from top_level([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def functions_of(source: ArchiveSource, module: str) -> dict[str, list[str]]:
    """The parameter names of every function of a module, from the tree of its whole file."""
    stem = module.replace(".", "/")
    content = source.read(f"{stem}/__init__.py") or source.read(f"{stem}.py")
    assert content is not None
    found = {}
    for node in top_level(ast.parse(content).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            signature = node.args
            starred = [[one] if one else [] for one in (signature.vararg, signature.kwarg)]
            arguments = [*signature.posonlyargs, *signature.args, *starred[0], *signature.kwonlyargs, *starred[1]]
            found[node.name] = [one.arg for one in arguments]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fresh_reading_equals_the_record(version: str, archive: Path) -> None:
    record = recorded(version)
    assert archive.name == record.archive
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == record.sha256
    fresh = read_archive(archive, version)
    assert dict(fresh.texts) == dict(record.texts)
    assert fresh == record

    source = ArchiveSource(archive)
    compared = set()
    for name, symbol in record.symbols.symbols.items():
        functions = functions_of(source, symbol.module)
        if name in functions:
            assert functions[name] == [parameter.name for parameter in symbol.parameters or ()], name
            compared.add(name)
    # The rest are classes, and one alias that is defined under another name.
    others = {name for name in record.texts if name[0].isupper()} | {"nvfp4_block_scale_interleave"}
    assert compared == set(record.texts) - others


@pytest.mark.parametrize("version", ["0.4.0", "0.4.1"])
def test_releases_without_wheels_are_read_from_their_sdists(
    version: str, published: dict[str, DistributionPackage]
) -> None:
    assert published[version].package_type == "sdist"
    assert published[version].filename == recorded(version).archive


def test_every_published_release_is_recorded(published: dict[str, DistributionPackage]) -> None:
    newest_recorded = list(published).index(releases()[-1])
    assert set(list(published)[: newest_recorded + 1]) == set(releases())
