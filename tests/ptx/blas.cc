/* blas.cc - the products of cuBLAS and cuBLASLt that this project asks for, as plain loops; sums are in float */

#include "opcodes.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <algorithm>

using namespace ptx;

struct cublasContext {
    cudaStream_t stream;
    cublasPointerMode_t mode;
};

namespace {

float load_number(const void *array, cudaDataType type, int64_t at) {
    if (type == CUDA_R_32F) return ((const float *)array)[at];
    const uint16_t bits = ((const uint16_t *)array)[at];
    return type == CUDA_R_16BF ? float_of_bf16(bits) : float_of_f16(bits);
}

void store_number(void *array, cudaDataType type, int64_t at, float x) {
    if (type == CUDA_R_32F) ((float *)array)[at] = x;
    else ((uint16_t *)array)[at] = (uint16_t)(type == CUDA_R_16BF ? bf16_of(x) : f16_of(x));
}

/* A column-major matrix and how it is read. */
struct side {
    const void *data;
    cudaDataType type;
    bool turned;
    int64_t ld;
};

/* rows x columns of op(side), row by row. */
std::vector<float> gather(const side &s, int64_t rows, int64_t columns) {
    std::vector<float> all((size_t)(rows * columns));
    const size_t bytes = s.type == CUDA_R_32F ? 4 : 2;
    const int64_t inner = s.turned ? columns : rows, outer = s.turned ? rows : columns;
    if (outer > 0) check_product_range(s.data, (size_t)((outer - 1) * s.ld + inner) * bytes);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++)
            all[(size_t)(r * columns + c)] = load_number(s.data, s.type, s.turned ? r * s.ld + c : c * s.ld + r);
    return all;
}

/* d (m x n) = alpha a (m x k) b (k x n) + beta c + bias of each row. */
cublasStatus_t multiply(int64_t m, int64_t n, int64_t k, float alpha, const side &a, const side &b, float beta,
                        const side &c, const side *bias, void *d) {
    if (m < 0 || n < 0 || k < 0 || c.ld < m) return CUBLAS_STATUS_INVALID_VALUE;
    if (m == 0 || n == 0) return CUBLAS_STATUS_SUCCESS;
    side turned = a;
    turned.turned = !a.turned;
    const std::vector<float> x = gather(turned, k, m), y = gather(b, k, n);
    const std::vector<float> before = beta != 0.0f ? gather(c, m, n) : std::vector<float>();
    std::vector<float> sum((size_t)(m * n)), extra = bias ? gather(*bias, m, 1) : std::vector<float>((size_t)m);
    check_product_range(d, (size_t)((n - 1) * c.ld + m) * (c.type == CUDA_R_32F ? 4 : 2));
    for (int64_t l = 0; l < k; l++)
        for (int64_t i = 0; i < m; i++) {
            const float factor = x[(size_t)(l * m + i)], *row = &y[(size_t)(l * n)];
            float *to = &sum[(size_t)(i * n)];
            for (int64_t j = 0; j < n; j++) to[j] += factor * row[j];
        }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            const size_t at = (size_t)(i * n + j);
            store_number(d, c.type, j * c.ld + i,
                         alpha * sum[at] + (beta != 0.0f ? beta * before[at] : 0.0f) + extra[(size_t)i]);
        }
    return CUBLAS_STATUS_SUCCESS;
}

struct description {
    cublasOperation_t op_a, op_b;
    int epilogue;
    const void *bias;
};
struct layout {
    cudaDataType type;
    uint64_t rows, columns;
    int64_t ld;
};

} /* namespace */

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = new cublasContext{nullptr, CUBLAS_POINTER_MODE_HOST};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { return delete handle, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t stream) {
    return h->stream = stream, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t h, cudaStream_t *stream) {
    return *stream = h->stream, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t mode) {
    return h->mode = mode, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *mode) {
    return *mode = h->mode, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) { return CUBLAS_STATUS_SUCCESS; }
const char *cublasGetStatusName(cublasStatus_t status) {
    return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE";
}
const char *cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }

