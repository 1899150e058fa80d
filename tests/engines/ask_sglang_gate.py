"""Ask the real SGLang's gate, with the plugin that its own loader finds, about rows of server arguments.

In: `[{"site", "capability", "refuted", "arguments"}, ...]`. Out: what the plugin loader did, and for each row what
SGLang declares alone (`alone`), with the plugin (`declared`), and what the plugin logged.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from engine_process import Lines, tell
from sglang_process import make_torchvision_importable

make_torchvision_importable()

from sglang.srt.arg_groups import moe_hook, overrides  # noqa: E402
from sglang.srt.plugins import load_plugins, load_plugins_by_group  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402


def declared(arguments: dict[str, object]) -> dict[str, object]:
    server_args = SimpleNamespace(**arguments)
    # By the name and through the function that SGLang's own resolution uses.
    overrides.run_post_process_pass(server_args, moe_hook._moe_runner_fusion_disable)
    return {name: value for _, one in getattr(server_args, "_resolved_overrides", ()) for name, value in one.items()}


# In a list, for SGLang replaces what a hook is put around in the globals of every module, this one's too.
alone = [overrides._moe_runner_fusion_disable]
load_plugins()
lines = Lines()
rows = []
for row in json.load(sys.stdin):
    tell(row["site"], row["capability"] and tuple(row["capability"]), row["refuted"])
    arguments = row["arguments"]
    view = overrides.ResolvedView(SimpleNamespace(**arguments))
    rows.append({"alone": alone[0](view), "declared": declared(arguments), "lines": lines.take()})
found = load_plugins_by_group("sglang.srt.plugins")
answer = {
    "plugins": {name: [function.__module__, owner] for name, (function, owner) in found.items()},
    "hooked": sorted(HookRegistry._patched),
    "gate_is_hooked": overrides._moe_runner_fusion_disable is not alone[0],
    "rows": rows,
}
print(json.dumps(answer))
