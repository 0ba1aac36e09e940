# Tests by what they need; `python -m pytest` alone runs the quick part.
PYTEST = python -m pytest -n 3 --dist worksteal -rs

quick:
	$(PYTEST)
smoke faults launch gpu oldest cudalab:
	$(PYTEST) -m $@
all: quick smoke faults launch
lint:
	ruff check .
	ruff format --check .
	mypy common benchmarks analysis examples tests
results: # docs/results anew, in 25 minutes
	python tests/measure_results.py
.PHONY: results quick smoke faults launch gpu oldest cudalab all lint
