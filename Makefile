# For people who have make; the README's commands need nothing but Python.
VENV ?= .venv

$(VENV)/bin/pytest: pyproject.toml .ci/constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q -c .ci/constraints.txt -e '.[dev]'

.PHONY: run test test-engines lint
run: $(VENV)/bin/pytest
	$(VENV)/bin/compiled-moe generate

test: $(VENV)/bin/pytest
	$(VENV)/bin/pytest -n 2 --dist loadfile

test-engines:
	.ci/engines

lint: $(VENV)/bin/pytest
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy compiled_moe ops/nvfp4 graph_tests bench
	PATH=$(abspath $(VENV))/bin:$$PATH lint-imports
