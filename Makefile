# Everything happens in a virtual environment inside this folder; nothing else on the machine is changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Some virtual machines advertise AMX but trap when it is used; this keeps oneDNN off it.
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_BF16

.PHONY: demo test check clean

demo: $(VENV)/.ready        ## train through a black box, with and without its gradient
	$(BIN)/bondgrad demo

test: check                 ## style, types and all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto

check: $(VENV)/.ready       ## style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:                      ## remove the virtual environment
	rm -rf $(VENV)