static int64_t bytes_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : 2; }

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                          int n, int k, const void *alpha, const void *a, cudaDataType type_a, int ld_a,
                                          long long step_a, const void *b, cudaDataType type_b, int ld_b,
                                          long long step_b, const void *beta, void *c, cudaDataType type_c, int ld_c,
                                          long long step_c, int batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
    if (h->mode != CUBLAS_POINTER_MODE_HOST || compute != CUBLAS_COMPUTE_32F || type_a != type_b)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (int i = 0; i < batch; i++) {
        const side left = {(const char *)a + i * step_a * bytes_of(type_a), type_a, op_a != CUBLAS_OP_N, ld_a};
        const side right = {(const char *)b + i * step_b * bytes_of(type_b), type_b, op_b != CUBLAS_OP_N, ld_b};
        void *to = (char *)c + i * step_c * bytes_of(type_c);
        const side out = {to, type_c, false, ld_c};
        const cublasStatus_t status =
            multiply(m, n, k, *(const float *)alpha, left, right, *(const float *)beta, out, nullptr, to);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType type_a, int ld_a, const void *b,
                            cudaDataType type_b, int ld_b, const void *beta, void *c, cudaDataType type_c, int ld_c,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return cublasGemmStridedBatchedEx(h, op_a, op_b, m, n, k, alpha, a, type_a, ld_a, 0, b, type_b, ld_b, 0, beta, c,
                                      type_c, ld_c, 0, 1, compute, algorithm);
}

/* ---- cuBLASLt: descriptors are the caller's memory, of which the first bytes are ours ---- */

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    return *handle = (cublasLtHandle_t) new char, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return delete (char *)handle, CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t bytes, cublasComputeType_t compute,
                                               cudaDataType scale) {
    if (bytes < sizeof(description) || compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F)
        return CUBLAS_STATUS_INVALID_VALUE;
    *(description *)desc = {CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t what,
                                              const void *value, size_t) {
    description *d = (description *)desc;
    if (what == CUBLASLT_MATMUL_DESC_TRANSA) d->op_a = *(const cublasOperation_t *)value;
    else if (what == CUBLASLT_MATMUL_DESC_TRANSB) d->op_b = *(const cublasOperation_t *)value;
    else if (what == CUBLASLT_MATMUL_DESC_EPILOGUE) d->epilogue = *(const int *)value;
    else if (what == CUBLASLT_MATMUL_DESC_BIAS_POINTER) d->bias = *(void *const *)value;
    else return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t to, size_t bytes, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t ld) {
    if (bytes < sizeof(layout) || ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    *(layout *)to = {type, rows, columns, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                                                    const void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t *to,
                                              int *found) {
    memset(to, 0, sizeof *to);
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t layout_a, const void *b, cublasLtMatrixLayout_t layout_b,
                              const void *beta, const void *c, cublasLtMatrixLayout_t layout_c, void *d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t *algorithm, void *, size_t,
                              cudaStream_t) {
    const description &what = *(description *)desc;
    const layout &of_a = *(layout *)layout_a, &of_b = *(layout *)layout_b, &of_c = *(layout *)layout_c,
                 &of_d = *(layout *)layout_d;
    const side left = {a, of_a.type, what.op_a != CUBLAS_OP_N, of_a.ld},
               right = {b, of_b.type, what.op_b != CUBLAS_OP_N, of_b.ld};
    const side out = {c, of_c.type, false, of_c.ld}, bias = {what.bias, of_d.type, false, (int64_t)of_d.rows};
    const uint64_t k = left.turned ? of_a.rows : of_a.columns;
    if (!algorithm || of_a.type != of_b.type || of_c.type != of_d.type || of_c.ld != of_d.ld ||
        k != (right.turned ? of_b.columns : of_b.rows) || of_d.rows != (left.turned ? of_a.columns : of_a.rows) ||
        of_d.columns != (right.turned ? of_b.rows : of_b.columns))
        return CUBLAS_STATUS_INVALID_VALUE;
    return multiply((int64_t)of_d.rows, (int64_t)of_d.columns, (int64_t)k, *(const float *)alpha, left, right,
                    *(const float *)beta, out, what.epilogue == CUBLASLT_EPILOGUE_BIAS ? &bias : nullptr, d);
}

} /* extern "C" */
