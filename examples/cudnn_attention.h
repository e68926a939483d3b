/* cudnn_attention.h - attention by cuDNN, behind cf_attention_backend - MIT or public domain

   Not yet run on a device. Needs cuDNN 9.6 and the headers of cudnn-frontend 1.x (on PyPI: nvidia-cudnn-cu13 and
   nvidia-cudnn-frontend). One object serves one device and one cf_attention_desc.

   It takes chunks of one slice: those of long sequences, where attention costs most, and long documents alone. cuDNN
   makes a plan for each shape, which takes almost a second. So lengths must be multiples of 64, as in all chunks of a
   chain except its last.

   chunkflow_cuda.cu does the rest: packed documents, fp32, sinks, softcap, attention without a causal mask, and head
   sizes above 128, except on devices of 9.0: the backwards of others refuse some or all of these sizes. dK and dV in 16
   bits and cuDNN's workspace come from the stream's memory pool. */

#ifndef CUDNN_ATTENTION_H
#define CUDNN_ATTENTION_H

#include <cudnn_frontend.h>

#include <map>

namespace fe = cudnn_frontend;
typedef std::vector<int64_t> cudnn_shape; /* queries, keys; 1 for a backward */
typedef std::shared_ptr<fe::graph::Graph> cudnn_graph;
enum { CUDNN_Q = 1, CUDNN_K, CUDNN_V, CUDNN_OUT, CUDNN_LSE, CUDNN_DOUT, CUDNN_DQ, CUDNN_DK, CUDNN_DV, CUDNN_END };

struct cudnn_attention : cf_attention_backend {
    cudnnHandle_t handle;
    std::map<cudnn_shape, cudnn_graph> graphs;
    ~cudnn_attention() { (void)cudnnDestroy(handle); }
};

static int cudnn_takes(void *, const cf_attention *a) {
    const cf_attention_desc &d = a->desc;
    return d.n_slices == 1 && d.starts_q[0] == 0 && d.starts_k[0] == 0 && a->rows_q % 64 == 0 && a->rows_k % 64 == 0 &&
           d.dtype != CF_DTYPE_FP32 && d.softcap == 0 && !d.full && (d.head_size <= 128 || d.arch == 90);
}

static cudnn_graph cudnn_describe(const cf_attention_desc &d, const cudnn_shape &n, const cf_tensor *arrays) {
    using namespace fe::graph;
    const auto g = std::make_shared<Graph>();
    const auto describe = [&](Tensor_attributes &t, int i) -> Tensor_attributes & {
        const bool of_keys = i == CUDNN_K || i == CUDNN_V || i == CUDNN_DK || i == CUDNN_DV, is_lse = i == CUDNN_LSE;
        const int64_t rows = n[of_keys], heads = of_keys ? d.n_kv_heads : d.n_heads, size = is_lse ? 1 : d.head_size;
        const int64_t row = arrays[i].row_stride ? arrays[i].row_stride : heads * size;
        const int64_t head = arrays[i].head_stride ? arrays[i].head_stride : size;
        if (is_lse) t.set_data_type(fe::DataType_t::FLOAT);
        return t.set_uid(i).set_dim({1, heads, rows, size}).set_stride({rows * heads * size, head, row, 1});
    };
    const auto in = [&](int i) { Tensor_attributes t; return g->tensor(describe(t, i)); };
    const auto masked = [&](auto options) {
        options.set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT).set_diagonal_band_right_bound(0);
        if (d.window > 0 && d.window < n[1]) options.set_diagonal_band_left_bound((int)d.window);
        return options.set_attn_scale((float)d.scale);
    };
    g->set_io_data_type(d.dtype == CF_DTYPE_FP16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16);
    g->set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    const auto q = in(CUDNN_Q), k = in(CUDNN_K), v = in(CUDNN_V);
    if (n[2] == 0) {
        const auto made = g->sdpa(q, k, v, masked(SDPA_attributes().set_generate_stats(true)));
        for (size_t i = 0; i < 2; i++) describe(*made[i], CUDNN_OUT + (int)i).set_output(true);
    } else {
        const auto options = SDPA_backward_attributes().set_deterministic_algorithm(d.deterministic != 0);
        const auto made = g->sdpa_backward(q, k, v, in(CUDNN_OUT), in(CUDNN_DOUT), in(CUDNN_LSE), masked(options));
        for (size_t i = 0; i < 3; i++) describe(*made[i], CUDNN_DQ + (int)i).set_output(true);
    }
    return g;
}

static cf_result cudnn_attend(void *user, int backward, const cf_attention *a, const cf_attention_tensors *x,
                              cf_cuda_stream stream, cf_error *error) {
    cudnn_attention *const own = (cudnn_attention *)user;
    const cudnn_shape n = {a->rows_q, a->rows_k, backward};
    const int64_t keys = backward ? n[1] * a->desc.n_kv_heads * a->desc.head_size * 2 : 0; /* bytes of dK, and of dV */
    const cf_tensor none = {}, lse = {x->lse, 1, n[0]};
    cf_tensor arrays[CUDNN_END] = {none, x->q, x->k, x->v, x->out, lse, x->dout, x->dq, none, none};
    cudnn_graph &g = own->graphs[n];
    fe::error_t said;
    int64_t room = 0;
    if (!g) said = (g = cudnn_describe(a->desc, n, arrays))->build(own->handle, {fe::HeurMode_t::A});
    if (said.is_good()) said = g->get_workspace_size(room);
    char *memory = NULL;
    if (said.is_good() && (cudnnSetStream(own->handle, stream) != CUDNN_STATUS_SUCCESS ||
                           cudaMallocAsync((void **)&memory, (size_t)(2 * keys + room + 1), stream) != cudaSuccess))
        return cf_refuse(error, CF_ERROR_DEVICE, "cudnn", -1, "there is no memory for a pass, or no stream");
    arrays[CUDNN_DK].data = memory, arrays[CUDNN_DV].data = memory + keys;
    std::unordered_map<int64_t, void *> pack;
    for (int i = CUDNN_Q; i < (backward ? CUDNN_END : CUDNN_DOUT); i++) pack[i] = arrays[i].data;
    if (said.is_good()) said = g->execute(own->handle, pack, memory + 2 * keys);
    cf_result code = CF_OK;
    if (said.is_bad()) code = cf_refuse(error, CF_ERROR_DEVICE, "cudnn", -1, said.get_message().c_str());
    if (code == CF_OK && backward) code = cf_attention_add(a, &arrays[CUDNN_DK], &arrays[CUDNN_DV], x, stream, error);
    if (memory) (void)cudaFreeAsync(memory, stream);
    return code;
}

static cudnn_attention *cudnn_attention_new() {
    cudnn_attention *const own = new cudnn_attention{{NULL, cudnn_takes, cudnn_attend}, NULL, {}};
    own->user = own;
    if (cudnnCreate(&own->handle) != CUDNN_STATUS_SUCCESS) fail(EXIT_CHECK_FAILED, "cudnnCreate: there is no cuDNN");
    return own;
}

#endif /* CUDNN_ATTENTION_H */
