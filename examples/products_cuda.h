/* products_cuda.h - matrix products of row-major arrays by cuBLASLt, with one choice of algorithm per shape - MIT or
   public domain

   A weight is (outputs, inputs), as in Hugging Face files. cuBLASLt is column-major, so it gets the transpose of each
   product here; no array is copied or transposed. Arrays must begin at multiples of 256 bytes. */

#ifndef TRAIN_PRODUCTS_CUDA_H
#define TRAIN_PRODUCTS_CUDA_H

#include "model_cuda.h"

#include <cublasLt.h>

/* A column-major product D (m, n) = op(A) (m, k) op(B) (k, n) + bias or C, all without gaps; sums are in float. */
typedef struct product_shape {
    cublasOperation_t op_a, op_b;
    cudaDataType in, out;
    int64_t m, n, k;
    int64_t has_bias;
} product_shape;

typedef struct product_choice {
    product_shape shape; /* m 0: there is none */
    cublasLtMatmulAlgo_t algorithm;
} product_choice;

#define PRODUCT_CHOICES 1024              /* a power of two */
#define PRODUCT_WORKSPACE ((size_t)32 << 20) /* cuBLAS's size on sm_90; half is enough on sm_80 */

typedef struct products {
    cublasLtHandle_t handle;
    char *workspace;
    product_choice *choices; /* (PRODUCT_CHOICES) by hash of the shape; emptied when three quarters full */
    int64_t n_choices, n_searched;
} products;

static products products_new(void) {
    products p = {NULL, take_device<char>((int64_t)PRODUCT_WORKSPACE), TAKE(product_choice, PRODUCT_CHOICES), 0, 0};
    MUST_CUBLAS(cublasLtCreate(&p.handle));
    return p;
}

static void products_free(products *p) {
    MUST_CUBLAS(cublasLtDestroy(p->handle));
    MUST_CUDA(cudaFree(p->workspace));
    free(p->choices);
    memset(p, 0, sizeof *p);
}

/* cuBLASLt's descriptions of one product, on the stack. */
typedef struct product_layouts {
    cublasLtMatmulDescOpaque_t what;
    cublasLtMatrixLayoutOpaque_t a, b, d;
} product_layouts;

static cublasStatus_t describe_product(const product_shape *s, const void *bias, product_layouts *l) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const int64_t rows_a = s->op_a == CUBLAS_OP_N ? s->m : s->k, rows_b = s->op_b == CUBLAS_OP_N ? s->k : s->n;
    const uint64_t m = (uint64_t)s->m, n = (uint64_t)s->n;
    const cublasStatus_t all[] = {
        cublasLtMatmulDescInit(&l->what, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        cublasLtMatmulDescSetAttribute(&l->what, CUBLASLT_MATMUL_DESC_TRANSA, &s->op_a, sizeof s->op_a),
        cublasLtMatmulDescSetAttribute(&l->what, CUBLASLT_MATMUL_DESC_TRANSB, &s->op_b, sizeof s->op_b),
        cublasLtMatrixLayoutInit(&l->a, s->in, (uint64_t)rows_a, (uint64_t)(s->m * s->k / rows_a), rows_a),
        cublasLtMatrixLayoutInit(&l->b, s->in, (uint64_t)rows_b, (uint64_t)(s->n * s->k / rows_b), rows_b),
        cublasLtMatrixLayoutInit(&l->d, s->out, m, n, s->m),
        !bias ? CUBLAS_STATUS_SUCCESS
              : cublasLtMatmulDescSetAttribute(&l->what, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
        !bias ? CUBLAS_STATUS_SUCCESS
              : cublasLtMatmulDescSetAttribute(&l->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
    };
    for (const cublasStatus_t status : all)
        if (status != CUBLAS_STATUS_SUCCESS) return status;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t search_algorithm(products *p, product_layouts *l, cublasLtMatmulAlgo_t *out) {
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t best;
    const uint64_t bytes = PRODUCT_WORKSPACE;
    int found = 0;
    cublasStatus_t status = cublasLtMatmulPreferenceInit(&preference);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                      sizeof bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(p->handle, &l->what, &l->a, &l->b, &l->d, &l->d, &preference, 1, &best,
                                                &found);
    if (status == CUBLAS_STATUS_SUCCESS && found == 0) status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (status == CUBLAS_STATUS_SUCCESS) *out = best.algo;
    return status;
}

/* Returns the choice for a shape, or the empty entry for it. */
static product_choice *find_choice(const products *p, const product_shape *shape) {
    uint64_t place = hash_bytes(0, shape, sizeof *shape);
    for (;; place++) {
        product_choice *choice = &p->choices[place % PRODUCT_CHOICES];
        if (choice->shape.m == 0 || memcmp(&choice->shape, shape, sizeof *shape) == 0) return choice;
    }
}

static cublasStatus_t choose_algorithm(products *p, const product_shape *shape, product_layouts *l,
                                       const cublasLtMatmulAlgo_t **out) {
    product_choice *choice = find_choice(p, shape);
    if (choice->shape.m == 0) {
        cublasLtMatmulAlgo_t algorithm;
        const cublasStatus_t status = search_algorithm(p, l, &algorithm);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        if (4 * ++p->n_choices > 3 * PRODUCT_CHOICES) {
            memset(p->choices, 0, PRODUCT_CHOICES * sizeof *p->choices);
            p->n_choices = 1;
            choice = find_choice(p, shape);
        }
        p->n_searched++;
        choice->shape = *shape;
        choice->algorithm = algorithm;
    }
    *out = &choice->algorithm;
    return CUBLAS_STATUS_SUCCESS;
}

/* Computes D = op(A) op(B) + c (NULL: 0; it may be d) or + bias, one number for each of D's rows. */
static cublasStatus_t multiply(products *p, const product_shape *shape, const void *a, const void *b, const void *bias,
                               const void *c, void *d, cudaStream_t stream) {
    const float one = 1, beta = c ? 1 : 0;
    const cublasLtMatmulAlgo_t *algorithm = NULL;
    product_layouts l;
    cublasStatus_t status = describe_product(shape, bias, &l);
    if (status == CUBLAS_STATUS_SUCCESS) status = choose_algorithm(p, shape, &l, &algorithm);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatmul(p->handle, &l.what, &one, a, &l.a, b, &l.b, &beta, c ? c : d, &l.d, d, &l.d, algorithm,
                          p->workspace, PRODUCT_WORKSPACE, stream);
}

#endif /* TRAIN_PRODUCTS_CUDA_H */
