"""Let the real vLLM load its general plugins, and say what became of the model registry.

In: rows of what is changed before: `{"switch", "release", "registered", "sources", "times"}`. Out: the plugins that
vLLM found, for each row the class that it would build for DeepSeek's architecture and what was logged, and whether any
model code was imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys

from engine_process import Lines
from vllm import ModelRegistry, plugins

from flashinfer_compat.engines import vllm_sources

ARCHITECTURE = "DeepseekV3ForCausalLM"
OURS = "flashinfer_compat.engines.vllm_model"

own = ModelRegistry.models[ARCHITECTURE]
version, sources = importlib.metadata.version, vllm_sources.SOURCES["0.33.0"]
lines = Lines()
rows = []
for row in json.load(sys.stdin):
    os.environ["FLASHINFER_COMPAT_VLLM_FUSION"] = row.get("switch", "1")
    ModelRegistry.models[ARCHITECTURE] = own
    if "registered" in row:
        ModelRegistry.register_model(ARCHITECTURE, row["registered"])
    importlib.metadata.version = lambda name, row=row: row.get("release", version(name))
    # As if the installed file were another.
    vllm_sources.SOURCES["0.33.0"] = {**sources, **row.get("sources", {})}
    for _ in range(row.get("times", 1)):
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
    importlib.metadata.version = version
    registered = ModelRegistry.models[ARCHITECTURE]
    rows.append({"class": f"{registered.module_name}:{registered.class_name}", "lines": lines.take()})
found = plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)
answer = {
    "plugins": {name: function.__module__ for name, function in found.items()},
    "rows": rows,
    "imported": OURS in sys.modules or "vllm.model_executor.models.deepseek_v2" in sys.modules,
}
print(json.dumps(answer))
