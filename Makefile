# chunkflow. Everything is built under $(BUILD); nothing is written outside it.
#
#   make            the command (build/chunkflow) and the examples; the pipeline of processes where there is MPI
#   make demo       trains a small model through chunks on real text and proves that nothing changed (under a minute)
#   make test       all CPU tests, with AddressSanitizer and UBSan
#   make unit       only the unit tests, UNIT=substring chooses
#   make test-cuda  the CUDA file and example under a host emulation, and a real compile where nvcc is; part of make test
#   make test-gpu   the CUDA tests on a device (skipped without one)
#   make bench-gpu  attention speed on a device, beside PyTorch's where that is installed
#   make bench      speed and quality against named rivals; prints tables, judges nothing
#   make build/executor_cuda    the CUDA example, with nvcc; NCCL=1: also a process a stage
#   make clean
#
# Useful variables: CC, CXX, NVCC, CFLAGS, BUILD, SANITIZE (empty: without sanitizers), STRICT_SKIPS=1 (a skipped test fails).

# Two jobs at once unless -j says otherwise: most of the time of `make test` on a fresh machine is compiling.
MAKEFLAGS += -j2

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
can_cxx = $(shell d=$$(mktemp -d) && printf '%s\n' 'int main() { return new int(0) == nullptr; }' >$$d/t.cc && \
        $(CXX) -std=c++17 $$d/t.cc -o $$d/t >/dev/null 2>&1 && echo yes; rm -rf $$d)
ifeq ($(origin SANITIZE),undefined)
SANITIZE := $(if $(call can,-fsanitize=address$(comma)undefined),-fsanitize=address$(comma)undefined -fno-sanitize-recover=all)
endif

PROGRAMS := $(BUILD)/chunkflow $(BUILD)/hello $(BUILD)/train_cpu $(BUILD)/train_cpu_f64

# The pipeline of processes needs MPI (Debian: openmpi-bin libopenmpi-dev); all else works without it. CC compiles it.
MPICC ?= mpicc
MPI_COMPILE := OMPI_CC="$(CC)" MPICH_CC="$(CC)" $(MPICC)
ifeq ($(shell d=$$(mktemp -d) && echo 'int main(void) { return MPI_SUCCESS; }' >$$d/t.c && \
        $(MPI_COMPILE) -include mpi.h $$d/t.c -o $$d/t >/dev/null 2>&1 && echo yes; rm -rf $$d),yes)
MPI_PROGRAMS := $(BUILD)/pipeline_mpi $(BUILD)/pipeline_mpi_f64
MPI_TESTS    := $(BUILD)/test/pipeline_mpi_f64
PROGRAMS     += $(MPI_PROGRAMS)
endif

.PHONY: all demo test test-cuda test-gpu unit bench bench-gpu clean
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
TRAIN_CFLAGS  := -O3 # gcc 12 with -funroll-loops on top of it halves the speed

$(BUILD)/hello: examples/hello.c chunkflow.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(BUILD)/train_cpu: examples/train_cpu.c $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(TRAIN_CFLAGS) $(OPENMP) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(BUILD)/train_cpu_f64: examples/train_cpu.c $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) -DTRAIN_FLOAT64 $(CFLAGS) $(TRAIN_CFLAGS) $(OPENMP) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

