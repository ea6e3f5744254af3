# make run     builds Thunder and starts the server on http://127.0.0.1:6767
# FEATURES=cuda (or vulkan) after run, build or release adds this backend for GPUs
# make test    installs missing dependencies, then runs all tests
# make release    builds an archive for any processor of this architecture in target/dist
# make bench-table RIVAL=PATH/llama-server    measures Thunder and llama-server side by side
.PHONY: run build release test bench bench-table deps lint

# rustup installs cargo in a folder that may not be in PATH.
CARGO ?= $(shell command -v cargo || echo "$$HOME/.cargo/bin/cargo")
PYTHON ?= python3

run: build
	./target/release/thunder serve

build: deps
	$(CARGO) build --release --locked $(if $(FEATURES),--features "$(FEATURES)")

release: deps
	.ci/release

# Most tests wait for servers, databases and timeouts, so each core runs several.
test: export RUST_TEST_THREADS ?= $(shell expr 3 '*' $$(getconf _NPROCESSORS_ONLN))

# The tests of JavaScript and Python run first, so that the output ends with cargo's summary.
test: deps
	@if command -v node >/dev/null; then node --test tests/js/*.test.js; \
	 else echo "node is not installed: the dashboard's JavaScript tests are skipped" >&2; fi
	PYTHONPATH=src/mods/python/sdk $(PYTHON) -B -m unittest discover -s tests/python
	$(CARGO) test --locked

bench: deps
	$(CARGO) bench --locked

bench-table:
	$(PYTHON) -B tests/benches/table/table.py --thunder target/release/thunder --rival "$(RIVAL)" $(FLAGS)

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CARGO) doc --locked --no-deps --document-private-items

deps:
	@.ci/deps
