/* device.h - runs an attention problem through the library and compares; on a device or under the emulation - MIT or
   public domain. The same source serves both: only faults and counts are the emulation's. */

#ifndef DEVICE_H
#define DEVICE_H

#include "reference.h"

struct run_options {
    cf_attention_path path = CF_ATTENTION_AUTO;
    bool deterministic = false;
    bool overwrite = false; /* dk and dv */
    bool strided = false;   /* gaps between heads and between rows */
    bool backward = true;
    bool by_name = false; /* the path is meant: CHUNKFLOW_TEST_WGMMA does not change it */
    bool room = false;    /* twice the memory for lse and the workspace: what reaches past them is found there */
    int arch = 80;
    int processors = 0; /* 0: as many as the device has */
    int64_t cache = 0;  /* bytes that the heads of a section share; 0: as the library chooses */
    int spare_rows = 3;                                       /* after the last slice, in every array; full of NaN */
    const float *initial_dk = nullptr, *initial_dv = nullptr; /* where added to; NULL: a pattern of its own */
};

/* The results that came back, in the layout of host_results, and what went wrong on the way. */
struct device_results {
    host_results values;
    cf_attention attention;
    std::vector<float> initial_dk, initial_dv;
    std::vector<unsigned char> bits; /* of all outputs, for bitwise comparison */
};

/* Returns whether a call succeeded; if not, the running test fails with its error. */
bool call_ok(cf_result code, const cf_error &error);

/* The last path in the order of the enum that can run here: the one with wgmma is for compute capability 9.0 only. */
cf_attention_path last_path();

/* The largest head size that the path with mma has here: 128 where a block has little shared memory. */
int largest_mma_head();

/* Fails the running test, and returns false, where a call fails, a fault is counted, or a byte outside the slices
   changed. */
bool run_on_device(const host_problem &p, const host_inputs &in, const run_options &o, device_results *to);

/* A 16-bit number's bits, where the type has that number, and back. */
uint16_t to_bits(cf_dtype dtype, float x);
float from_bits(cf_dtype dtype, uint16_t bits);

/* Random inputs of the problem's type; rows outside slices are 0. */
host_inputs random_inputs(const host_problem &p, uint64_t seed);

/* The accuracy rule: the error against the exact reference, greatest and root mean square, is at most `factor` times
   that of the rounded one; where that one is exact by chance, half a unit of the type is allowed. Fails the running
   test. */
bool check_accuracy(const char *what, cf_dtype dtype, const std::vector<double> &got, const std::vector<double> &exact,
                    const std::vector<double> &rounded, double factor);

/* run_on_device, then check_accuracy of everything. Leaves what came back in `to`, or nowhere. */
bool check_inputs(const host_problem &p, const host_inputs &in, const run_options &o, device_results *to = nullptr);

/* The same with random inputs. */
bool check_problem(const host_problem &p, const run_options &o, uint64_t seed, device_results *to = nullptr);

/* Prints nothing; what a failure's message says about the problem. */
void note_problem(const host_problem &p, const run_options &o);

#endif /* DEVICE_H */
