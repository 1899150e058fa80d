#!/bin/sh
# Create an environment and run one MoE layer of a sample checkpoint on the CPU.
# PYTHON: the interpreter to use (default python3). VENV: where the environment goes (default .venv-try).
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-try}
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0 ".[checkpoint,cli]"
sample=tests/data/checkpoints/grouped
"$venv/bin/python" -m flashinfer_compat run-layer "$sample" --layer 1 --input "$sample/moe_io.safetensors"
