/* check_cuda.h - compares the executor's gradients with those of unchunked training - MIT or public domain

   There are two other ways to a batch's gradients: the same passes on whole sequences, without executor, plan or
   chunks; and model.h on the CPU in float64, which shares no code with the kernels. */

#ifndef TRAIN_CHECK_CUDA_H
#define TRAIN_CHECK_CUDA_H

#include "model_cuda.h"
#include "unchunked.h"

/* ================================================================================================================
   >>unchunked    the same passes without executor, plan or chunks: every sequence whole, one after the other
   ================================================================================================================ */

/* Describes the model's attention; its slices come from the executor, or from below. It is deterministic in training,
   so that --check can compare the bits of two runs. */
static cf_attention_desc attention_desc_of(const model_config *c, cf_dtype type, cf_attention_path path,
                                           int deterministic) {
    cf_attention_desc a;
    memset(&a, 0, sizeof a);
    a.n_heads = c->heads;
    a.n_kv_heads = c->kv_heads;
    a.head_size = head_dim_of(c);
    a.dtype = type;
    a.path = path;
    a.deterministic = deterministic;
    return a;
}

/* Returns the rows of a block of a ring of so many bytes. The ring holds K, V and their gradients of one layer. 0:
   there is no ring. */
static inline int64_t block_rows_of(const model_config *c, cf_dtype type, int64_t ring_bytes) {
    const int64_t number = type == CF_DTYPE_FP32 ? 4 : 2, row = 2 * (number + 4) * kv_width_of(c);
    const int64_t rows = ring_bytes / (CF_STATE_SLOTS * row);
    if (ring_bytes > 0 && rows == 0)
        fail(EXIT_BAD_INPUT, "--stream must be 0 or at least %lld: %d rows of one layer",
             (long long)(CF_STATE_SLOTS * row), CF_STATE_SLOTS);
    return rows;
}

/* Describes synthetic documents that begin alike. make_alike below then changes their tokens. */
static inline void share_documents(cf_pack_desc *packing, const length_list *lengths, const length_list *with,
                                   const length_list *shared) {
    const int64_t n = with->count;
    packing->min_shared_prefix = n > 0;
    check_alike(lengths, with, shared);
    cf_shared_prefix *shares = n > 0 ? TAKE(cf_shared_prefix, n) : NULL;
    for (int64_t i = 0; i < n; i++) shares[i] = {with->lengths[i], shared->lengths[i]};
    packing->shared_prefixes = shares;
}

/* Makes documents begin alike; `first` has the beginning of each. */
template <typename N>
static void copy_shared(N *tokens, const int64_t *first, const cf_shared_prefix *shares, int64_t n_documents) {
    for (int64_t i = 0; i < n_documents && shares; i++)
        memcpy(tokens + first[i], tokens + first[shares[i].with], (size_t)shares[i].tokens * sizeof *tokens);
}

/* Adds the gradients of one sequence's summed losses to the part's, which is the whole model. Returns the sum of
   losses. */
template <typename T>
static double sequence_gradients(part *whole, const batch *b, int64_t sequence, const cf_attention_desc *base) {
    const int64_t n = b->length[sequence], first_row = 0;
    const cf_cuda_stage needs = stage_needs<T>(whole);
    int32_t cu_seqlens[2] = {0, (int32_t)n}, *ids = TAKE(int32_t, 4 * n + 1), n_targets = 0;
    for (int64_t i = 0; i < n; i++) {
        ids[i] = (int32_t)i;
        ids[n + i] = b->tokens[sequence][i];
        ids[2 * n + i] = n_targets;
        if (batch_target(b, sequence, i) >= 0) ids[3 * n + 1 + n_targets++] = batch_target(b, sequence, i);
    }
    ids[3 * n] = n_targets;
    int32_t *const device_ids = take_device<int32_t>(4 * n + 1);
    upload(device_ids, ids, 4 * n + 1);
    whole->tokens = device_ids + n;
    whole->first_target = device_ids + 2 * n;
    whole->targets = device_ids + 3 * n + 1;
    whole->loss = take_device<float>(n);
    whole->first_row = &first_row;

    cf_attention_desc attention = *base;
    const cf_attention *prepared = NULL;
    size_t bytes = 0;
    attention.n_slices = 1;
    attention.cu_seqlens_q = attention.cu_seqlens_k = cu_seqlens;
    MUST(cf_attention_size(&attention, &bytes, &error));
    void *memory = take_memory((int64_t)bytes, 1);
    MUST(cf_attention_prepare(&attention, memory, bytes, &prepared, &error));
    char *tiles = take_device<char>((int64_t)prepared->tiles_bytes);
    upload(tiles, (const char *)prepared->tiles, (int64_t)prepared->tiles_bytes);

    cf_chunk chunk;
    cf_step step;
    cf_cuda_step cuda;
    cf_error error;
    memset(&chunk, 0, sizeof chunk);
    memset(&step, 0, sizeof step);
    memset(&cuda, 0, sizeof cuda);
    chunk.tokens = chunk.rows = n;
    step.wants_loss = 1;
    cuda.step = &step;
    cuda.chunk = &chunk;
    cuda.error = &error;
    cuda.attention = prepared;
    cuda.tiles = tiles;
    cuda.positions = device_ids;
    cuda.activations = take_device<char>(needs.activation_bytes + n * needs.activation_bytes_per_token);
    cuda.workspace = take_device<char>(max_of(needs.forward_bytes + n * needs.forward_bytes_per_token,
                                              needs.backward_bytes + n * needs.backward_bytes_per_token));
    cuda.attention_workspace_bytes = cf_layer_attention_bytes(prepared, n);
    cuda.attention_workspace = take_device<char>((int64_t)cuda.attention_workspace_bytes);
    const cf_state state = {NULL, n_layers_of(whole), base->n_kv_heads, base->head_size, n, whole->type, 0};
    const int64_t state_numbers = n * n_layers_of(whole) * 2 * kv_width(whole);
    cuda.state = cuda.gradient = state;
    cuda.state.data = take_device<T>(state_numbers);
    cuda.gradient.data = take_device<float>(state_numbers);
    cuda.gradient.dtype = CF_DTYPE_FP32;
    cuda.overwrite = 1;
    MUST_CUDA(cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking));
    MUST_CUBLAS(cublasSetStream(whole->cublas, cuda.stream));

    step.action.pass = CF_F;
    int failed = part_forward<T>(whole, &cuda);
    step.action.pass = CF_B;
    if (!failed) failed = part_backward<T>(whole, &cuda);
    if (failed) fail(EXIT_CHECK_FAILED, "unchunked: %s", error.text);
    MUST_CUDA(cudaStreamSynchronize(cuda.stream));
    float *loss = download(whole->loss, n);
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)loss[i];

    void *const all[] = {device_ids, whole->loss, tiles, cuda.activations, cuda.workspace, cuda.attention_workspace,
                         cuda.state.data, cuda.gradient.data};
    for (void *one : all) MUST_CUDA(cudaFree(one));
    whole->tokens = whole->first_target = whole->targets = NULL;
    whole->loss = NULL;
    MUST_CUDA(cudaStreamDestroy(cuda.stream));
    free(loss);
    free(ids);
    free(memory);
    return sum;
}

