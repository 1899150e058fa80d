#!/bin/sh
# Create an environment with SGLang on a CPU and run the tests of the engines in it; arguments go to pytest.
# PYTHON: the interpreter to use (default python3). VENV: where the environment goes (default .venv-engines).
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-engines}
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip --no-compile torch==2.13.0 -e ".[checkpoint,test]"
$pip --no-compile --no-deps -r tests/engines/requirements-sglang.txt
"$venv/bin/python" -m pytest tests/engines "$@"
