/* device.h - runs an attention problem through the library and compares the results - MIT or public domain. The same
   source serves devices and the emulation; only the emulation has faults and counts. */

#ifndef DEVICE_H
#define DEVICE_H

#include "reference.h"

struct run_options {
    cf_attention_path path = CF_ATTENTION_AUTO;
    bool deterministic = false;
    bool overwrite = false; /* dk and dv */
    bool strided = false;   /* gaps between heads and between rows */
    bool backward = true;
    bool by_name = false; /* CHUNKFLOW_TEST_WGMMA does not change the path */
    bool room = false;    /* allocates twice the memory for lse and the workspace, to detect writes past their ends */
    int arch = 80;
    int processors = 0; /* 0: the device's number */
    int64_t cache = 0;  /* bytes shared by the heads of a section; 0: the library's choice */
    /* rows after the last slice, in every array; full of NaN */
    int spare_rows = 3;
    /* the initial gradients to add to; NULL: a fixed pattern */
    const float *initial_dk = nullptr, *initial_dv = nullptr;
};

/* The results copied back, in the layout of host_results, and any faults. */
struct device_results {
    host_results values;
    cf_attention attention;
    std::vector<float> initial_dk, initial_dv;
    std::vector<unsigned char> bits; /* of all outputs, for bitwise comparison */
};

/* Returns whether a call succeeded; if not, the running test fails with its error. */
bool call_ok(cf_result code, const cf_error &error);

/* Returns the last path, in the order of the enum, that can run here: the one with wgmma needs compute capability
   9.0. */
cf_attention_path last_path();

/* Returns the largest head size that the mma path supports here: 128 if a block has little shared memory. */
int largest_mma_head();

/* Runs the problem. If a call fails, a fault is counted, or a byte outside the slices changes, it fails the running
   test and returns false. */
bool run_on_device(const host_problem &p, const host_inputs &in, const run_options &o, device_results *to);

/* Returns the bits of a number that the 16-bit type can represent; from_bits does the reverse. */
uint16_t to_bits(cf_dtype dtype, float x);
float from_bits(cf_dtype dtype, uint16_t bits);

/* Draws random inputs of the problem's type; rows outside slices are 0. */
host_inputs random_inputs(const host_problem &p, uint64_t seed);

/* Checks accuracy. The error against the exact reference, greatest and root mean square, may be `factor` times that of
   the rounded reference. If the rounded reference is exact by chance, half a unit of the type is allowed. Fails the
   running test otherwise. */
bool check_accuracy(const char *what, cf_dtype dtype, const std::vector<double> &got, const std::vector<double> &exact,
                    const std::vector<double> &rounded, double factor);

/* Calls run_on_device, then check_accuracy on everything. `to` receives the results unless it is NULL. */
bool check_inputs(const host_problem &p, const host_inputs &in, const run_options &o, device_results *to = nullptr);

/* The same with random inputs. */
bool check_problem(const host_problem &p, const run_options &o, uint64_t seed, device_results *to = nullptr);

/* Sets the description of the problem that a failure will print. */
void note_problem(const host_problem &p, const run_options &o);

#endif /* DEVICE_H */
