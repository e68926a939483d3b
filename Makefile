# chunkflow. Everything is built under $(BUILD); nothing is written outside it.
#
#   make            the command (build/chunkflow) and the examples
#   make demo       trains a small model through chunks on real text and proves that nothing changed (under a minute)
#   make test       all CPU tests, with AddressSanitizer and UBSan
#   make unit       only the unit tests, UNIT=substring chooses
#   make bench      speed and quality against named rivals; prints tables, judges nothing
#   make clean
#
# Useful variables: CC, CXX, CFLAGS, BUILD, SANITIZE (empty: without sanitizers), STRICT_SKIPS=1 (a skipped test fails).

CC      ?= cc
CXX     ?= c++
BUILD   ?= build
CFLAGS  ?= -O2
LDLIBS  += -lm
WARN    := -Wall -Wextra -Wpedantic -Wconversion -Wshadow $(WERROR)
CSTD    := -std=c99
CPPFLAGS += -I.

# What the compiler at hand can do, asked once by compiling and linking a line of C.
can = $(shell d=$$(mktemp -d) && printf '%s\n' 'int main(void) { return 0; }' >$$d/t.c && \
        $(CC) $(1) $$d/t.c -o $$d/t >/dev/null 2>&1 && $$d/t >/dev/null 2>&1 && echo yes; rm -rf $$d)
OPENMP   := $(if $(call can,-fopenmp),-fopenmp)
comma    := ,
ifeq ($(origin SANITIZE),undefined)
SANITIZE := $(if $(call can,-fsanitize=address$(comma)undefined),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all)
endif

PROGRAMS := $(BUILD)/chunkflow $(BUILD)/hello $(BUILD)/train_cpu $(BUILD)/train_cpu_f64

.PHONY: all demo test unit bench clean
all: $(PROGRAMS)

$(BUILD):
	mkdir -p $(BUILD)

# ---- the command ----

TOOL_SOURCES := $(wildcard tools/*.c)
TOOL_HEADERS := chunkflow.h $(wildcard tools/*.h)

# Reading a config.json needs Jansson (Debian: libjansson-dev, found through pkg-config); all else works without it.
ifeq ($(shell pkg-config --exists jansson 2>/dev/null && echo yes),yes)
TOOL_CFLAGS := -DHAVE_JANSSON $(shell pkg-config --cflags jansson)
TOOL_LIBS   := $(shell pkg-config --libs jansson)
endif

$(BUILD)/chunkflow: $(TOOL_SOURCES) $(TOOL_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(TOOL_CFLAGS) $(WARN) $(LDFLAGS) $(TOOL_SOURCES) -o $@ $(LDLIBS) $(TOOL_LIBS)

# ---- examples ----

TRAIN_HEADERS := chunkflow.h $(wildcard examples/*.h)
TRAIN_CFLAGS  := -O3 -funroll-loops

$(BUILD)/hello: examples/hello.c chunkflow.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(BUILD)/train_cpu: examples/train_cpu.c $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(TRAIN_CFLAGS) $(OPENMP) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(BUILD)/train_cpu_f64: examples/train_cpu.c $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) -DTRAIN_FLOAT64 $(CFLAGS) $(TRAIN_CFLAGS) $(OPENMP) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

demo: $(BUILD)/train_cpu $(BUILD)/train_cpu_f64
	$(BUILD)/train_cpu --demo
	$(BUILD)/train_cpu_f64 --check

# ---- tests ----
#
# Each suite ends with "N passed, N failed"; tests/run.sh adds them up. The unit tests, the command and the trainer are
# built with sanitizers where the compiler has them.

TEST_BUILD   := $(BUILD)/test
TEST_CFLAGS  := -g -O1 $(SANITIZE)
TEST_SOURCES := $(filter-out tests/test_trainer%.c,$(wildcard tests/*.c)) # those are programs of their own
TEST_OBJECTS := $(TEST_SOURCES:tests/%.c=$(TEST_BUILD)/%.o)
TEST_HEADERS := chunkflow.h $(wildcard tests/*.h)

$(TEST_BUILD):
	mkdir -p $@

$(TEST_BUILD)/%.o: tests/%.c $(TEST_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) -c $< -o $@

$(TEST_BUILD)/unit: $(TEST_OBJECTS)
	$(CC) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(TEST_BUILD)/trainer: tests/test_trainer.c tests/harness.h $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(TEST_BUILD)/trainer_model: tests/test_trainer_model.c tests/harness.h $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(TEST_BUILD)/chunkflow: $(TOOL_SOURCES) $(TOOL_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(TOOL_CFLAGS) $(WARN) $(LDFLAGS) $(TOOL_SOURCES) -o $@ $(LDLIBS) $(TOOL_LIBS)

# The unit tests alone; UNIT names a substring of the tests to run.
unit: $(TEST_BUILD)/unit
	$(TEST_BUILD)/unit $(UNIT)

test: $(PROGRAMS) $(TEST_BUILD)/unit $(TEST_BUILD)/trainer $(TEST_BUILD)/trainer_model $(TEST_BUILD)/chunkflow
	@$(if $(SANITIZE),,echo "note: this compiler links no sanitizers; the tests run without them";) \
	CC="$(CC)" CXX="$(CXX)" BUILD="$(BUILD)" sh tests/run.sh \
	    "$(TEST_BUILD)/unit" \
	    "env CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/cli.sh" \
	    "env CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/cli_models.sh" \
	    "env CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/cli_tune.sh" \
	    "$(TEST_BUILD)/trainer" \
	    "$(TEST_BUILD)/trainer_model" \
	    "sh tests/train_check.sh $(BUILD)" \
	    "sh tests/compile.sh"

# ---- benchmarks ----

bench: $(BUILD)/bench_tune $(BUILD)/bench_fit
	CC="$(CC)" CFLAGS="$(CFLAGS)" BUILD="$(BUILD)" sh tools/bench/bench_pack.sh
	$(BUILD)/bench_tune
	$(BUILD)/bench_fit

BENCH_TUNE_SOURCES := tools/bench/bench_tune.c tools/cli.c tools/cli_files.c tools/draw.c

$(BUILD)/bench_tune: $(BENCH_TUNE_SOURCES) $(TOOL_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $(BENCH_TUNE_SOURCES) -o $@

$(BUILD)/bench_fit: tools/bench/bench_fit.c $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(TRAIN_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

clean:
	rm -rf $(BUILD)
