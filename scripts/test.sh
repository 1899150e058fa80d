#!/bin/sh
# Create an environment and run the linters and the tests; arguments go to pytest.
# PYTHON: the interpreter to use (default python3). VENV: where the environment goes (default .venv-test).
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-test}
"${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile"
# Triton runs in its interpreter; transformers serves a tiny model to the tests of `ab`.
$pip torch==2.13.0 triton==3.9.0 "transformers[serving]==5.24.*" -e ".[checkpoint,cli,ab,bench,test,lint]"
# FlashInfer's own requirements would bring several GB that its CPU parts do not need.
$pip --no-deps -r tests/requirements-flashinfer.txt
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# A process a core, each with one thread; a file's tests share one, because they share what they made.
export OMP_NUM_THREADS=1
# Without -m the tests that download FlashInfer archives (180 MB) would be skipped.
"$venv/bin/python" -m pytest -n auto --maxprocesses=8 --dist loadfile -m "archives or not archives" "$@"
