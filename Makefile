# chunkflow. Everything is built under $(BUILD); only `make install` writes outside it.
#
#   make            the command (build/chunkflow) and the examples; the pipeline of processes where there is MPI
#   make demo       trains a small model through chunks on real text and proves that nothing changed (under a minute)
#   make test       all CPU tests, with AddressSanitizer and UBSan; FULL=1 repeats the longest ones more often
#   make unit       only the unit tests, UNIT=substring chooses
#   make coverage   branches of chunkflow.h that the unit tests take, by section; LIST=1 prints those that they do not
#   make mutants    which of N=200 faults in chunkflow.h (OF=tools, OF=examples: in those) the tests see
#   make check-deep what takes longer: two static analysers, valgrind, ThreadSanitizer
#   make fuzz MINUTES=n   searches for inputs that break something (clang); n minutes in all, shared by the targets; default 9
#   make test-cuda  the CUDA file and example under a host emulation, and a real compile where nvcc is; part of make test
#   make test-ptx   the CUDA file as nvcc compiles it, run on a CPU (tests/ptx); SUITE=attention, ARCH=80, 86 or 90 choose
#   make test-torch the command's CSV in PyTorch's pipelining, and training chunk by chunk beside plain training, in an environment
#                   of about 6 GB that it makes once, in the user's cache; with cuDNN in it, the adapter of the examples
#   make test-gpu   the CUDA tests on a device (skipped without one)
#   make bench-gpu  attention speed on a device, beside PyTorch's where that is installed
#   make shared     both libraries as one shared library, and their declarations, for tools/python and others
#   make wheel      tools/python with the library inside, as pip installs it
#   make gpu-record the first quarter of an hour on a device, into a few files (tools/device/gpu_record.sh)
#   make gpu-programs  what it runs, built where nvcc is, for a device elsewhere
#   make bench      speed and quality against named rivals; prints tables, judges nothing
#   make bench-clocks OTHER=FILE   schedules of this header and of another one, judged by clocks that differ from the estimates; ARGS: options
#   make bench-dealing OTHER=FILE  plans for ranks, free and in step, of this header and of another one; ARGS: a list of lengths
#   make bench-record LENGTHS=FILE   the tables that README and tools/bench/results quote, made anew
#   make build/executor_cuda    the CUDA example, with nvcc; NCCL=1: also a process a stage
#   make build/train_cuda       the trainer of real model shapes on one GPU, with nvcc; CUDNN=1: --cudnn, too
#   make release    the archive that people vendor: both headers, the .cu, how to use them, checksums
#   make install    headers, command, manual page, completions, pkg-config file; PREFIX (/usr/local), DESTDIR
#   make playground a page that plans while one moves sliders, with the command inside: build/playground.html
#   make pictures   the pictures of README and of tools/guide anew
#   make clean
#
# Useful variables: CC, CXX, NVCC, PYTHON, CFLAGS, BUILD, SANITIZE (empty: without sanitizers), STRICT_SKIPS=1 (a skipped test fails).

# Two jobs at once unless -j says otherwise.
MAKEFLAGS += -j2

CC      ?= cc
CXX     ?= c++
PYTHON  ?= python3
BUILD   ?= build
CFLAGS  ?= -O2
LDLIBS  += -lm -lpthread
WARN    := -Wall -Wextra -Wpedantic -Wconversion -Wshadow $(WERROR)
CSTD    := -std=c99
CPPFLAGS += -I.

# Compilers are asked in a folder under TMPDIR. Where that cannot be used, "no" would be no answer.
ifneq ($(shell d=$$(mktemp -d) && printf '\043!/bin/sh\n' >"$$d/t" && chmod 700 "$$d/t" && "$$d/t" && echo yes; rm -rf "$$d"),yes)
$(error no program can be made and run in TMPDIR ($(or $(TMPDIR),/tmp)), so what the compiler can do is not known)
endif

# What the compiler at hand can do, asked once by compiling and linking a line of C.
can = $(shell d=$$(mktemp -d) && printf '%s\n' 'int main(void) { return 0; }' >"$$d/t.c" && \
        $(CC) $(1) "$$d/t.c" -o "$$d/t" >/dev/null 2>&1 && "$$d/t" >/dev/null 2>&1 && echo yes; rm -rf "$$d")
OPENMP   := $(if $(call can,-fopenmp),-fopenmp)
comma    := ,
can_cxx = $(shell d=$$(mktemp -d) && printf '%s\n' 'int main() { return new int(0) == nullptr; }' >"$$d/t.cc" && \
        $(CXX) -std=c++17 $(1) "$$d/t.cc" -o "$$d/t" >/dev/null 2>&1 && echo yes; rm -rf "$$d")
ifeq ($(origin SANITIZE),undefined)
SANITIZE := $(if $(call can,-fsanitize=address$(comma)undefined),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all)
endif

PROGRAMS := $(BUILD)/chunkflow $(BUILD)/hello $(BUILD)/hello_tree $(BUILD)/train_tiny $(BUILD)/train_cpu $(BUILD)/train_cpu_f64 $(BUILD)/make_tokens

# The pipeline of processes needs MPI (Debian: openmpi-bin libopenmpi-dev); all else works without it. CC compiles it.
MPICC ?= mpicc
MPI_COMPILE := OMPI_CC="$(CC)" MPICH_CC="$(CC)" $(MPICC)
ifeq ($(shell d=$$(mktemp -d) && echo 'int main(void) { return MPI_SUCCESS; }' >"$$d/t.c" && \
        $(MPI_COMPILE) -include mpi.h "$$d/t.c" -o "$$d/t" >/dev/null 2>&1 && echo yes; rm -rf "$$d"),yes)
MPI_PROGRAMS := $(BUILD)/pipeline_mpi $(BUILD)/pipeline_mpi_f64
MPI_TESTS    := $(addprefix $(BUILD)/test/,pipeline_mpi_f64 lockstep_mpi cp_groups_mpi)
PROGRAMS     += $(MPI_PROGRAMS)
endif

.PHONY: all wheel release demo pictures test test-cuda test-gpu unit fuzz plain-unit coverage mutants check-deep bench bench-clocks bench-dealing bench-gpu install uninstall test-torch shared bench-record gpu-programs gpu-record clean
all: $(PROGRAMS)

$(BUILD):
	mkdir -p $(BUILD)

# ---- the libraries ----
#
# They take longest to compile, so this happens once for all programs: with LINKED, a file that asks for an
# implementation, private to it or not, gets the declarations only and is linked with LIBRARY. tests/meta/compile.sh compiles
# them in every way that the headers offer.

LIBRARY := $(BUILD)/implementation.o
VISIBLE := extern __attribute__((visibility("default")))
LINKED  := -DCHUNKFLOW_IMPLEMENTED -DCHUNKFLOW_API=extern -DCHUNKFLOW_TUNE_IMPLEMENTED -DCHUNKFLOW_TUNE_API=extern

# As a shared library needs it, with nothing visible but the libraries' functions; programs run as fast with it.
$(LIBRARY): tests/implementation.c chunkflow.h tools/chunkflow_tune.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) -fPIC -fno-semantic-interposition -fvisibility=hidden \
	    '-DCHUNKFLOW_API=$(VISIBLE)' '-DCHUNKFLOW_TUNE_API=$(VISIBLE)' -c $< -o $@

# For other languages: the libraries, and the declarations of their functions without what they include, whole-number
# constants and comments kept (a comment says how long an array is).
SHARED  := $(BUILD)/libchunkflow.so $(BUILD)/libchunkflow.h

shared: $(SHARED)

$(BUILD)/libchunkflow.so: $(LIBRARY)
	$(CC) $(CFLAGS) -shared $(LDFLAGS) $< -o $@ $(LDLIBS)

