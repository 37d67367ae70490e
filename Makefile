# Needs Python 3.11 or newer and make; everything else is installed into .venv on the first call.
PYTHON ?= python3
PYTEST_FLAGS ?= -n 2 --dist loadfile
MODEL := smollm2-135m

BIN := .venv/bin
INSTALLED := .venv/.installed
OLDEST := .venv/oldest
OLDEST_INSTALLED := .venv/.oldest-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-oldest check format
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/kvcompress fetch $(MODEL)
	$(BIN)/kvcompress run configs/quickstart.yaml

test: $(INSTALLED)
	$(BIN)/kvcompress fetch $(MODEL)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# The oldest supported transformers, found before the newest one of .venv.
test-oldest: $(OLDEST_INSTALLED)
	PYTHONPATH="$(CURDIR)/$(OLDEST)" $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not model"

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch goes first, so that whatever needs it finds the pinned build and never brings another one.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "Installing into .venv: some minutes, once."
	$(PYTHON) -m venv .venv
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $@

$(OLDEST_INSTALLED): $(INSTALLED) constraints-oldest.txt
	rm -rf $(OLDEST)
	$(PIP) install --target $(OLDEST) --constraint constraints-oldest.txt transformers
	touch $@
