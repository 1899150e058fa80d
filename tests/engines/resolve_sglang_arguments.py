"""Let the real SGLang settle whole sets of server arguments, with the plugin, as on an SM100.

In: `[{argument: value}, ...]`. Out: for each what was settled about fusion.
"""

from __future__ import annotations

import json
import sys

from sglang_process import make_torchvision_importable

make_torchvision_importable()

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang.srt.arg_groups.overrides import resolution_result  # noqa: E402
from sglang.srt.runtime_context import override_platform  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat import machine  # noqa: E402

NAMES = ("quantization", "moe_runner_backend", "disable_shared_experts_fusion")

target = fc.Target.from_release("0.7.2", "sm100")
machine.this_machine = lambda: target
answers = []
with override_platform(is_sm100=True, is_blackwell=True):
    for arguments in json.load(sys.stdin):
        server_args = ServerArgs(device="cpu", skip_tokenizer_init=True, **arguments)
        server_args.resolve_once()
        answers.append({name: resolution_result(server_args, name) for name in NAMES})
print(json.dumps(answers))
