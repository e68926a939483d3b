/* cublas_emu.cc - the products in use, on the host; see cuda_emu.h. Sections: >>handles >>products. */

#include "cuda_emu_private.h"

#include <algorithm>
#include <vector>

/* ================================================================================================================
   >>handles
   ================================================================================================================ */

struct cublasContext {
    int device;
    CUstream_st *stream; /* NULL: the legacy stream */
    cublasPointerMode_t mode;
};

static std::vector<cublasHandle_t> &handles = *new std::vector<cublasHandle_t>(); /* alive */

const char *cublasGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}

const char *cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }

static bool is_alive(cublasHandle_t handle) {
    if (std::find(handles.begin(), handles.end(), handle) != handles.end()) return true;
    if (handle) cuda_emu_add_fault(CUDA_EMU_HANDLE, "a cuBLAS handle that does not exist");
    return false;
}

/* Every call begins with this; the status of a failure is cuBLAS's own. */
static cublasStatus_t begin_call(const char *name, cublasHandle_t handle) {
    const bool alive = is_alive(handle);
    if (cuda_emu_begin_call(name, alive ? handle->device : cuda_emu_current_device()) != cudaSuccess)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    return alive ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

#define BEGIN_CALL(handle)                                           \
    do {                                                             \
        const cublasStatus_t begun = begin_call(__func__, (handle)); \
        if (begun != CUBLAS_STATUS_SUCCESS) return begun;            \
    } while (0)

cublasStatus_t cublasCreate(cublasHandle_t *handle) {
    if (cuda_emu_begin_call(__func__, cuda_emu_current_device()) != cudaSuccess) return CUBLAS_STATUS_ALLOC_FAILED;
    *handle = new cublasContext{cuda_emu_current_device(), nullptr, CUBLAS_POINTER_MODE_HOST};
    handles.push_back(*handle);
    cuda_emu_live_handles++;
    return CUBLAS_STATUS_SUCCESS;
}

/* Waits for the device, as the real one does. */
cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    const cublasStatus_t begun = begin_call(__func__, handle);
    if (begun == CUBLAS_STATUS_NOT_INITIALIZED || !is_alive(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    cuda_emu_wait_for_device(handle->device);
    handles.erase(std::find(handles.begin(), handles.end(), handle));
    cuda_emu_live_handles--;
    delete handle;
    return begun;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    BEGIN_CALL(handle);
    const CUstream_st *found = cuda_emu_find_stream(stream);
    if (!found || cuda_emu_device_of(found) != handle->device) return CUBLAS_STATUS_INVALID_VALUE;
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t *stream) {
    BEGIN_CALL(handle);
    *stream = handle->stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
    BEGIN_CALL(handle);
    handle->mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode) {
    BEGIN_CALL(handle);
    *mode = handle->mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes) {
    BEGIN_CALL(handle);
    return workspace || bytes == 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* ================================================================================================================
   >>products
   ================================================================================================================ */

static float load_number(const void *array, cudaDataType type, int64_t at) {
    if (type == CUDA_R_32F) return ((const float *)array)[at];
    uint16_t bits = ((const uint16_t *)array)[at];
    return type == CUDA_R_16BF ? cuda_emu_bf16_to_float(bits) : cuda_emu_half_to_float(bits);
}

static void store_number(void *array, cudaDataType type, int64_t at, float value) {
    if (type == CUDA_R_32F) ((float *)array)[at] = value;
    else ((uint16_t *)array)[at] = type == CUDA_R_16BF ? cuda_emu_float_to_bf16(value) : cuda_emu_float_to_half(value);
}

/* rows x columns of op(source), row by row. */
static std::vector<float> gather(const void *source, cudaDataType type, cublasOperation_t op, int rows, int columns,
                                 int ld, int64_t offset) {
    std::vector<float> out((size_t)rows * (size_t)columns);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            out[(size_t)i * (size_t)columns + (size_t)j] =
                load_number(source, type, offset + (op == CUBLAS_OP_N ? i + (int64_t)j * ld : j + (int64_t)i * ld));
    return out;
}

/* One of the three arrays: op(matrix) has `rows` rows and `columns` columns. */
struct operand {
    void *data;
    cudaDataType type;
    cublasOperation_t op;
    int rows, columns, ld;
    long long stride;

    size_t span(int batch) const {
        const int stored_rows = op == CUBLAS_OP_N ? rows : columns, stored_columns = op == CUBLAS_OP_N ? columns : rows;
        if (rows == 0 || columns == 0 || batch == 0) return 0;
        return ((size_t)(batch - 1) * (size_t)stride + (size_t)(stored_columns - 1) * (size_t)ld +
                (size_t)stored_rows) *
               (type == CUDA_R_32F ? 4u : 2u);
    }

    bool ok() const { return rows >= 0 && columns >= 0 && ld >= (op == CUBLAS_OP_N ? rows : columns); }
};

struct product {
    operand a, b, c; /* c: m x n, a: m x k, b: k x n */
    const void *alpha, *beta;
    float alpha_now, beta_now; /* CUBLAS_POINTER_MODE_HOST */
    bool on_device;
    int batch, device;
};

static void multiply_one(const product &p, int64_t one, float scale, float keep) {
    const int m = p.c.rows, n = p.c.columns, k = p.a.columns;
    const cublasOperation_t other_a = p.a.op == CUBLAS_OP_N ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t other_b = p.b.op == CUBLAS_OP_N ? CUBLAS_OP_T : CUBLAS_OP_N;
    const std::vector<float> left = gather(p.a.data, p.a.type, other_a, k, m, p.a.ld, one * p.a.stride);
    const std::vector<float> right = gather(p.b.data, p.b.type, other_b, n, k, p.b.ld, one * p.b.stride);
    std::vector<float> sums((size_t)m);
    for (int j = 0; j < n; j++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int q = 0; q < k; q++) {
            const float r = right[(size_t)j * (size_t)k + (size_t)q];
            const float *row = &left[(size_t)q * (size_t)m];
            for (size_t i = 0; i < (size_t)m; i++) sums[i] += row[i] * r;
        }
        for (int i = 0; i < m; i++) {
            const int64_t at = one * p.c.stride + i + (int64_t)j * p.c.ld;
            const float old = keep != 0.0f ? keep * load_number(p.c.data, p.c.type, at) : 0.0f; /* 0 does not read C */
            store_number(p.c.data, p.c.type, at, scale * sums[(size_t)i] + old);
        }
    }
}

static void multiply(const product &p) {
    for (const operand *one : {&p.a, &p.b, &p.c})
        if (!cuda_emu_check_range(one->data, one->span(p.batch), p.device, "a product")) return;
    if (p.on_device && (!cuda_emu_check_range(p.alpha, 4, p.device, "a product's alpha") ||
                        !cuda_emu_check_range(p.beta, 4, p.device, "a product's beta")))
        return;
    const float scale = p.on_device ? *(const float *)p.alpha : p.alpha_now;
    const float keep = p.on_device ? *(const float *)p.beta : p.beta_now;
    for (int64_t one = 0; one < p.batch; one++) multiply_one(p, one, scale, keep);
}

static cublasStatus_t issue_product(cublasHandle_t handle, product p, const char *name) {
    const auto operation = std::make_shared<cuda_emu_operation>();
    /* A handle belongs to the device that was current when it was made. */
    if (handle->device != cuda_emu_current_device()) return CUBLAS_STATUS_EXECUTION_FAILED;
    CUstream_st *stream = cuda_emu_find_stream(handle->stream);
    if (!stream || cuda_emu_wait_for_room(handle->device, name) != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
    p.device = handle->device;
    p.on_device = handle->mode == CUBLAS_POINTER_MODE_DEVICE;
    p.alpha_now = p.on_device ? 0.0f : *(const float *)p.alpha;
    p.beta_now = p.on_device ? 0.0f : *(const float *)p.beta;
    operation->work.kind = CUDA_EMU_WORK_PRODUCT;
    operation->work.name = name;
    operation->work.flops = 2.0 * p.c.rows * p.c.columns * p.a.columns * p.batch;
    for (const operand *one : {&p.a, &p.b, &p.c}) operation->uses.push_back({one->data, one->span(p.batch)});
    operation->run = [p] { multiply(p); };
    cuda_emu_issue(stream, operation);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                          int n, int k, const void *alpha, const void *a, cudaDataType type_a, int lda,
                                          long long stride_a, const void *b, cudaDataType type_b, int ldb,
                                          long long stride_b, const void *beta, void *c, cudaDataType type_c, int ldc,
                                          long long stride_c, int batch, cublasComputeType_t, cublasGemmAlgo_t) {
    BEGIN_CALL(handle);
    product p = {};
    p.a = {const_cast<void *>(a), type_a, op_a, m, k, lda, stride_a};
    p.b = {const_cast<void *>(b), type_b, op_b, k, n, ldb, stride_b};
    p.c = {c, type_c, CUBLAS_OP_N, m, n, ldc, stride_c};
    p.alpha = alpha;
    p.beta = beta;
    p.batch = batch;
    if (!p.a.ok() || !p.b.ok() || !p.c.ok() || batch < 0 || type_a != type_b || !alpha || !beta)
        return CUBLAS_STATUS_INVALID_VALUE;
    return issue_product(handle, p, __func__);
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                            cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c,
                                      type_c, ldc, 0, 1, compute, algorithm);
}