$(BUILD)/libchunkflow.h: chunkflow.h tools/chunkflow_tune.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) -E -C -dD -DCHUNKFLOW_API=extern tools/chunkflow_tune.h >$@.all
	awk '/^# [0-9]/ { ours = /chunkflow(_tune)?\.h"/; next } \
	    /^#define C[A-Z_]* \(?-?[0-9]+\)?( |$$)/ { if (ours) { gsub(/[()]/, "", $$3); print $$1, $$2, $$3 } next } \
	    ours && !/^#/' $@.all >$@
	rm $@.all

# For pip, and for those who have no clone; CC=aarch64-linux-gnu-gcc makes one for arm64.
wheel: | $(BUILD)
	CC="$(CC)" $(PYTHON) -B tools/python/backend.py $(BUILD)

# ---- the command ----

TOOL_SOURCES := $(wildcard tools/command/*.c tools/report/*.c)
TOOL_HEADERS := chunkflow.h $(wildcard tools/*.h tools/command/*.h tools/report/*.h)

$(BUILD)/report_page.c: $(wildcard tools/report/*) | $(BUILD)
	awk -v at=tools/report -f tools/report/embed.awk tools/report/report.html.in >$@

# Object by object, each with the headers that the compiler has seen it read.
TOOL_NAMES   := $(TOOL_SOURCES:tools/%.c=%.o) report/report_page.o
TOOL_OBJECTS := $(addprefix $(BUILD)/,$(TOOL_NAMES))
TOOL_COMPILE  = $(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(CFLAGS) $(WARN) -MMD -MP -c $< -o $@

$(BUILD)/command $(BUILD)/report:
	mkdir -p $@

$(BUILD)/command/%.o: tools/command/%.c | $(BUILD)/command
	$(TOOL_COMPILE)

$(BUILD)/report/%.o: tools/report/%.c | $(BUILD)/report
	$(TOOL_COMPILE)

$(BUILD)/report/report_page.o: $(BUILD)/report_page.c | $(BUILD)/report
	$(TOOL_COMPILE)

-include $(TOOL_OBJECTS:.o=.d)

$(BUILD)/chunkflow: $(TOOL_OBJECTS) $(LIBRARY)
	$(CC) $(CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# ---- the playground: the command, compiled for a browser, in one page ----
#
# Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32 (the number is clang's).

WASM_CC      ?= clang --target=wasm32-wasi
WASM_BUILD   := $(BUILD)/wasm
WASM_LINK    := -lwasi-emulated-signal -Wl,--strip-all -Wl,--stack-first -Wl,-z,stack-size=4194304
WASM_NAMES   := $(filter-out command/workers.o,$(TOOL_NAMES)) playground/alone.o implementation.o
WASM_OBJECTS := $(addprefix $(WASM_BUILD)/,$(WASM_NAMES))
WASM_COMPILE  = $(WASM_CC) $(CSTD) $(CPPFLAGS) -include tools/playground/posix.h -O2 -MMD -MP -c $< -o $@
WASM_CAN      = $(shell d=$$(mktemp -d) && echo 'int main(void) { return 0; }' >"$$d/t.c" && \
    $(WASM_CC) -include tools/playground/posix.h "$$d/t.c" -o "$$d/t" $(WASM_LINK) >/dev/null 2>&1 && echo yes; rm -rf "$$d")

.PHONY: playground
ifneq ($(filter playground,$(MAKECMDGOALS))$(filter 1,$(FULL)),)
ifeq ($(WASM_CAN),yes)
playground: $(BUILD)/playground.html
	@echo "$<: open it in a browser"
else
playground:
	@echo "playground: skipped, because $(WASM_CC) links nothing (Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32)"
	@[ -z "$(STRICT_SKIPS)" ]
endif
endif

$(sort $(dir $(WASM_OBJECTS))):
	mkdir -p $@

$(WASM_BUILD)/implementation.o: tests/implementation.c | $(WASM_BUILD)/
	$(WASM_COMPILE) -DCHUNKFLOW_API=extern -DCHUNKFLOW_TUNE_API=extern

$(WASM_BUILD)/report/report_page.o: $(BUILD)/report_page.c | $(WASM_BUILD)/report/
	$(WASM_COMPILE) $(LINKED)

$(WASM_BUILD)/%.o: tools/%.c | $(sort $(dir $(WASM_OBJECTS)))
	$(WASM_COMPILE) $(LINKED)

-include $(WASM_OBJECTS:.o=.d)

$(WASM_BUILD)/command.wasm: $(WASM_OBJECTS)
	$(WASM_CC) $^ -o $@ $(WASM_LINK)

$(BUILD)/playground.html: $(WASM_BUILD)/command.wasm $(wildcard tools/playground/* tools/report/*)
	gzip -9nc $< | base64 >$<.base64
	awk -v program=$<.base64 -f tools/playground/assemble.awk tools/playground/playground.html.in >$@

# ---- examples ----

TRAIN_HEADERS := chunkflow.h tools/chunkflow_tune.h $(wildcard examples/*.h)
# For the trainer in float32, which is measured; in float64, and in processes, it is there to be right. gcc 12 with
# -funroll-loops on top of it halves the speed.
TRAIN_CFLAGS  := -O3

$(BUILD)/hello $(BUILD)/hello_tree $(BUILD)/train_tiny: $(BUILD)/%: examples/%.c $(LIBRARY) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(CFLAGS) $(WARN) $(LDFLAGS) $< $(LIBRARY) -o $@ $(LDLIBS)

$(BUILD)/train_cpu: examples/train_cpu.c $(LIBRARY) $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(CFLAGS) $(TRAIN_CFLAGS) $(OPENMP) $(WARN) $(LDFLAGS) \
	    $< $(LIBRARY) -o $@ $(LDLIBS)

$(BUILD)/train_cpu_f64: examples/train_cpu.c $(LIBRARY) $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(LINKED) -DTRAIN_FLOAT64 $(CFLAGS) $(OPENMP) $(WARN) $(LDFLAGS) \
	    $< $(LIBRARY) -o $@ $(LDLIBS)

$(BUILD)/make_tokens: examples/make_tokens.c examples/tokens.h examples/text.h examples/arguments.h examples/base.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

# Without OpenMP: every process is a thread of the pipeline already.
$(BUILD)/pipeline_mpi: examples/pipeline_mpi.c $(LIBRARY) $(TRAIN_HEADERS) | $(BUILD)
	$(MPI_COMPILE) $(CSTD) $(CPPFLAGS) $(LINKED) $(CFLAGS) $(WARN) $(LDFLAGS) $< $(LIBRARY) -o $@ $(LDLIBS)

$(BUILD)/pipeline_mpi_f64: examples/pipeline_mpi.c $(LIBRARY) $(TRAIN_HEADERS) | $(BUILD)
	$(MPI_COMPILE) $(CSTD) $(CPPFLAGS) $(LINKED) -DTRAIN_FLOAT64 $(CFLAGS) $(WARN) $(LDFLAGS) \
	    $< $(LIBRARY) -o $@ $(LDLIBS)

# The CUDA example for a device. Not one of the programs that `make` builds: nvcc takes a minute for each architecture.
NVCC      ?= $(or $(shell command -v nvcc 2>/dev/null),/usr/local/cuda/bin/nvcc)
# Devices of 10.0 and later take the PTX: made from compute_90 it spills nowhere there (tests/cuda/cuda_compile.sh).
CUDA_ARCH ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=compute_90

$(BUILD)/executor_cuda: examples/executor_cuda.cu chunkflow_cuda.cu $(TRAIN_HEADERS) | $(BUILD)
	$(NVCC) -O3 -std=c++17 $(CUDA_ARCH) -I. $(if $(NCCL),-DCHUNKFLOW_NCCL) examples/executor_cuda.cu chunkflow_cuda.cu \
	    -lcublas $(if $(NCCL),-lnccl) -o $@

# The trainer of real model shapes; Hugging Face's files are read with the command's own readers.
TRAIN_CUDA_SOURCES := $(addprefix tools/command/,config_json.c json_read.c cli.c cli_files.c progress.c)

$(BUILD)/train_cuda: examples/train_cuda.cu chunkflow_cuda.cu $(TRAIN_CUDA_SOURCES) $(TRAIN_HEADERS) $(TOOL_HEADERS) | $(BUILD)
	$(NVCC) -O3 -std=c++17 $(CUDA_ARCH) -I. $(if $(CUDNN),-DTRAIN_CUDNN) examples/train_cuda.cu chunkflow_cuda.cu \
	    $(TRAIN_CUDA_SOURCES) -lcublas -lcublasLt $(if $(CUDNN),-lcudnn -lnvrtc) -o $@

# Threads that spin while they wait are slow on a busy machine; results are the same either way.
demo: $(BUILD)/train_cpu $(BUILD)/train_cpu_f64
	OMP_WAIT_POLICY=passive $(BUILD)/train_cpu --demo
	OMP_WAIT_POLICY=passive $(BUILD)/train_cpu_f64 --check --batch 16 --chunk-size 256 --k 2
	@printf '%s\n' '' 'Next:' \
	    '  the loop of a trainer, in 40 lines   examples/hello.c' \
	    '  what chunks are worth for your data  make && build/chunkflow tune LENGTHS --model qwen2.5-7b --gpu h100-80g --gpus 8' \
	    '  PyTorch                              tools/python/README.md'

# Committed, and compared by tests/command/report_check.sh.
pictures: $(BUILD)/chunkflow
	sh tools/guide/pictures.sh $< tools/guide

# ---- tests ----
#
# Each suite ends with "N passed, N failed"; tests/run.sh adds them up. The unit tests, the command and the trainer are
# built with sanitizers where the compiler has them. Programs and scripts read FULL from the environment, where make puts
# what its command line says.

TEST_BUILD   := $(BUILD)/test
# -g1 is lines without variables: enough for what a sanitizer prints, and a third less to compile.
TEST_CFLAGS  := -g1 -O1 -DCHUNKFLOW_TESTED $(SANITIZE)
TEST_LIBRARY := $(TEST_BUILD)/implementation.o
# What is compiled longer than it runs: not optimised, and AddressSanitizer's checks are calls, which is gcc's option or
# clang's. They are the same checks; with both, compiling takes half as long.
THRESHOLD    := asan-instrumentation-with-call-threshold=0
as_calls      = $(if $(SANITIZE),$(if $(call $(1),-Werror $(SANITIZE) --param $(THRESHOLD)),--param $(THRESHOLD),$\
                $(if $(call $(1),-Werror $(SANITIZE) -mllvm -$(THRESHOLD)),-mllvm -$(THRESHOLD))))
AS_CALLS     := $(call as_calls,can)
TEST_LIGHT    = -g1 $(if $(SANITIZE),-O0,-O1) $(AS_CALLS) -DCHUNKFLOW_TESTED $(SANITIZE)
TEST_SOURCES := $(wildcard tests/unit/*.c tests/reference/*.c) tests/implementation.c
# What the tools have of the library's kind: tested as the library is.
KIN_SOURCES  := $(addprefix tools/command/,graph_dot.c idle.c schedule_csv.c schedule_new.c text_out.c)
KIN_OBJECTS  := $(KIN_SOURCES:tools/command/%.c=$(TEST_BUILD)/command/%.o)
TEST_OBJECTS := $(addprefix $(TEST_BUILD)/,$(notdir $(TEST_SOURCES:.c=.o))) $(KIN_OBJECTS)
TEST_HEADERS := chunkflow.h tools/chunkflow_tune.h $(KIN_SOURCES:.c=.h) $(wildcard tests/*.h tests/reference/*.h)

$(TEST_BUILD):
	mkdir -p $@

$(TEST_BUILD)/%.o: tests/unit/%.c $(TEST_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) -c $< -o $@

$(TEST_BUILD)/%.o: tests/reference/%.c $(TEST_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) -c $< -o $@

$(TEST_BUILD)/%.o: tests/%.c $(TEST_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) -c $< -o $@

# All members and arguments that the declarations have, for the test that tries each of them.
$(TEST_BUILD)/members.h: $(BUILD)/libchunkflow.h tests/unit/members.awk | $(TEST_BUILD)
	awk -f tests/unit/members.awk $< >$@

$(TEST_BUILD)/test_boundaries.o: override CPPFLAGS += -I$(TEST_BUILD)
$(TEST_BUILD)/test_boundaries.o: $(TEST_BUILD)/members.h

# What the library is compared with takes most of the time. It is optimised, and its own arithmetic is not watched; what it
# reads of the library's results is.
TEST_REFERENCES := $(addprefix $(TEST_BUILD)/,exact.o forest.o naive.o oracle.o pipeline.o problem.o steps.o)
TEST_OPTIMISED  := $(addprefix $(TEST_BUILD)/,test_metadata.o test_schedule.o)
$(TEST_REFERENCES): TEST_CFLAGS = -g1 -O2 $(subst address$(comma)undefined,address,$(SANITIZE))
$(TEST_OPTIMISED): TEST_CFLAGS = -g1 -O2 $(SANITIZE)
TEST_HEAVY      := $(TEST_REFERENCES) $(TEST_OPTIMISED) $(TEST_BUILD)/random_schedule.o $(KIN_OBJECTS) $(TEST_LIBRARY)
$(filter-out $(TEST_HEAVY),$(TEST_OBJECTS)): TEST_CFLAGS = $(TEST_LIGHT)

$(TEST_BUILD)/unit: $(TEST_OBJECTS)
	$(CC) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

TRAINER_TESTS := $(addprefix $(TEST_BUILD)/,trainer trainer_kinds)
$(TRAINER_TESTS): private TEST_CFLAGS = -g1 -Og -DCHUNKFLOW_TESTED $(SANITIZE)
$(TRAINER_TESTS): $(TEST_BUILD)/%: tests/trainer/test_%.c $(TEST_LIBRARY) tests/harness.h tests/trainer/world.h $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $< $(TEST_LIBRARY) -o $@ $(LDLIBS)

# It calls the trainer, and has nothing of it.
$(TEST_BUILD)/trainer_whole: tests/trainer/test_trainer_whole.c $(LIBRARY) tests/harness.h $(BUILD)/train_cpu_f64 | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(CFLAGS) -O0 $(WARN) $(LDFLAGS) $< $(LIBRARY) -o $@ $(LDLIBS)

# In float32, what $(TEST_BUILD)/trainer runs in float64: it counts bytes, and has sanitizers only with FULL=1.
TRAINER_MODEL := $(TEST_BUILD)/trainer_model$(if $(filter 1,$(FULL)),_watched)

$(TEST_BUILD)/trainer_model: tests/trainer/test_trainer_model.c $(LIBRARY) tests/harness.h $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) -O1 $(WARN) $(LDFLAGS) $< $(LIBRARY) -o $@ $(LDLIBS)

$(TEST_BUILD)/trainer_model_watched: tests/trainer/test_trainer_model.c $(TEST_LIBRARY) tests/harness.h $(TRAIN_HEADERS)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $< $(TEST_LIBRARY) -o $@ $(LDLIBS)

# The command, object by object; what it has of the library's kind, as the library.
TOOL_TEST_OBJECTS := $(addprefix $(TEST_BUILD)/,$(TOOL_NAMES))
TOOL_TEST_COMPILE  = $(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(TEST_CFLAGS) $(WARN) -MMD -MP -c $< -o $@
$(filter-out $(KIN_OBJECTS),$(TOOL_TEST_OBJECTS)): TEST_CFLAGS = $(TEST_LIGHT)
$(TEST_BUILD)/pipeline_mpi_f64: private TEST_CFLAGS = $(TEST_LIGHT)

$(TEST_BUILD)/command $(TEST_BUILD)/report:
	mkdir -p $@

$(TEST_BUILD)/command/%.o: tools/command/%.c | $(TEST_BUILD)/command
	$(TOOL_TEST_COMPILE)

$(TEST_BUILD)/report/%.o: tools/report/%.c | $(TEST_BUILD)/report
	$(TOOL_TEST_COMPILE)

$(TEST_BUILD)/report/report_page.o: $(BUILD)/report_page.c | $(TEST_BUILD)/report
	$(TOOL_TEST_COMPILE)

-include $(TOOL_TEST_OBJECTS:.o=.d)

$(TEST_BUILD)/chunkflow: $(TOOL_TEST_OBJECTS) $(TEST_LIBRARY)
	$(CC) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# The command's readers, with which the trainers read Hugging Face's files and which the fuzz targets share.
FILE_OBJECTS   := $(addprefix $(TEST_BUILD)/command/,json_read.o cli.o cli_files.o progress.o)
READER_SOURCES := $(addprefix tools/command/,config_json.c json_read.c progress.c saved.c)
READER_OBJECTS := $(READER_SOURCES:tools/command/%.c=$(TEST_BUILD)/command/%.o)

$(TEST_BUILD)/trainer_tensors: tests/trainer/test_trainer_tensors.c $(FILE_OBJECTS) $(TEST_LIBRARY) $(TRAIN_HEADERS) $(TOOL_HEADERS)
	$(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

$(TEST_BUILD)/train_tiny: examples/train_tiny.c $(TEST_LIBRARY)
	$(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $^ -o $@ $(LDLIBS)

$(TEST_BUILD)/make_tokens: examples/make_tokens.c $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(TEST_BUILD)/pipeline_mpi_f64: examples/pipeline_mpi.c $(TEST_LIBRARY) $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(MPI_COMPILE) $(CSTD) $(CPPFLAGS) $(LINKED) -DTRAIN_FLOAT64 $(TEST_CFLAGS) $(WARN) $(LDFLAGS) \
	    $< $(TEST_LIBRARY) -o $@ $(LDLIBS)

$(TEST_BUILD)/lockstep_mpi $(TEST_BUILD)/cp_groups_mpi: $(TEST_BUILD)/%: tests/trainer/%.c tests/trainer/ranks_mpi.h $(TEST_LIBRARY) $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(MPI_COMPILE) $(CSTD) $(CPPFLAGS) -D_POSIX_C_SOURCE=200809L $(LINKED) $(TEST_CFLAGS) $(WARN) $(LDFLAGS) \
	    $< $(TEST_LIBRARY) -o $@ $(LDLIBS)

# What the library does with seeded inputs, written down: for comparing two versions of it. Part of no test run.
$(BUILD)/record: tests/meta/record.c $(LIBRARY) chunkflow.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(LINKED) $(CFLAGS) $(WARN) $(LDFLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

# Suites that do nothing but search for schedules and compare numbers take four times as long with sanitizers. They are
# a program of their own, without; "best" and others run the same search with them.
SEARCH_SOURCES := $(addprefix tests/unit/,main.c test_best.c test_bounds.c test_known.c) \
                  $(addprefix tests/reference/,exact.c forest.c naive.c oracle.c pipeline.c problem.c random_schedule.c \
                  steps.c suite.c)

$(TEST_BUILD)/search: $(SEARCH_SOURCES) $(LIBRARY) $(TEST_HEADERS) | $(TEST_BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) '-DSUITES(X)=X(search) X(many_bounds) X(known)' $(CFLAGS) $(WARN) $(LDFLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

# The unit tests alone; UNIT names a substring of the tests to run, in whichever of the two programs they are.
unit: $(TEST_BUILD)/unit $(TEST_BUILD)/search
ifdef UNIT
	@for program in unit search; do \
	    if $(TEST_BUILD)/$$program --list | grep -qF -e "$(UNIT)"; then \
	        $(TEST_BUILD)/$$program "$(UNIT)" || exit 1; chosen=yes; fi; \
	done; [ -n "$$chosen" ] || { echo "no test is named like '$(UNIT)'"; exit 1; }
else
	sh tests/run.sh "$(TEST_BUILD)/unit" "$(TEST_BUILD)/search"
endif

# Branches of the header as gcc counts them without optimisation, and the least share that passes. In a build of its own,
# without sanitizers: gcov counts their branches, too.
COVERAGE_FLOOR ?= 99.0
COVERAGE_BUILD := $(BUILD)/coverage

ifdef COVERAGE
$(TEST_LIBRARY): TEST_CFLAGS = -O0 --coverage -DCHUNKFLOW_COVERAGE
endif

plain-unit:
	$(MAKE) --no-print-directory BUILD=$(COVERAGE_BUILD) CC=gcc SANITIZE= COVERAGE=1 LDFLAGS="$(LDFLAGS) --coverage" \
	    $(COVERAGE_BUILD)/test/unit

coverage: plain-unit
	rm -f $(COVERAGE_BUILD)/test/implementation.gcda
	$(COVERAGE_BUILD)/test/unit >$(COVERAGE_BUILD)/log || { cat $(COVERAGE_BUILD)/log; exit 1; }
	$(PYTHON) tests/meta/coverage.py $(COVERAGE_BUILD)/test/implementation.o --floor $(COVERAGE_FLOOR) $(if $(LIST),--list)

# SECTIONS: other sections of the header than tests/meta/mutants.py has; OF: tools or examples; SEED: other mutants; SLOW:
# seconds of the slowest test.
N    ?= 200
SEED ?= 1
SLOW ?= 1

mutants: plain-unit
	CC=gcc $(PYTHON) tests/meta/mutants.py $(COVERAGE_BUILD) --n $(N) --seed $(SEED) --slow $(SLOW) \
	    $(if $(SECTIONS),--sections $(SECTIONS)) $(if $(OF),--of $(OF))

# PARTS: which of them, see tests/meta/deep_check.sh.
check-deep: plain-unit
	sh tests/meta/deep_check.sh $(COVERAGE_BUILD) $(PARTS)

# Fuzz targets. Without libFuzzer the program replays the corpus, as part of `make test`; with it, it is a program of its
# own, in which everything is compiled for it. What it finds is put into $(BUILD)/fuzz.
FUZZ_SOURCES := $(wildcard tests/fuzz/*.c)
FUZZ_HEADERS := $(TEST_HEADERS) $(TOOL_HEADERS) $(TRAIN_HEADERS) tests/fuzz/fuzz.h
FUZZ_JUDGES  := $(addprefix tests/reference/,exact.c naive.c oracle.c pipeline.c steps.c)
FUZZ_FLAGS   := -g1 -O2 -DFUZZ_LIBFUZZER -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all
MINUTES      ?= 9

$(TEST_BUILD)/fuzz: $(FUZZ_SOURCES) $(KIN_OBJECTS) $(READER_OBJECTS) $(TEST_REFERENCES) $(TEST_LIBRARY) $(FUZZ_HEADERS)
	$(CC) $(CSTD) $(CPPFLAGS) $(TEST_LIGHT) $(WARN) $(LDFLAGS) $(filter %.c %.o,$^) -o $@ $(LDLIBS)

# Without trace-cmp, which -fsanitize=fuzzer would add and with which the targets that draw their problems from bytes take
# three times as long and find no more.
$(BUILD)/fuzz/fuzz: $(FUZZ_SOURCES) $(FUZZ_JUDGES) $(KIN_SOURCES) $(READER_SOURCES) tests/implementation.c $(FUZZ_HEADERS)
	mkdir -p $(@D)
	clang $(CSTD) $(CPPFLAGS) $(FUZZ_FLAGS) -fsanitize=fuzzer -fno-sanitize-coverage=trace-cmp $(WARN) \
	    $(filter %.c,$^) -o $@ $(LDLIBS)

fuzz: $(BUILD)/fuzz/fuzz
	sh tests/fuzz/run.sh $(BUILD)/fuzz $(MINUTES)

# The CUDA file as C++ against tests/emulation: every kernel runs on the host. test_device.cu is for a device.
CUDA_BUILD    := $(BUILD)/cuda
CUDA_CXXFLAGS := -std=c++17 -DCHUNKFLOW_CUDA_EMULATION -DCHUNKFLOW_NCCL -Itests/emulation $(CPPFLAGS) $(LINKED) $(WARN)
# What is compiled with the CUDA file to try it, tests and examples, looks for all undefined behaviour with FULL=1 only, else
# for signed overflow alone, at which a program just stops: with all of it these take twice as long to compile. The CUDA file
# itself always has all sanitizers.
CUDA_SANITIZE := $(if $(filter 1,$(FULL)),$(SANITIZE),$(subst address$(comma)undefined,$\
                 address$(comma)signed-integer-overflow -fsanitize-undefined-trap-on-error,$(SANITIZE)))
# What runs longest and is no part of what is tested is optimised: the emulated processor and the reference without
# sanitizers, what moves memory for them with those that watch memory. They come last when linking, so that templates are
# taken from files that have all of them.
CUDA_PLAIN    := $(addprefix $(CUDA_BUILD)/,cuda_emu.cc.o reference.cc.o)
$(CUDA_PLAIN): TEST_CFLAGS = -g1 -O3 $(if $(findstring address,$(SANITIZE)),-DEMU_ASAN=1)
CUDA_WATCHED  := $(addprefix $(CUDA_BUILD)/,cublas_emu.cc.o nccl_emu.cc.o runtime_emu.cc.o device.cc.o)
$(CUDA_WATCHED): TEST_CFLAGS = -g1 -O1 $(subst address$(comma)undefined,address,$(SANITIZE))
# What is compiled longer than it runs: the tests themselves. Of the kernels' time, most is the emulated processor's, so
# that they are optimised but need no checks in line.
CUDA_TEST     := $(patsubst tests/cuda/%,$(CUDA_BUILD)/%.o,$(wildcard tests/cuda/test_*.cc) tests/cuda/main.cc)
CUDA_PROGRAMS := $(addprefix $(CUDA_BUILD)/,executor_emulated.o train_cuda_emulated.o bench_emulated.o)
CUDA_AS_CALLS := $(call as_calls,can_cxx)
$(CUDA_TEST): TEST_CFLAGS = -g1 -O0 $(CUDA_AS_CALLS) $(CUDA_SANITIZE)
# -Og compiles these in a little more than half the time of -O1, and they run as fast.
$(CUDA_PROGRAMS): TEST_CFLAGS = -g1 -Og -DCHUNKFLOW_TESTED $(CUDA_AS_CALLS) $(CUDA_SANITIZE)
$(CUDA_BUILD)/chunkflow_cuda.cu.o: TEST_CFLAGS = -g1 -Og -DCHUNKFLOW_TESTED $(SANITIZE) $(CUDA_AS_CALLS)
# With other sanitizers these are made anew.
$(CUDA_PROGRAMS) $(CUDA_TEST): $(CUDA_BUILD)/sanitizers
# The header, which has tests of its own with sanitizers, takes a fifth of the executor's time with them: FULL=1 only.
CUDA_LIBRARY  := $(if $(filter 1,$(FULL)),$(TEST_LIBRARY),$(LIBRARY))
CUDA_OBJECTS  := $(CUDA_BUILD)/chunkflow_cuda.cu.o $(CUDA_TEST) $(CUDA_WATCHED) $(CUDA_PLAIN) $(CUDA_LIBRARY)
CUDA_HEADERS  := chunkflow.h tools/chunkflow_tune.h $(CUDA_BUILD)/declarations tests/harness.h $(wildcard tests/cuda/*.h tests/emulation/*.h)
vpath %.cc tests/cuda tests/emulation

$(CUDA_BUILD):
	mkdir -p $@

.PHONY: same_sanitizers
$(CUDA_BUILD)/sanitizers: same_sanitizers | $(CUDA_BUILD)
	@echo '$(CUDA_SANITIZE)' | cmp -s - $@ || echo '$(CUDA_SANITIZE)' >$@

# The companion's declarations are a file of their own here, which is touched only when they change: an edit of a kernel
# compiles no test anew.
$(CUDA_BUILD)/declarations: chunkflow_cuda.cu | $(CUDA_BUILD)
	@sed '/^#endif .* CHUNKFLOW_CUDA_H /q' $< | cmp -s - $@ || sed '/^#endif .* CHUNKFLOW_CUDA_H /q' $< >$@

$(CUDA_BUILD)/device_section.h: chunkflow_cuda.cu tests/cuda/device_section.sh | $(CUDA_BUILD)
	sh tests/cuda/device_section.sh >$@

$(CUDA_BUILD)/test_primitives.cc.o: CUDA_CXXFLAGS += -I$(CUDA_BUILD) -Wno-unused-function
$(CUDA_BUILD)/test_primitives.cc.o: $(CUDA_BUILD)/device_section.h

$(CUDA_BUILD)/%.cc.o: %.cc $(CUDA_HEADERS) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) $(TEST_CFLAGS) -c $< -o $@

$(CUDA_BUILD)/%.cu.o: %.cu $(CUDA_HEADERS) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) $(TEST_CFLAGS) -x c++ -c $< -o $@

$(CUDA_BUILD)/tests: $(CUDA_OBJECTS)
	$(CXX) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# The CUDA example under the emulation: executor_emulated.cc includes it and calls its main.
CUDA_EXAMPLE := $(addprefix $(CUDA_BUILD)/,executor_emulated.o chunkflow_cuda.cu.o nccl_emu.cc.o runtime_emu.cc.o \
                cublas_emu.cc.o cuda_emu.cc.o) $(CUDA_LIBRARY)

$(CUDA_BUILD)/executor_emulated.o: tests/cuda/executor_emulated.cc examples/executor_cuda.cu $(TRAIN_HEADERS) \
                                   $(CUDA_BUILD)/declarations $(wildcard tests/emulation/*.h) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) $(TEST_CFLAGS) -c $< -o $@

$(CUDA_BUILD)/executor_cuda: $(CUDA_EXAMPLE)
	$(CXX) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# And the trainer of real model shapes, by train_cuda_emulated.cc; it multiplies with cuBLASLt.
$(CUDA_BUILD)/train_cuda_emulated.o: tests/cuda/train_cuda_emulated.cc examples/train_cuda.cu $(TRAIN_HEADERS) \
                                     $(TOOL_HEADERS) $(CUDA_BUILD)/declarations $(wildcard tests/emulation/*.h) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) $(TEST_CFLAGS) -c $< -o $@

$(CUDA_BUILD)/train_cuda: $(CUDA_BUILD)/train_cuda_emulated.o $(CUDA_BUILD)/cublaslt_emu.cc.o \
                          $(TEST_BUILD)/command/config_json.o $(FILE_OBJECTS) \
                          $(filter-out %/executor_emulated.o,$(CUDA_EXAMPLE))
	$(CXX) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# So does bench_emulated.cc with the benchmark, for tests/cuda/cuda_record.sh.
$(CUDA_BUILD)/bench_emulated.o: tests/cuda/bench_emulated.cc tools/bench/bench_attention.cu chunkflow.h \
                                $(CUDA_BUILD)/declarations $(wildcard tests/emulation/*.h) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) $(TEST_CFLAGS) -c $< -o $@

$(CUDA_BUILD)/bench_attention: $(CUDA_BUILD)/bench_emulated.o $(filter-out %/executor_emulated.o,$(CUDA_EXAMPLE))
	$(CXX) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# How much memory the executor lays out; part of no test run.
$(CUDA_BUILD)/bench_arena: tools/bench/bench_arena.cc $(filter-out %/executor_emulated.o,$(CUDA_EXAMPLE))
	$(CXX) $(CUDA_CXXFLAGS) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# What runs on a device: tests, benchmark, examples and command, and the library that the rival's Python loads, in one
# folder that can be carried to it. chunkflow_cuda.cu is compiled once, for the device that is lent (GPU_ARCH names another
# one), with the variants of its kernels that are there to be measured.
GPU_BUILD    := $(BUILD)/gpu
GPU_PROGRAMS := $(addprefix $(GPU_BUILD)/,cuda_tests bench_attention bench_free executor_cuda train_cuda chunkflow commit) \
                $(SHARED:$(BUILD)/%=$(GPU_BUILD)/%)
GPU_ARCH     ?= -gencode arch=compute_90a,code=sm_90a
GPU_COMPILE   = $(NVCC) -O3 -std=c++17 $(GPU_ARCH) -DCHUNKFLOW_CUDA_VARIANTS -I.
GPU_TESTS    := $(addprefix $(GPU_BUILD)/,main.o test_primitives.o device.o reference.o test_attention.o test_wgmma.o \
                test_state.o test_blocks.o test_executor.o test_outputs.o test_device.o)

gpu-programs: $(GPU_PROGRAMS)

$(GPU_BUILD):
	mkdir -p $@

$(GPU_BUILD)/chunkflow_cuda.o: chunkflow_cuda.cu chunkflow.h | $(GPU_BUILD)
	$(GPU_COMPILE) -c $< -o $@

$(GPU_BUILD)/device_section.h: chunkflow_cuda.cu tests/cuda/device_section.sh | $(GPU_BUILD)
	sh tests/cuda/device_section.sh >$@

$(GPU_BUILD)/%.o: tests/cuda/%.cc $(CUDA_HEADERS) $(GPU_BUILD)/device_section.h
	$(GPU_COMPILE) -I$(GPU_BUILD) -x cu -c $< -o $@

$(GPU_BUILD)/%.o: tests/cuda/%.cu $(CUDA_HEADERS) | $(GPU_BUILD)
	$(GPU_COMPILE) -c $< -o $@

$(GPU_BUILD)/cuda_tests: $(GPU_TESTS) $(GPU_BUILD)/chunkflow_cuda.o
	$(GPU_COMPILE) $^ -lcublas -o $@

$(GPU_BUILD)/bench_attention: tools/bench/bench_attention.cu $(GPU_BUILD)/chunkflow_cuda.o
	$(GPU_COMPILE) $^ -lcublas -o $@

# The same without the order point of path 3's loops, whose price only a device tells.
$(GPU_BUILD)/chunkflow_free.cu: chunkflow_cuda.cu | $(GPU_BUILD)
	sed 's/^\( *\)keep_order();/\1;/' $< >$@

$(GPU_BUILD)/bench_free: tools/bench/bench_attention.cu $(GPU_BUILD)/chunkflow_free.cu
	$(GPU_COMPILE) $^ -lcublas -o $@

$(GPU_BUILD)/executor_cuda: examples/executor_cuda.cu $(GPU_BUILD)/chunkflow_cuda.o $(TRAIN_HEADERS)
	$(GPU_COMPILE) $< $(GPU_BUILD)/chunkflow_cuda.o -lcublas -o $@

$(GPU_BUILD)/train_cuda: examples/train_cuda.cu $(GPU_BUILD)/chunkflow_cuda.o $(TRAIN_CUDA_SOURCES) $(TRAIN_HEADERS) $(TOOL_HEADERS)
	$(GPU_COMPILE) $< $(GPU_BUILD)/chunkflow_cuda.o $(TRAIN_CUDA_SOURCES) -lcublas -lcublasLt -o $@

$(GPU_BUILD)/chunkflow $(SHARED:$(BUILD)/%=$(GPU_BUILD)/%): $(GPU_BUILD)/%: $(BUILD)/% | $(GPU_BUILD)
	cp $< $@

.PHONY: $(GPU_BUILD)/commit
$(GPU_BUILD)/commit: | $(GPU_BUILD)
	commit=$$(git describe --always --dirty --abbrev=12 2>/dev/null) && echo "$$commit" >$@ || [ -s $@ ] || echo unknown >$@

# The same programs for a CPU: nvcc leaves PTX in them, and tests/ptx, which they are linked with in place of the CUDA
# runtime, runs it. What has no kernels is compiled without nvcc.
PTX_BUILD    := $(BUILD)/ptx
PTX_NVCC     := $(realpath $(shell command -v $(NVCC) 2>/dev/null))
PTX_CODE     := --no-compress -gencode arch=compute_80,code=compute_80 -gencode arch=compute_90a,code=compute_90a
PTX_COMPILE   = $(PTX_NVCC) -std=c++17 $(PTX_CODE) -DCHUNKFLOW_CUDA_VARIANTS -I. -I$(PTX_BUILD)
PTX_CXX       = $(CXX) -std=c++17 -I. -isystem $(patsubst %/bin/nvcc,%/include,$(PTX_NVCC)) $(WARN)
# The reference's sums may be added in any order.
PTX_FAST     := -O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math
PTX_MACHINE  := $(addprefix $(PTX_BUILD)/,arithmetic.o async.o blas.o cuda.o memory.o read.o run.o)
PTX_HOST     := $(addprefix $(PTX_BUILD)/,main.t device.t reference.t test_attention.t test_wgmma.t test_state.t test_blocks.t test_outputs.t)
PTX_KERNELS  := $(addprefix $(PTX_BUILD)/,chunkflow_cuda.k test_primitives.k test_executor.k)
PTX_EXAMPLES := $(addprefix $(PTX_BUILD)/,executor_cuda train_cuda)
PTX_ALL      := $(addprefix $(PTX_BUILD)/,primitives cuda_tests) $(PTX_EXAMPLES)

$(PTX_BUILD):
	mkdir -p $@

$(PTX_MACHINE) $(PTX_BUILD)/test_ptx.o: $(PTX_BUILD)/%.o: tests/ptx/%.cc $(wildcard tests/ptx/*.h) tests/harness.h | $(PTX_BUILD)
	$(PTX_CXX) $(if $(filter %/test_ptx.o,$@),-O0,-O2) -g1 -march=native -ffp-contract=off -c $< -o $@

$(PTX_HOST): $(PTX_BUILD)/%.t: tests/cuda/%.cc $(CUDA_HEADERS) | $(PTX_BUILD)
	$(PTX_CXX) $(if $(filter %/reference.t,$@),$(PTX_FAST),-O1) -g1 -DCHUNKFLOW_PTX -DCHUNKFLOW_CUDA_VARIANTS -c $< -o $@

$(PTX_BUILD)/device_section.h: chunkflow_cuda.cu tests/cuda/device_section.sh | $(PTX_BUILD)
	sh tests/cuda/device_section.sh >$@

$(PTX_BUILD)/chunkflow_cuda.k: chunkflow_cuda.cu chunkflow.h | $(PTX_BUILD)
	$(PTX_COMPILE) -O3 -c $< -o $@

$(PTX_BUILD)/test_primitives.k $(PTX_BUILD)/test_executor.k: $(PTX_BUILD)/%.k: tests/cuda/%.cc $(CUDA_HEADERS) $(PTX_BUILD)/device_section.h
	$(PTX_COMPILE) -O3 -x cu -c $< -o $@

$(PTX_EXAMPLES:=.k): $(PTX_BUILD)/%.k: examples/%.cu $(TRAIN_HEADERS) $(TOOL_HEADERS) | $(PTX_BUILD)
	$(PTX_COMPILE) -O3 -c $< -o $@

$(PTX_BUILD)/primitives: tests/ptx/main.cc $(PTX_BUILD)/test_ptx.o $(PTX_BUILD)/test_primitives.k $(filter-out %/blas.o,$(PTX_MACHINE))
	$(PTX_CXX) -O1 $^ -o $@

$(PTX_BUILD)/cuda_tests: $(PTX_HOST) $(PTX_KERNELS) $(PTX_MACHINE)
	$(CXX) $^ -o $@

$(PTX_BUILD)/executor_cuda: $(PTX_BUILD)/executor_cuda.k $(PTX_BUILD)/chunkflow_cuda.k $(PTX_MACHINE)
	$(CXX) $^ -o $@

$(PTX_BUILD)/train_cuda: $(PTX_BUILD)/train_cuda.k $(PTX_BUILD)/chunkflow_cuda.k $(PTX_MACHINE) $(TRAIN_CUDA_SOURCES:tools/%.c=$(BUILD)/%.o)
	$(CXX) $^ -o $@

# What `make test` runs of it.
ifneq ($(and $(PTX_NVCC),$(filter yes,$(call can_cxx))),)
PTX_TESTS := $(PTX_BUILD)/primitives
PTX_SUITE := "sh tests/ptx/ptx_check.sh primitives"
else
PTX_SUITE := "echo 'no nvcc: compiled kernels are not run'; echo '0 passed, 0 failed, 1 skipped'"
endif

# Those that take longest come first.
PTX_SUITES := kernels attention blocks train_cuda executor_cuda executor outputs state wgmma faults coverage primitives entries

PTX_UNKNOWN := $(filter-out 80 86 90,$(ARCH)) $(filter-out $(PTX_SUITES),$(SUITE))
ifneq ($(and $(filter test-ptx,$(MAKECMDGOALS)),$(strip $(PTX_UNKNOWN))),)
$(error test-ptx: no $(strip $(PTX_UNKNOWN)): ARCH is 80, 86 or 90; SUITE is one of $(PTX_SUITES))
endif

.PHONY: test-ptx
test-ptx: $(if $(PTX_TESTS),$(PTX_ALL))
	rm -rf $(PTX_BUILD)/ran $(if $(SUITE),,&& mkdir -p $(PTX_BUILD)/ran)
	NVCC="$(PTX_NVCC)" BUILD="$(BUILD)" ARCH="$(ARCH)" sh tests/run.sh \
	    $(if $(PTX_TESTS),$(foreach suite,$(or $(SUITE),$(PTX_SUITES)),"sh tests/ptx/ptx_check.sh $(suite)"),$(PTX_SUITE))

# Only with a C++ compiler; without one the suite counts as skipped.
ifeq ($(call can_cxx),yes)
CUDA_TESTS := $(addprefix $(CUDA_BUILD)/,tests executor_cuda bench_attention train_cuda)
CUDA_SUITE := "$(CUDA_BUILD)/tests"
# All that is asked of the one fused path, of the other.
ifeq ($(FULL),1)
CUDA_SUITE += "env CHUNKFLOW_TEST_WGMMA=1 $(CUDA_BUILD)/tests attention. blocks."
endif
else
CUDA_SUITE := "echo 'no C++ compiler: the CUDA file is not tested'; echo '0 passed, 0 failed, 1 skipped'"
endif

test-cuda: $(CUDA_BUILD)/tests $(CUDA_BUILD)/executor_cuda $(CUDA_BUILD)/bench_attention $(CUDA_BUILD)/train_cuda $(TEST_BUILD)/make_tokens $(TEST_BUILD)/chunkflow
	CC="$(CC)" BUILD="$(BUILD)" sh tests/run.sh "$(CUDA_BUILD)/tests" "sh tests/cuda/executor_check.sh" "sh tests/cuda/train_cuda_check.sh" \
	    "sh tests/cuda/cuda_record.sh" "sh tests/cuda/cuda_compile.sh"

# PyTorch from the package index that pip knows, with all that it asks for: the libraries of its GPU build are linked, so
# it does not start without them. torchtitan asks for older data sets than TRL, and the test uses neither's.
TORCH_PACKAGE ?= torch==2.15.0 transformers==5.23.0 trl==1.16.0 peft==0.21.2 numpy==2.4.6 cffi==2.1.1 tyro==1.0.17 \
                 einops==0.8.2
TORCH_ALONE   ?= torchtitan==0.3.0 spmd_types==0.2.3
TORCH_SUITES  := judge families training lockstep microbatches wheel lengths

test-torch: $(BUILD)/chunkflow $(SHARED)
	@python=$$(sh tests/torch/environment.sh "$(PYTHON)" "$(TORCH_PACKAGE)" "$(TORCH_ALONE)") && \
	export OMP_NUM_THREADS=1 CHUNKFLOW_BUILD=$(BUILD) PYTHON="$$python" BUILD="$(BUILD)" && \
	sh tests/run.sh $(foreach test,$(TORCH_SUITES),"$$python -B tests/torch/$(test).py") \
	    $(foreach test,check counts pipelines titan,"$$python -B tests/torch/$(test).py $(abspath $(BUILD))/chunkflow") \
	    "sh tests/cuda/train_paper_check.sh rival" "sh tests/cuda/cudnn_check.sh"

test-gpu: $(TEST_BUILD)/chunkflow
	BUILD="$(BUILD)" JOBS=1 sh tests/run.sh "sh tests/cuda/cuda_device.sh" "sh tests/cuda/executor_check.sh device"

# What the scripts start hundreds of times: with sanitizers starting it takes ten times as long, a third of that for the
# search for leaks at the end. cli.transcript has them where what is read may be wrong, files_check.sh for each command with all
# that it writes; all have them with FULL=1.
CLI := CHUNKFLOW_PLAIN=$(BUILD)/chunkflow CHUNKFLOW=$(if $(filter 1,$(FULL)),$(TEST_BUILD),$(BUILD))/chunkflow

# What takes longest comes first, so that at the end no processor waits for the other one. The pipeline of processes in
# float32 is built and tried with FULL=1 only: it is the program in float64 with another type.
test: $(CUDA_TESTS) $(PTX_TESTS) $(if $(filter 1,$(FULL)),$(PROGRAMS),$(filter-out $(BUILD)/pipeline_mpi,$(PROGRAMS))) $(MPI_TESTS) $(SHARED) \
      $(addprefix $(TEST_BUILD)/,unit fuzz search trainer trainer_kinds trainer_whole trainer_tensors train_tiny make_tokens chunkflow) \
      $(TRAINER_MODEL) $(if $(filter 1,$(FULL)),playground)
	@$(if $(SANITIZE),,echo "note: this compiler links no sanitizers; the tests run without them";) \
	CC="$(CC)" CXX="$(CXX)" BUILD="$(BUILD)" sh tests/run.sh \
	    $(CUDA_SUITE) \
	    "sh tests/cuda/train_cuda_check.sh" \
	    "$(TEST_BUILD)/unit" \
	    "sh tests/meta/compile.sh" \
	    "sh tests/cuda/executor_check.sh" \
	    "env $(CLI) sh tests/command/transcript.sh tests/command/cli_pipeline.transcript" \
	    "$(TEST_BUILD)/search" \
	    "env $(CLI) sh tests/command/report_check.sh" \
	    "sh tests/cuda/cuda_compile.sh" \
	    "env $(CLI) sh tests/command/transcript.sh tests/command/cli_tune.transcript" \
	    "sh tests/cuda/cuda_record.sh" \
	    $(PTX_SUITE) \
	    "sh tests/cuda/train_paper_check.sh" \
	    "sh tests/trainer/mpi_check.sh $(BUILD)" \
	    "sh tests/trainer/train_check.sh $(BUILD)" \
	    "env $(CLI) sh tests/command/python_check.sh $(BUILD)" \
	    "env $(CLI) sh tests/command/transcript.sh tests/command/cli_models.transcript" \
	    "env CHUNKFLOW_PLAIN=$(BUILD)/chunkflow CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/command/transcript.sh tests/command/cli.transcript" \
	    "sh tests/meta/layers.sh $(BUILD)" \
	    "sh tests/command/install_check.sh $(BUILD)" \
	    $(if $(filter 1,$(FULL)),"$(PYTHON) -B tests/meta/pages.py $(BUILD)" "$(PYTHON) -B tests/meta/comments.py --rules") \
	    "sh tests/command/files_check.sh $(BUILD)" \
	    "sh tests/trainer/tiny_check.sh $(BUILD)" \
	    "$(TEST_BUILD)/trainer" \
	    "$(TEST_BUILD)/trainer_kinds" \
	    "$(TEST_BUILD)/trainer_whole" \
	    "$(TRAINER_MODEL)" \
	    "$(TEST_BUILD)/trainer_tensors $(TEST_BUILD)" \
	    "$(TEST_BUILD)/fuzz"

# ---- benchmarks ----

bench: $(BUILD)/bench_schedule $(BUILD)/bench_tune $(BUILD)/bench_fit $(BUILD)/bench_ranks $(BUILD)/chunkflow $(SHARED)
	CC="$(CC)" CFLAGS="$(CFLAGS)" BUILD="$(BUILD)" sh tools/bench/bench_pack.sh
	$(BUILD)/chunkflow gen lmsys --n 100000 --seed 1 >$(BUILD)/bench_peers.lengths
	if $(PYTHON) -c 'import cffi, numpy'; then \
	    CHUNKFLOW_BUILD=$(BUILD) $(PYTHON) tools/bench/bench_pack_peers.py $(BUILD)/bench_peers.lengths; fi
	$(BUILD)/bench_schedule
	$(BUILD)/bench_tune
	$(BUILD)/bench_ranks
	$(BUILD)/bench_fit

# RECORD: which of them, all by default; LENGTHS: a list of lengths for the tables that need one.
bench-record: $(BUILD)/bench_schedule $(BUILD)/bench_tune $(BUILD)/bench_fit $(BUILD)/bench_ranks $(BUILD)/bench_baseline
	CC="$(CC)" CFLAGS="$(CFLAGS)" BUILD="$(BUILD)" \
	    sh tools/bench/record.sh $(if $(LENGTHS),--lengths "$(LENGTHS)") $(RECORD)

BENCH_SCHEDULE_SOURCES := tools/bench/bench_schedule.c tools/bench/search_lists.c tests/reference/suite.c

$(BUILD)/bench_schedule: $(BENCH_SCHEDULE_SOURCES) tools/bench/search_lists.h tests/reference/suite.h chunkflow.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $(filter %.c,$^) -o $@ $(LDLIBS)

BENCH_TUNE_SOURCES := tools/bench/bench_tune.c tools/command/cli.c tools/command/cli_files.c tools/command/progress.c tools/command/draw.c

$(BUILD)/bench_tune: $(BENCH_TUNE_SOURCES) $(TOOL_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $(BENCH_TUNE_SOURCES) -o $@

$(BUILD)/bench_ranks: tools/bench/bench_ranks.c tools/command/draw.c tools/command/draw.h chunkflow.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $(filter %.c,$^) -o $@ $(LDLIBS)

BENCH_BASELINE_SOURCES := tools/bench/bench_baseline.c tools/command/packing.c tools/command/cli.c tools/command/cli_files.c tools/command/progress.c tools/command/draw.c

$(BUILD)/bench_baseline: $(BENCH_BASELINE_SOURCES) $(TOOL_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $(BENCH_BASELINE_SOURCES) -o $@ $(LDLIBS)

$(BUILD)/bench_fit $(BUILD)/bench_replay: $(BUILD)/%: tools/bench/%.c $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(TRAIN_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

# Each side has one header's implementation to itself. Without OTHER this header is compared with itself.
OTHER ?= chunkflow.h
bench-clocks: | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) -DHEADER='"chunkflow.h"' -DMEASURE=clocks_this -c tools/bench/clocks_side.c -o $(BUILD)/clocks_this.o
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) -DHEADER='"$(OTHER)"' -DMEASURE=clocks_other -c tools/bench/clocks_side.c -o $(BUILD)/clocks_other.o
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) tools/bench/bench_clocks.c $(BUILD)/clocks_this.o $(BUILD)/clocks_other.o -o $(BUILD)/bench_clocks $(LDLIBS)
	$(BUILD)/bench_clocks $(ARGS)

# Plans for ranks by this header and by OTHER, side by side (see tools/bench/bench_dealing.c).
bench-dealing: tools/bench/bench_dealing.c tools/bench/dealing_side.c tools/bench/dealing_side.h tools/command/draw.c chunkflow.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) '-DHEADER="$(CURDIR)/chunkflow.h"' -DSIDE=dealing_this -c tools/bench/dealing_side.c -o $(BUILD)/dealing_this.o
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) '-DHEADER="$(abspath $(OTHER))"' -DSIDE=dealing_other -c tools/bench/dealing_side.c -o $(BUILD)/dealing_other.o
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) tools/bench/bench_dealing.c tools/command/draw.c $(BUILD)/dealing_this.o $(BUILD)/dealing_other.o -o $(BUILD)/bench_dealing $(LDLIBS)
	$(BUILD)/bench_dealing $(ARGS)

bench-gpu:
	BUILD="$(BUILD)" sh tools/bench/bench_attention.sh

gpu-record: gpu-programs
	BUILD="$(BUILD)" PYTHON="$(PYTHON)" sh tools/device/gpu_record.sh

release: | $(BUILD)
	CC="$(CC)" CXX="$(CXX)" sh tools/release.sh "$(BUILD)" $(VERSION)

# ---- installing ----
#
# For those who do not vendor: `cc $(pkg-config --cflags chunkflow)` finds the headers. zsh reads the completion for bash.

PREFIX  ?= /usr/local
DESTDIR ?=
PLACE   := '$(subst ','\'',$(DESTDIR)$(PREFIX))'# for the shell, whatever is in it
VERSION := $(shell sed -n 's/^.define CHUNKFLOW_VERSION "\(.*\)"/\1/p' chunkflow.h)
INSTALL ?= install
MODULE  := $(addprefix tools/python/chunkflow/,__init__.py torch.py huggingface.py trainer.py megatron.py lengths.py py.typed)

WRITTEN   := share/pkgconfig/chunkflow.pc share/man/man1/chunkflow.1 \
             share/bash-completion/completions/chunkflow share/fish/vendor_completions.d/chunkflow.fish
INSTALLED := bin/chunkflow include/chunkflow.h include/chunkflow_tune.h include/chunkflow_cuda.cu $(WRITTEN) \
             $(addprefix share/chunkflow/,chunkflow.schema.json $(MODULE:tools/%=%) \
                 $(SHARED:$(BUILD)/%=python/chunkflow/%))

empty   :=
define PKG_CONFIG
prefix=$(subst $(empty) ,\ ,$(PREFIX))
includedir=$${prefix}/include
cuda_source=$${includedir}/chunkflow_cuda.cu

Name: chunkflow
Description: Chunks, schedules and memory estimates for training on long-tailed sequences; a C99 header
Version: $(VERSION)
Cflags: -I$${includedir}
Libs: -lm
endef
export PKG_CONFIG

install: $(BUILD)/chunkflow $(SHARED)
	$(INSTALL) -d $(foreach folder,$(sort $(dir $(INSTALLED))),$(PLACE)/$(folder))
	$(INSTALL) -m 755 $(BUILD)/chunkflow $(PLACE)/bin/chunkflow
	$(INSTALL) -m 644 chunkflow.h tools/chunkflow_tune.h chunkflow_cuda.cu $(PLACE)/include
	$(INSTALL) -m 644 tools/chunkflow.schema.json $(PLACE)/share/chunkflow
	$(INSTALL) -m 644 $(MODULE) $(SHARED) $(PLACE)/share/chunkflow/python/chunkflow
	printf '%s\n' "$$PKG_CONFIG" >$(PLACE)/share/pkgconfig/chunkflow.pc
	$(BUILD)/chunkflow help man >$(PLACE)/share/man/man1/chunkflow.1
	$(BUILD)/chunkflow help bash >$(PLACE)/share/bash-completion/completions/chunkflow
	$(BUILD)/chunkflow help fish >$(PLACE)/share/fish/vendor_completions.d/chunkflow.fish
	cd $(PLACE)/share && chmod 644 $(WRITTEN:share/%=%)

uninstall:
	rm -f $(foreach file,$(INSTALLED),$(PLACE)/$(file))

clean:
	rm -rf $(BUILD)
