#include "reference.h"

#include <cmath>
#include <cstring>

float round_to(cf_dtype dtype, float x) {
    if (dtype == CF_DTYPE_FP32 || x == 0.0f || !std::isfinite(x)) return x;
    /* Keeps 8 (bf16) or 11 (fp16) significant bits; fp16 has no exponents below -14. */
    int exponent;
    std::frexp(x, &exponent);
    int bits = dtype == CF_DTYPE_FP16 ? 11 : 8;
    int unit = exponent - bits;
    if (dtype == CF_DTYPE_FP16 && unit < -24) unit = -24;
    float rounded = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
    if (dtype == CF_DTYPE_FP16 && std::fabs(rounded) > 65504.0f) return std::copysign(INFINITY, x);
    return rounded;
}

/* One query row of one slice and head. `real` is the type of sums; rounded: rounds stored values to the problem's
   type. */
template <typename real> struct row_pass {
    const host_problem &p;
    const host_inputs &in;
    host_results &to;
    bool rounded;

    real store(real x) const { return rounded ? (real)round_to(p.dtype, (float)x) : x; }

    const float *at(const std::vector<float> &array, int row, int head, int heads) const {
        return &array[((size_t)row * (size_t)heads + (size_t)head) * (size_t)p.head_size];
    }

    double *at(std::vector<double> &array, int row, int head, int heads) const {
        return &array[((size_t)row * (size_t)heads + (size_t)head) * (size_t)p.head_size];
    }

    real dot(const float *x, const float *y) const {
        real sum = 0;
        for (int i = 0; i < p.head_size; i++) sum += (real)x[i] * (real)y[i];
        return sum;
    }

    bool visible(int s, int i, int j) const {
        const int own = i + p.keys(s) - p.queries(s);
        return (p.full || j <= own) && (p.window == 0 || j > own - p.window);
    }

    void run(int s, int i, int head) {
        const int group = p.n_heads / p.n_kv_heads, kv = head / group, row = p.start_q(s) + i, n = p.keys(s);
        const real scale = (real)(p.scale != 0.0 ? p.scale : 1.0 / std::sqrt((double)p.head_size));
        const real cap = (real)p.softcap;
        const float *q = at(in.q, row, head, p.n_heads), *dout = at(in.dout, row, head, p.n_heads);
        std::vector<real> score((size_t)n), prob((size_t)n);
        const real sink = in.sinks.empty() ? -(real)INFINITY : (real)in.sinks[(size_t)head];
        real top = sink, sum = 0;
        for (int j = 0; j < n; j++) {
            if (!visible(s, i, j)) continue;
            real x = dot(q, at(in.k, p.start_k(s) + j, kv, p.n_kv_heads)) * scale;
            if (p.softcap != 0.0) x = cap * std::tanh(x / cap);
            score[(size_t)j] = x;
            top = x > top ? x : top;
        }
        double *lse = &to.lse[(size_t)head * (size_t)p.rows_q() + (size_t)row];
        *lse = -INFINITY;
        if (top == -(real)INFINITY) return;
        sum = std::exp(sink - top);
        for (int j = 0; j < n; j++)
            if (visible(s, i, j)) sum += std::exp(score[(size_t)j] - top);
        const real log_sum = top + std::log(sum);
        *lse = (double)log_sum;
        std::vector<real> out((size_t)p.head_size), dq((size_t)p.head_size);
        for (int j = 0; j < n; j++) {
            if (!visible(s, i, j)) continue;
            prob[(size_t)j] = store(std::exp(score[(size_t)j] - log_sum));
            const float *v = at(in.v, p.start_k(s) + j, kv, p.n_kv_heads);
            for (int c = 0; c < p.head_size; c++) out[(size_t)c] += prob[(size_t)j] * (real)v[c];
        }
        real d = 0;
        for (int c = 0; c < p.head_size; c++) {
            out[(size_t)c] = store(out[(size_t)c]);
            d += out[(size_t)c] * (real)dout[c];
            at(to.out, row, head, p.n_heads)[c] = (double)out[(size_t)c];
        }
        if (!in.sinks.empty()) to.dsinks[(size_t)head] -= (double)(std::exp(sink - log_sum) * d);
        for (int j = 0; j < n; j++) {
            if (!visible(s, i, j)) continue;
            const int key = p.start_k(s) + j;
            const float *k = at(in.k, key, kv, p.n_kv_heads), *v = at(in.v, key, kv, p.n_kv_heads);
            const real exact_prob = std::exp(score[(size_t)j] - log_sum);
            real slope = exact_prob * (dot(dout, v) - d) * scale;
            if (p.softcap != 0.0) slope *= 1 - score[(size_t)j] / cap * (score[(size_t)j] / cap);
            slope = store(slope);
            double *dk = at(to.dk, key, kv, p.n_kv_heads), *dv = at(to.dv, key, kv, p.n_kv_heads);
            for (int c = 0; c < p.head_size; c++) {
                dq[(size_t)c] += slope * (real)k[c];
                dk[c] = (double)(real)(dk[c] + (double)(slope * (real)q[c]));
                dv[c] = (double)(real)(dv[c] + (double)(prob[(size_t)j] * (real)dout[c]));
            }
        }
        for (int c = 0; c < p.head_size; c++) at(to.dq, row, head, p.n_heads)[c] = (double)store(dq[(size_t)c]);
    }
};

template <typename real> static host_results run_reference(const host_problem &p, const host_inputs &in, bool rounded) {
    host_results to;
    to.out.assign(in.q.size(), 0.0);
    to.dq.assign(in.q.size(), 0.0);
    to.dk.assign(in.k.size(), 0.0);
    to.dv.assign(in.k.size(), 0.0);
    to.lse.assign((size_t)p.n_heads * (size_t)p.rows_q(), 0.0);
    to.dsinks.assign(in.sinks.size(), 0.0);
    row_pass<real> pass = {p, in, to, rounded};
    for (int s = 0; s < p.n_slices(); s++)
        for (int i = 0; i < p.queries(s); i++)
            for (int head = 0; head < p.n_heads; head++) pass.run(s, i, head);
    return to;
}

host_results reference_exact(const host_problem &p, const host_inputs &in) {
    return run_reference<double>(p, in, false);
}
host_results reference_rounded(const host_problem &p, const host_inputs &in) {
    return run_reference<float>(p, in, true);
}
