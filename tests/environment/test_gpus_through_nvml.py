from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_compat.environment import Gpu, Gpus
from flashinfer_compat.environment.gpus import gather_gpus
from flashinfer_compat.environment.reading import NotAvailableError

COMPILER = shutil.which("cc") or shutil.which("gcc")

NVML_SOURCE = r"""
#include <stdio.h>
#include <string.h>
#ifndef INIT
#define INIT 0
#endif
#ifndef LOST
#define LOST -1
#endif
#ifndef OPTIONAL
#define OPTIONAL 0
#endif
#ifndef COUNT
#define COUNT 2
#endif
typedef struct { unsigned index; } device;
static device devices[2] = {{0}, {1}};
static int running = 0;
static int answer(char *text, unsigned length, const char *value) {
    if (!running) return 1;
    if (OPTIONAL) return OPTIONAL;
    if (strlen(value) >= length) return 7;
    strcpy(text, value);
    return 0;
}
const char *nvmlErrorString(int code) {
    return code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost" : "Unknown Error";
}
int nvmlInit_v2(void) { running += INIT == 0; return INIT; }
int nvmlShutdown(void) { running--; return 0; }
int fake_running(void) { return running; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { return answer(text, length, "580.95.05"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13010; return OPTIONAL; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return running ? 0 : 1; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **handle) {
    if ((int)index == LOST) return 15;
    *handle = &devices[index];
    return 0;
}
int nvmlDeviceGetName(device *handle, char *text, unsigned length) {
    if (!running) return 1;
    strncpy(text, handle->index ? "NVIDIA B200" : "NVIDIA H200", length);
    return 0;
}
int nvmlDeviceGetUUID(device *handle, char *text, unsigned length) {
    char value[64];
    snprintf(value, sizeof value, "GPU-%08u-0000-0000-0000-000000000000", handle->index);
    return answer(text, length, value);
}
int nvmlDeviceGetCudaComputeCapability(device *handle, int *major, int *minor) {
    *major = handle->index ? 10 : 9;
    *minor = handle->index ? 3 : 0;
    return 0;
}
int nvmlDeviceGetMemoryInfo(device *handle, unsigned long long *memory) {
    memory[0] = 150754820096ull + handle->index;
    memory[1] = 1;
    memory[2] = 2;
    return OPTIONAL;
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    def compile_library(name="libfake.so", **macros):
        folder = tmp_path_factory.mktemp("nvml")
        (folder / "nvml.c").write_text(NVML_SOURCE)
        flags = [f"-D{macro}={value}" for macro, value in macros.items()]
        subprocess.run([COMPILER, "-shared", "-fPIC", *flags, "-o", name, "nvml.c"], cwd=folder, check=True)
        return str(folder / name)

    return compile_library


def test_every_gpu_is_reported_whatever_the_mask(build):
    import ctypes

    library = build()
    gpus = gather_gpus({"CUDA_VISIBLE_DEVICES": "1"}, [library])
    assert gpus == Gpus(
        driver_version="580.95.05",
        driver_cuda_version="13.1",
        devices=(
            Gpu(0, "NVIDIA H200", (9, 0), "GPU-00000000-0000-0000-0000-000000000000", 150754820096),
            Gpu(1, "NVIDIA B200", (10, 3), "GPU-00000001-0000-0000-0000-000000000000", 150754820097),
        ),
        visible="1",
    )
    assert [gpu.architecture for gpu in gpus.devices] == ["sm90", "sm103"]
    assert ctypes.CDLL(library).fake_running() == 0, "the library was shut down again"


def test_the_mask_is_none_where_it_is_not_set(build):
    assert gather_gpus({}, [build()]).visible is None


def test_a_lost_gpu_does_not_hide_the_others(build):
    gpus = gather_gpus({}, [build(LOST=0)])
    assert [gpu.index for gpu in gpus.devices] == [1]
    assert gpus.problems == ("GPU 0: nvmlDeviceGetHandleByIndex_v2 failed with code 15: GPU is lost",)


def test_what_the_driver_does_not_support_is_none(build):
    gpus = gather_gpus({}, [build(OPTIONAL=3)])
    assert (gpus.driver_version, gpus.driver_cuda_version) == (None, None)
    assert [(gpu.name, gpu.uuid, gpu.memory_bytes) for gpu in gpus.devices] == [
        ("NVIDIA H200", None, None),
        ("NVIDIA B200", None, None),
    ]


def test_a_driver_without_gpus_is_a_value(build):
    assert gather_gpus({}, [build(COUNT=0)]).devices == ()


def test_a_driver_that_does_not_start_is_a_reason(build):
    with pytest.raises(NotAvailableError, match="nvmlInit_v2 failed with code 9: Driver Not Loaded"):
        gather_gpus({}, [build(INIT=9)])


def test_a_missing_or_broken_library_is_a_reason(tmp_path):
    (tmp_path / "broken.so").write_text("not a library")
    with pytest.raises(NotAvailableError, match=r"no NVIDIA driver library: .*absent.so.*broken.so"):
        gather_gpus({}, [str(tmp_path / "absent.so"), str(tmp_path / "broken.so")])


def test_the_next_library_is_tried(build, tmp_path):
    assert len(gather_gpus({}, [str(tmp_path / "absent.so"), build()]).devices) == 2


def test_collect_finds_the_library_on_the_loaders_path(build):
    code = "from flashinfer_compat.environment import collect; print(collect([]).to_dict()['gpus']['value']['devices'])"
    variables = {
        **os.environ,
        "LD_LIBRARY_PATH": str(Path(build("libnvidia-ml.so.1")).parent),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    output = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert output.stdout.count("compute_capability") == 2
