/* reference.h - attention on the host, row by row, independent of the kernels' algorithms - MIT or public domain

   There are two references. One computes in double and counts as exact. The other is unfused, in float, and rounds each
   intermediate to the problem's type where an unfused implementation would store it: it shows which error that type
   makes unavoidable. */

#ifndef REFERENCE_H
#define REFERENCE_H

#define CHUNKFLOW_CUDA_HEADER_ONLY
#define CHUNKFLOW_CUDA_INTERNAL
#include "../../chunkflow_cuda.cu"

#include <cstdint>
#include <vector>

/* A problem on the host. Arrays are (rows, heads, head_size) without gaps; inputs hold numbers of the problem's type.
 */
struct host_problem {
    cf_dtype dtype = CF_DTYPE_BF16;
    int n_heads = 1, n_kv_heads = 1, head_size = 64;
    bool full = false;
    int window = 0;
    double scale = 0.0, softcap = 0.0;
    std::vector<int32_t> cu_q = {0}, cu_k = {0};
    std::vector<int32_t> starts_q, starts_k; /* empty: as cu */

    int n_slices() const { return (int)cu_q.size() - 1; }
    int start_q(int s) const { return starts_q.empty() ? cu_q[(size_t)s] : starts_q[(size_t)s]; }
    int start_k(int s) const { return starts_k.empty() ? cu_k[(size_t)s] : starts_k[(size_t)s]; }
    int queries(int s) const { return cu_q[(size_t)s + 1] - cu_q[(size_t)s]; }
    int keys(int s) const { return cu_k[(size_t)s + 1] - cu_k[(size_t)s]; }
    int rows_q() const { return n_slices() ? start_q(n_slices() - 1) + queries(n_slices() - 1) : 0; }
    int rows_k() const { return n_slices() ? start_k(n_slices() - 1) + keys(n_slices() - 1) : 0; }
    void add_slice(int queries, int keys) {
        cu_q.push_back(cu_q.back() + queries);
        cu_k.push_back(cu_k.back() + keys);
    }
};

/* sinks: (n_heads), or empty without sinks. */
struct host_inputs {
    std::vector<float> q, k, v, dout, sinks;
};

/* lse is (n_heads, rows_q), dsinks (n_heads) if there are sinks. Rows outside every slice are 0 here. */
struct host_results {
    std::vector<double> out, lse, dq, dk, dv, dsinks;
};

/* Returns the number of the type nearest to x, as a float. */
float round_to(cf_dtype dtype, float x);

host_results reference_exact(const host_problem &p, const host_inputs &in);
host_results reference_rounded(const host_problem &p, const host_inputs &in);

#endif /* REFERENCE_H */