# Without OpenMP: every process is a thread of the pipeline already.
$(BUILD)/pipeline_mpi: examples/pipeline_mpi.c $(TRAIN_HEADERS) | $(BUILD)
	$(MPI_COMPILE) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(TRAIN_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

$(BUILD)/pipeline_mpi_f64: examples/pipeline_mpi.c $(TRAIN_HEADERS) | $(BUILD)
	$(MPI_COMPILE) $(CSTD) $(CPPFLAGS) -DTRAIN_FLOAT64 $(CFLAGS) $(TRAIN_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

# The CUDA example for a device. Not one of the programs that `make` builds: nvcc takes a minute for each architecture.
NVCC      ?= nvcc
CUDA_ARCH ?= -gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90a,code=sm_90a

$(BUILD)/executor_cuda: examples/executor_cuda.cu chunkflow_cuda.cu $(TRAIN_HEADERS) | $(BUILD)
	$(NVCC) -O3 -std=c++17 $(CUDA_ARCH) -I. $(if $(NCCL),-DCHUNKFLOW_NCCL) examples/executor_cuda.cu chunkflow_cuda.cu \
	    -lcublas $(if $(NCCL),-lnccl) -o $@

# Threads that spin while they wait are slow on a busy machine; results are the same either way.
demo: $(BUILD)/train_cpu $(BUILD)/train_cpu_f64
	OMP_WAIT_POLICY=passive $(BUILD)/train_cpu --demo
	OMP_WAIT_POLICY=passive $(BUILD)/train_cpu_f64 --check --batch 16 --chunk-size 256 --k 2

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

$(TEST_BUILD)/pipeline_mpi_f64: examples/pipeline_mpi.c $(TRAIN_HEADERS) | $(TEST_BUILD)
	$(MPI_COMPILE) $(CSTD) $(CPPFLAGS) -DTRAIN_FLOAT64 $(TEST_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

# The unit tests alone; UNIT names a substring of the tests to run.
unit: $(TEST_BUILD)/unit
	$(TEST_BUILD)/unit $(UNIT)

# The CUDA file as C++ against tests/cuda_emu: every kernel runs on the host. test_device.cu is for a device.
CUDA_BUILD    := $(BUILD)/cuda
CUDA_CXXFLAGS := -std=c++17 -DCHUNKFLOW_CUDA_EMULATION -DCHUNKFLOW_NCCL -Itests/cuda_emu $(CPPFLAGS) $(TEST_CFLAGS) $(WARN)
CUDA_SOURCES  := chunkflow_cuda.cu $(wildcard tests/cuda_emu/*.cc tests/cuda/*.cc)
CUDA_OBJECTS  := $(addprefix $(CUDA_BUILD)/,$(addsuffix .o,$(notdir $(CUDA_SOURCES))))
CUDA_HEADERS  := chunkflow.h tests/harness.h $(wildcard tests/cuda/*.h tests/cuda_emu/*.h)
vpath %.cc tests/cuda tests/cuda_emu

$(CUDA_BUILD):
	mkdir -p $@

$(CUDA_BUILD)/device_section.h: chunkflow_cuda.cu tests/device_section.sh | $(CUDA_BUILD)
	sh tests/device_section.sh >$@

$(CUDA_BUILD)/test_primitives.cc.o: CUDA_CXXFLAGS += -I$(CUDA_BUILD) -Wno-unused-function
$(CUDA_BUILD)/test_primitives.cc.o: $(CUDA_BUILD)/device_section.h

$(CUDA_BUILD)/%.cc.o: %.cc $(CUDA_HEADERS) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) -c $< -o $@

$(CUDA_BUILD)/%.cu.o: %.cu $(CUDA_HEADERS) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) -x c++ -c $< -o $@

$(CUDA_BUILD)/tests: $(CUDA_OBJECTS)
	$(CXX) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# The CUDA example under the emulation: executor_emulated.cc includes it and calls its main.
CUDA_EXAMPLE := $(addprefix $(CUDA_BUILD)/,executor_emulated.o chunkflow_cuda.cu.o \
                $(addsuffix .o,$(notdir $(wildcard tests/cuda_emu/*.cc))))

$(CUDA_BUILD)/executor_emulated.o: tests/executor_emulated.cc examples/executor_cuda.cu $(TRAIN_HEADERS) \
                                   $(wildcard tests/cuda_emu/*.h) | $(CUDA_BUILD)
	$(CXX) $(CUDA_CXXFLAGS) -c $< -o $@

$(CUDA_BUILD)/executor_cuda: $(CUDA_EXAMPLE)
	$(CXX) $(TEST_CFLAGS) $(LDFLAGS) $^ -o $@ $(LDLIBS)

# Only with a C++ compiler; without one the suite counts as skipped.
ifeq ($(can_cxx),yes)
CUDA_TESTS := $(CUDA_BUILD)/tests $(CUDA_BUILD)/executor_cuda
CUDA_SUITE := "$(CUDA_BUILD)/tests"
else
CUDA_SUITE := "echo 'no C++ compiler: the CUDA file is not tested'; echo '0 passed, 0 failed, 1 skipped'"
endif

test-cuda: $(CUDA_BUILD)/tests $(CUDA_BUILD)/executor_cuda $(TEST_BUILD)/chunkflow
	CC="$(CC)" BUILD="$(BUILD)" sh tests/run.sh "$(CUDA_BUILD)/tests" "sh tests/executor_check.sh" "sh tests/cuda_compile.sh"

test-gpu: $(TEST_BUILD)/chunkflow
	BUILD="$(BUILD)" JOBS=1 sh tests/run.sh "sh tests/cuda_device.sh" "sh tests/executor_check.sh device"

test: $(PROGRAMS) $(TEST_BUILD)/unit $(TEST_BUILD)/trainer $(TEST_BUILD)/trainer_model $(TEST_BUILD)/chunkflow $(MPI_TESTS) $(CUDA_TESTS)
	@$(if $(SANITIZE),,echo "note: this compiler links no sanitizers; the tests run without them";) \
	CC="$(CC)" CXX="$(CXX)" BUILD="$(BUILD)" sh tests/run.sh \
	    "$(TEST_BUILD)/unit" \
	    "env CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/cli.sh" \
	    "env CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/cli_pipeline.sh" \
	    "env CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/cli_models.sh" \
	    "env CHUNKFLOW=$(TEST_BUILD)/chunkflow sh tests/cli_tune.sh" \
	    "$(TEST_BUILD)/trainer" \
	    "$(TEST_BUILD)/trainer_model" \
	    "sh tests/train_check.sh $(BUILD)" \
	    "sh tests/mpi_check.sh $(BUILD)" \
	    "sh tests/compile.sh" \
	    $(CUDA_SUITE) \
	    "sh tests/executor_check.sh" \
	    "sh tests/cuda_compile.sh"

# ---- benchmarks ----

bench: $(BUILD)/bench_schedule $(BUILD)/bench_tune $(BUILD)/bench_fit
	CC="$(CC)" CFLAGS="$(CFLAGS)" BUILD="$(BUILD)" sh tools/bench/bench_pack.sh
	$(BUILD)/bench_schedule
	$(BUILD)/bench_tune
	$(BUILD)/bench_fit

$(BUILD)/bench_schedule: tools/bench/bench_schedule.c tests/suite.c tests/suite.h chunkflow.h | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) -Itests $(CFLAGS) $(WARN) $(LDFLAGS) $(filter %.c,$^) -o $@ $(LDLIBS)

BENCH_TUNE_SOURCES := tools/bench/bench_tune.c tools/cli.c tools/cli_files.c tools/draw.c

$(BUILD)/bench_tune: $(BENCH_TUNE_SOURCES) $(TOOL_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(WARN) $(LDFLAGS) $(BENCH_TUNE_SOURCES) -o $@

$(BUILD)/bench_fit: tools/bench/bench_fit.c $(TRAIN_HEADERS) | $(BUILD)
	$(CC) $(CSTD) $(CPPFLAGS) $(CFLAGS) $(TRAIN_CFLAGS) $(WARN) $(LDFLAGS) $< -o $@ $(LDLIBS)

bench-gpu:
	BUILD="$(BUILD)" sh tools/bench/bench_attention.sh

clean:
	rm -rf $(BUILD)
