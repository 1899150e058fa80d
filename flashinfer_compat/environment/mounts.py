"""Says which mounted file system a path lies on, from Linux's mountinfo."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Mount", "mount_of", "parse_mounts", "read_mounts"]

_NETWORK_TYPES = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "beegfs_nodev",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb2",
        "smb3",
        "smbfs",
        "wekafs",
    }
)
_KERNEL_TYPES = frozenset(
    {
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "proc",
        "pstore",
        "securityfs",
        "sysfs",
        "tracefs",
    }
)
"""What the kernel shows as files: nobody can add one, root included."""
_NETWORK_FUSE = (
    "blobfuse",
    "ceph",
    "cvmfs",
    "dfuse",
    "gcsfuse",
    "glusterfs",
    "goofys",
    "juicefs",
    "mfs",
    "moosefs",
    "mount-s3",
    "mountpoint-s3",
    "quobyte",
    "rclone",
    "s3fs",
    "seaweedfs",
    "sshfs",
)


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    point: str
    filesystem: str
    read_only: bool

    @property
    def is_network(self) -> bool:
        """Whether the type is known to be served by another machine."""
        kind, _, server = self.filesystem.lower().partition(".")
        return kind in _NETWORK_TYPES or (kind == "fuse" and server.startswith(_NETWORK_FUSE))

    @property
    def is_of_the_kernel(self) -> bool:
        """Whether its files are the kernel's, so that nobody can make one."""
        return self.filesystem in _KERNEL_TYPES


def read_mounts(path: str = "/proc/self/mountinfo") -> tuple[Mount, ...]:
    """The mounts this process sees; none where the system does not tell."""
    try:
        return parse_mounts(Path(path).read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return ()


def parse_mounts(text: str) -> tuple[Mount, ...]:
    """The mounts of a mountinfo file (proc(5)), in its order; lines in another form are skipped."""
    mounts: list[Mount] = []
    for line in text.split("\n"):
        fields, separator, rest = line.partition(" - ")
        ours, theirs = fields.split(" "), rest.split(" ")
        if separator and len(ours) >= 6 and len(theirs) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), ours[4])
            read_only = "ro" in ours[5].split(",") or "ro" in theirs[2].split(",")
            mounts.append(Mount(point, theirs[0], read_only))
    return tuple(mounts)


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount an absolute path without links lies on; of several at one point, the last one covers the others."""
    holding = [mount for mount in mounts if path == mount.point or path.startswith(mount.point.rstrip("/") + "/")]
    return max(reversed(holding), key=lambda mount: len(mount.point), default=None)