/* Copies a part's gradients from the device into model.h's layout. A pass adds gradients of summed losses; times the
   batch's loss weight they are those of the mean. */
static void download_gradient(const part *p, const weights *to, const batch *b) {
    const double scale = batch_loss_weight(b);
    MUST_CUDA(cudaSetDevice(p->device));
    float *gradient = download(p->gradient, p->at.count);
    each_number(p, to, gradient, [=](real *host, const float *own) { *host = (real)*own * scale; });
    free(gradient);
}

/* Runs the whole model on one device, with all keys at a time. Fills in `gradient` and returns the loss. */
template <typename T>
static double unchunked_on_device(const model_config *c, weights *w, const weights *gradient, const batch *b,
                                  int device, const cf_attention_desc *attention) {
    cublasHandle_t cublas = NULL;
    int64_t longest = 1;
    double sum = 0;
    for (int64_t i = 0; i < b->count; i++) longest = max_of(longest, b->length[i]);
    MUST_CUDA(cudaSetDevice(device));
    MUST_CUBLAS(cublasCreate(&cublas));
    part whole = part_new<T>(c, stage_of(c, 0, 1), device, attention->dtype, cublas, w, longest);
    for (int64_t i = 0; i < b->count; i++) {
        if (b->length[i] > 0) sum += sequence_gradients<T>(&whole, b, i, attention);
    }
    download_gradient(&whole, gradient, b);
    part_free(&whole);
    MUST_CUBLAS(cublasDestroy(cublas));
    return sum * batch_loss_weight(b);
}

/* Returns |a - b| / |b| as vectors; infinite if a number is not finite, or if only b is all zero. */
static double relative_distance(const real *a, const real *b, int64_t count) {
    double difference = 0, length = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        length += b[i] * b[i];
    }
    if (!(difference - difference == 0) || !(length - length == 0)) return INFINITY;
    return difference == 0 ? 0 : length > 0 ? sqrt(difference / length) : INFINITY;
}

/* Returns the largest relative difference of the losses and of the tensors that `owned` marks, and the tensor's
   name. */
static double largest_difference(const weights *a, const weights *b, const char *owned, double loss_a, double loss_b,
                                 const char **whose) {
    const real losses[2] = {loss_a, loss_b};
    double largest = relative_distance(&losses[0], &losses[1], 1);
    *whose = "loss";
    for (int64_t i = 0; i < a->n_tensors; i++) {
        const tensor *t = &a->tensors[i];
        const double distance = owned[i] ? relative_distance(a->flat + t->offset, b->flat + t->offset, t->count) : 0;
        if (distance <= largest) continue;
        largest = distance;
        *whose = t->name;
    }
    return largest;
}

/* Prints the difference; returns whether it is within the limit. */
static int compare_gradients(const char *with, const weights *a, const weights *b, const char *owned, double loss_a,
                             double loss_b, double limit) {
    const char *whose;
    const double difference = largest_difference(a, b, owned, loss_a, loss_b, &whose);
    const int ok = difference <= limit;
    printf("  %-34s largest relative difference %.1e (%s), limit %.0e: %s\n", with, difference, whose, limit,
           ok ? "ok" : "NOT OK");
    return ok;
}

#endif /* TRAIN_CHECK_CUDA_H */
