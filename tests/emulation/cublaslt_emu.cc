/* cublaslt_emu.cc - cuBLASLt's products on the host, by way of cuBLAS's - MIT or public domain

   D = op(A) op(B) + C is made of two operations: D gets C, or the bias in every column; then a cuBLAS product adds to
   it. Both sums are rounded once, as in the real epilogue. Alpha is 1, and beta 0 or 1. */

#include "cublasLt.h"
#include "cuda_emu_private.h"

struct cublasLtContext {
    cublasHandle_t products;
};

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    cublasHandle_t products = nullptr;
    const cublasStatus_t status = cublasCreate(&products);
    if (status == CUBLAS_STATUS_SUCCESS) *handle = new cublasLtContext{products};
    return status;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    const cublasStatus_t status = cublasDestroy(handle->products);
    delete handle;
    return status;
}

cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t desc, cublasComputeType_t compute, cudaDataType scale) {
    *desc = {compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER && bytes == sizeof desc->bias) {
        memcpy(&desc->bias, value, bytes);
        return CUBLAS_STATUS_SUCCESS;
    }
    if (bytes != sizeof(int)) return CUBLAS_STATUS_INVALID_VALUE;
    int number;
    memcpy(&number, value, sizeof number);
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) desc->op_a = (cublasOperation_t)number;
    else if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) desc->op_b = (cublasOperation_t)number;
    else if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE) desc->epilogue = number;
    else return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType type, uint64_t rows,
                                        uint64_t columns, int64_t ld) {
    *layout = {type, rows, columns, ld};
    return ld >= (int64_t)rows ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    preference->workspace_bytes = 0;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes) {
    if (attribute != CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES || bytes != sizeof preference->workspace_bytes)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&preference->workspace_bytes, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

/* Describes the product that is asked for, if the four matrices fit together; the inner dimension is that of A. */
static bool describe(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                     cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulAlgo_t *out) {
    const bool plain_a = desc->op_a == CUBLAS_OP_N, plain_b = desc->op_b == CUBLAS_OP_N;
    *out = {plain_a ? a->rows : a->columns, plain_b ? b->columns : b->rows, plain_a ? a->columns : a->rows,
            desc->op_a, desc->op_b, desc->epilogue, a->type, d->type, 0};
    return out->k == (plain_b ? b->rows : b->columns) && a->type == b->type && c->type == d->type &&
           c->rows == out->m && d->rows == out->m && c->columns == out->n && d->columns == out->n && c->ld == d->ld &&
           desc->compute == CUBLAS_COMPUTE_32F && desc->scale_type == CUDA_R_32F;
}

static bool is_algorithm_for(const cublasLtMatmulAlgo_t *algo, const cublasLtMatmulAlgo_t *now) {
    return algo->m == now->m && algo->n == now->n && algo->k == now->k && algo->op_a == now->op_a &&
           algo->op_b == now->op_b && algo->epilogue == now->epilogue && algo->type_in == now->type_in &&
           algo->type_out == now->type_out;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int wanted, cublasLtMatmulHeuristicResult_t *results, int *found) {
    *found = 0;
    if (cuda_emu_begin_call(__func__, cuda_emu_current_device()) != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
    if (wanted < 1 || !describe(desc, a, b, c, d, &results->algo)) return CUBLAS_STATUS_INVALID_VALUE;
    results->algo.workspace_bytes = results->workspaceSize = preference->workspace_bytes;
    results->state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* D gets `from`, which has one column that counts for all where it is a bias. */
static void issue_start(CUstream_st *stream, void *d, cublasLtMatrixLayout_t layout, const void *from, bool is_bias) {
    const auto operation = std::make_shared<cuda_emu_operation>();
    const size_t number = layout->type == CUDA_R_32F ? 4u : 2u, column = (size_t)layout->rows * number;
    const size_t pitch = (size_t)layout->ld * number, columns = (size_t)layout->columns;
    const size_t span = columns > 0 ? (columns - 1) * pitch + column : 0, span_from = is_bias ? column : span;
    const int device = cuda_emu_device_of(stream);
    operation->work.kind = CUDA_EMU_WORK_COPY;
    operation->work.name = "cublasLtMatmul";
    operation->uses = {{d, span}, {from, span_from}};
    operation->run = [=] {
        if (!cuda_emu_check_range(d, span, device, "a product's D") ||
            !cuda_emu_check_range(from, span_from, device, "a product's C or bias"))
            return;
        for (size_t j = 0; j < columns; j++)
            memcpy((char *)d + j * pitch, (const char *)from + (is_bias ? 0 : j * pitch), column);
    };
    cuda_emu_issue(stream, operation);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t layout_a, const void *b, cublasLtMatrixLayout_t layout_b,
                              const void *beta, const void *c, cublasLtMatrixLayout_t layout_c, void *d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    cublasLtMatmulAlgo_t now;
    const float keep = *(const float *)beta;
    float adds = keep;
    const bool has_bias = desc->epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (!algo || !describe(desc, layout_a, layout_b, layout_c, layout_d, &now) || !is_algorithm_for(algo, &now))
        return CUBLAS_STATUS_INVALID_VALUE;
    if ((keep != 0.0f && keep != 1.0f) || *(const float *)alpha != 1.0f || (has_bias && (!desc->bias || keep != 0.0f)))
        return CUBLAS_STATUS_INVALID_VALUE; /* the real one can do more */
    if (algo->workspace_bytes > workspace_bytes || (workspace_bytes > 0 && !workspace))
        return CUBLAS_STATUS_INVALID_VALUE;
    CUstream_st *found = cuda_emu_find_stream(stream);
    if (!found) return CUBLAS_STATUS_INVALID_VALUE;
    if (has_bias || (keep == 1.0f && c != d)) {
        if (cuda_emu_begin_call(__func__, cuda_emu_device_of(found)) != cudaSuccess)
            return CUBLAS_STATUS_EXECUTION_FAILED;
        issue_start(found, d, layout_d, has_bias ? desc->bias : c, has_bias);
        adds = 1.0f;
    }
    const cublasStatus_t status = cublasSetStream(handle->products, stream);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasGemmEx(handle->products, desc->op_a, desc->op_b, (int)now.m, (int)now.n, (int)now.k, alpha, a,
                        layout_a->type, (int)layout_a->ld, b, layout_b->type, (int)layout_b->ld, &adds, d,
                        layout_d->type, (int)layout_d->ld, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}
