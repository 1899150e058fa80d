#!/bin/sh
# For each engine, create an environment with it on a CPU and run the tests of the engines there.
# The first argument may be sglang, vllm or both (the default); the others go to pytest.
# PYTHON: the interpreter to use (default python3). VENV: where the environments go, each with "-" and its engine's name
# behind it (default .venv-engines).
set -eu
cd "$(dirname "$0")/.."
engines="sglang vllm"
case ${1:-} in
sglang | vllm) engines=$1 && shift ;;
both) shift ;;
esac
for engine in $engines; do
    venv=${VENV:-.venv-engines}-$engine
    "${PYTHON:-python3}" -m venv "$venv"
    pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile"
    $pip torch==2.13.0 -e ".[checkpoint,test]"
    $pip --no-deps -r "tests/engines/requirements-$engine.txt"
    "$venv/bin/python" -m pytest tests/engines "$@"
done
