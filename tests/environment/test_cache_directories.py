from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_compat.environment import CachePurpose, Section, cache_directory
from flashinfer_compat.environment.caches import describe_directory, gather_caches
from flashinfer_compat.environment.mounts import Mount, mount_of, parse_mounts, read_mounts

MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:40 / /home rw,nosuid shared:1 master:2 - nfs4 server:/export rw,vers=4.2
31 27 0:41 / /mnt/two\\040words rw - fuse.sshfs host:/ rw,user_id=0
32 27 0:42 / /opt ro,relatime - overlay overlay rw
33 27 0:43 / /data rw - lustre a@tcp:/fs ro
34 30 0:44 / /home rw - tmpfs tmpfs rw
a line in another form
"""


def caches(environ):
    return {cache.purpose: cache for cache in gather_caches(environ)}


def test_defaults_lie_in_the_home_directory(tmp_path):
    found = caches({"HOME": str(tmp_path)})
    assert {purpose: cache.path for purpose, cache in found.items()} == {
        CachePurpose.FLASHINFER: str(tmp_path / ".cache" / "flashinfer"),
        CachePurpose.CUBINS: str(tmp_path / ".cache" / "flashinfer" / "cubins"),
        CachePurpose.TRITON: str(tmp_path / ".triton" / "cache"),
        CachePurpose.OWN: str(tmp_path / ".cache" / "flashinfer_compat"),
    }
    for cache in found.values():
        assert (cache.origin, cache.exists, cache.writable, cache.reason) == ("home directory", False, True, None)
    assert list(tmp_path.iterdir()) == []


def test_variables_choose_the_directories(tmp_path):
    environ = {
        "HOME": str(tmp_path),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "base"),
        "TRITON_HOME": str(tmp_path / "t"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }
    found = {purpose: (cache.path, cache.origin) for purpose, cache in caches(environ).items()}
    workspace = tmp_path / "base" / ".cache" / "flashinfer"
    assert found == {
        CachePurpose.FLASHINFER: (str(workspace), "FLASHINFER_WORKSPACE_BASE"),
        CachePurpose.CUBINS: (str(workspace / "cubins"), "FLASHINFER_WORKSPACE_BASE"),
        CachePurpose.TRITON: (str(tmp_path / "t" / ".triton" / "cache"), "TRITON_HOME"),
        CachePurpose.OWN: (str(tmp_path / "xdg" / "flashinfer_compat"), "XDG_CACHE_HOME"),
    }
    direct = {
        **environ,
        "FLASHINFER_CUBIN_DIR": str(tmp_path / "cubins"),
        "TRITON_CACHE_DIR": str(tmp_path / "tc"),
        "FLASHINFER_COMPAT_CACHE_DIR": str(tmp_path / "own"),
    }
    found = {purpose: (cache.path, cache.origin) for purpose, cache in caches(direct).items()}
    assert found[CachePurpose.CUBINS] == (str(tmp_path / "cubins"), "FLASHINFER_CUBIN_DIR")
    assert found[CachePurpose.TRITON] == (str(tmp_path / "tc"), "TRITON_CACHE_DIR")
    assert found[CachePurpose.OWN] == (str(tmp_path / "own"), "FLASHINFER_COMPAT_CACHE_DIR")


def test_an_existing_directory_is_said_to_exist(tmp_path):
    (tmp_path / "own").mkdir()
    assert caches({"HOME": str(tmp_path), "FLASHINFER_COMPAT_CACHE_DIR": str(tmp_path / "own")})[
        CachePurpose.OWN
    ].exists


def test_a_relative_setting_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cache_directory({"FLASHINFER_COMPAT_CACHE_DIR": "own"}) == Section(value=str(tmp_path / "own"))


def test_a_relative_xdg_directory_is_ignored(tmp_path):
    environ = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "cache"}
    assert cache_directory(environ) == Section(value=str(tmp_path / ".cache" / "flashinfer_compat"))


def test_the_user_database_stands_in_for_home():
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert cache_directory({}) == Section(value=f"{home}/.cache/flashinfer_compat")


@pytest.mark.parametrize("home", ["", "relative/home"])
def test_a_home_that_is_no_absolute_path_is_a_reason(home):
    assert cache_directory({"HOME": home}).reason == f"HOME is not an absolute path: {home!r}"
    assert caches({"HOME": home})[CachePurpose.FLASHINFER].reason == f"HOME is not an absolute path: {home!r}"


def test_a_home_that_is_no_directory_is_a_reason_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "absent", tmp_path / "file"):
        assert cache_directory({"HOME": str(home)}).reason == (
            f"the home directory {home} is not a directory; set FLASHINFER_COMPAT_CACHE_DIR"
        )


def test_a_file_in_the_way_makes_a_directory_unwritable(tmp_path):
    (tmp_path / ".cache").write_text("")
    found = caches({"HOME": str(tmp_path)})
    for purpose in (CachePurpose.FLASHINFER, CachePurpose.CUBINS, CachePurpose.OWN):
        assert (found[purpose].exists, found[purpose].writable) == (False, False)
        assert found[purpose].reason == f"{tmp_path / '.cache'} is not a directory"
    assert found[CachePurpose.TRITON].writable


def test_a_dangling_link_makes_a_directory_unwritable(tmp_path):
    (tmp_path / ".cache").symlink_to("gone")
    assert caches({"HOME": str(tmp_path)})[CachePurpose.OWN].reason == f"{tmp_path / '.cache'} is not a directory"


def test_a_loop_of_links_is_a_reason(tmp_path):
    (tmp_path / ".cache").symlink_to(".cache")
    found = caches({"HOME": str(tmp_path)})[CachePurpose.OWN]
    assert not found.writable
    assert found.reason


def test_one_unusable_directory_leaves_the_others(tmp_path):
    found = caches({"HOME": "", "FLASHINFER_CUBIN_DIR": str(tmp_path)})
    assert found[CachePurpose.FLASHINFER].path is None
    assert found[CachePurpose.CUBINS].writable


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="needs root to become another user")
def test_a_user_without_home_or_permission_gets_reasons(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    code = (
        "import os, pwd, sys\n"
        "from flashinfer_compat.environment import CachePurpose, cache_directory\n"
        "from flashinfer_compat.environment.caches import gather_caches\n"
        "os.setuid(54321)\n"
        "print(cache_directory({}).reason)\n"
        "print(gather_caches({'FLASHINFER_CUBIN_DIR': sys.argv[1]})[1].reason)\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, "/"]
    output = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert output.stdout.splitlines() == [
        "HOME is not set and user 54321 has no entry in the user database",
        "no permission to write in /",
    ]


def test_mounts_are_parsed():
    assert parse_mounts(MOUNTINFO) == (
        Mount("/", "ext4", False),
        Mount("/home", "nfs4", False),
        Mount("/mnt/two words", "fuse.sshfs", False),
        Mount("/opt", "overlay", True),
        Mount("/data", "lustre", True),
        Mount("/home", "tmpfs", False),
    )


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/", "ext4"),
        ("/homes/a", "ext4"),
        ("/home", "tmpfs"),
        ("/home/a/.cache", "tmpfs"),
        ("/mnt/two words/x", "fuse.sshfs"),
        ("/opt/x", "overlay"),
    ],
)
def test_the_longest_and_latest_mount_holds_a_path(path, filesystem):
    mount = mount_of(path, parse_mounts(MOUNTINFO))
    assert mount is not None
    assert mount.filesystem == filesystem


@pytest.mark.parametrize(
    ("filesystem", "is_network"),
    [
        *((name, True) for name in ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "9p")),
        *((f"fuse.{name}", True) for name in ("sshfs", "gcsfuse", "JuiceFS", "ceph-fuse", "glusterfs", "rclone")),
        *((name, False) for name in ("ext4", "xfs", "overlay", "tmpfs", "btrfs", "zfs", "fuse", "fuse.fuse-overlayfs")),
    ],
)
def test_network_file_systems_are_known(filesystem, is_network):
    assert Mount("/", filesystem, False).is_network is is_network


def test_a_read_only_mount_is_not_writable(tmp_path):
    mounts = [Mount("/", "ext4", False), Mount(str(tmp_path), "nfs4", True)]
    found = describe_directory(CachePurpose.OWN, tmp_path / "a" / "b", "test", mounts)
    assert (found.writable, found.reason) == (False, f"{tmp_path} is mounted read-only")
    assert (found.filesystem, found.is_network) == ("nfs4", True)


@pytest.mark.parametrize("filesystem", ["proc", "sysfs", "cgroup2"])
def test_nobody_writes_among_the_kernels_files_not_even_root(tmp_path, filesystem):
    mounts = [Mount("/", "ext4", False), Mount(str(tmp_path), filesystem, False)]
    found = describe_directory(CachePurpose.FLASHINFER, tmp_path / "a", "test", mounts)
    assert not found.writable
    assert found.reason == f"{tmp_path} is a file system of the kernel ({filesystem}), where nobody can make files"


def test_a_tilde_in_our_own_variable_is_the_home(tmp_path):
    for value, expected in (
        ("~", tmp_path),
        ("~/a", tmp_path / "a"),
        ("~a", Path.cwd() / "~a"),
        ("a", Path.cwd() / "a"),
    ):
        environ = {"HOME": str(tmp_path), "FLASHINFER_COMPAT_CACHE_DIR": value}
        assert cache_directory(environ).value == str(expected)


def test_without_mount_information_the_file_system_is_unknown(tmp_path):
    assert read_mounts(str(tmp_path / "absent")) == ()
    found = describe_directory(CachePurpose.OWN, tmp_path, "test", ())
    assert (found.filesystem, found.is_network, found.writable) == (None, None, True)


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="needs /proc")
def test_this_machines_proc_is_found():
    mount = mount_of("/proc/self", read_mounts())
    assert mount is not None
    assert (mount.point, mount.filesystem) == ("/proc", "proc")
