/* Stands in for cudnn-frontend's header when kernels run on the host: the part of its graphs that
   examples/cudnn_attention.h uses, with attention in float64. Dense arrays alone. What a graph lacks is an error. */

#ifndef CUDNN_FRONTEND_EMU_H
#define CUDNN_FRONTEND_EMU_H

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

#include <cmath>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

enum cudnnStatus_t { CUDNN_STATUS_SUCCESS, CUDNN_STATUS_NOT_INITIALIZED };
struct cudnnContext {
    cudaStream_t stream;
};
typedef cudnnContext *cudnnHandle_t;

inline int64_t cudnn_emu_calls = 0; /* attention that was asked for */

inline cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) { return *handle = new cudnnContext(), CUDNN_STATUS_SUCCESS; }
inline cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return delete handle, CUDNN_STATUS_SUCCESS; }
inline cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
    return handle->stream = stream, CUDNN_STATUS_SUCCESS;
}

/* A stream's pool: of that only the order is here. */
inline cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t) { return cudaMalloc(memory, bytes); }
inline cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) {
    const cudaError_t status = cudaStreamSynchronize(stream);
    return status == cudaSuccess ? cudaFree(memory) : status;
}

namespace cudnn_frontend {

enum class DataType_t { NOT_SET, FLOAT, HALF, BFLOAT16 };
enum class HeurMode_t { A };
enum class DiagonalAlignment_t { TOP_LEFT, BOTTOM_RIGHT };

struct error_t {
    std::string text;
    bool is_good() const { return text.empty(); }
    bool is_bad() const { return !is_good(); }
    std::string get_message() const { return text; }
};

namespace graph {

#define EMU_SET(CLASS, NAME, TYPE)    \
    CLASS &set_##NAME(TYPE value) {   \
        NAME = value;                 \
        return *this;                 \
    }

struct Tensor_attributes {
    int64_t uid = 0;
    std::vector<int64_t> dim, stride;
    DataType_t data_type = DataType_t::NOT_SET;
    bool output = false;
    EMU_SET(Tensor_attributes, uid, int64_t)
    EMU_SET(Tensor_attributes, dim, std::vector<int64_t>)
    EMU_SET(Tensor_attributes, stride, std::vector<int64_t>)
    EMU_SET(Tensor_attributes, data_type, DataType_t)
    EMU_SET(Tensor_attributes, output, bool)
};
typedef std::shared_ptr<Tensor_attributes> tensor_ref;

struct SDPA_attributes {
    float attn_scale = 0;
    DiagonalAlignment_t diagonal_alignment = DiagonalAlignment_t::TOP_LEFT;
    int diagonal_band_left_bound = -1, diagonal_band_right_bound = -1; /* none */
    bool generate_stats = false, deterministic_algorithm = false;
    EMU_SET(SDPA_attributes, attn_scale, float)
    EMU_SET(SDPA_attributes, diagonal_alignment, DiagonalAlignment_t)
    EMU_SET(SDPA_attributes, diagonal_band_left_bound, int)
    EMU_SET(SDPA_attributes, diagonal_band_right_bound, int)
    EMU_SET(SDPA_attributes, generate_stats, bool)
    EMU_SET(SDPA_attributes, deterministic_algorithm, bool)
};
typedef SDPA_attributes SDPA_backward_attributes;

/* An array of a call: numbers by head, row and place in the row. */
struct bound_array {
    Tensor_attributes of;
    char *data;

    char *at(int64_t h, int64_t row, int64_t i, int64_t bytes) const {
        return data + bytes * (h * of.stride[1] + row * of.stride[2] + i * of.stride[3]);
    }
    double get(int64_t h, int64_t row, int64_t i) const {
        if (of.data_type == DataType_t::FLOAT) return *(const float *)at(h, row, i, 4);
        if (of.data_type == DataType_t::HALF) return __half2float(*(const __half *)at(h, row, i, 2));
        return __bfloat162float(*(const __nv_bfloat16 *)at(h, row, i, 2));
    }
    void put(int64_t h, int64_t row, int64_t i, double x) const {
        if (of.data_type == DataType_t::FLOAT) *(float *)at(h, row, i, 4) = (float)x;
        else if (of.data_type == DataType_t::HALF) *(__half *)at(h, row, i, 2) = __float2half_rn((float)x);
        else *(__nv_bfloat16 *)at(h, row, i, 2) = __float2bfloat16_rn((float)x);
    }
};

/* Attention in one call's arrays: q, k, v, then out and lse; in a backward out, dout, lse, then dq, dk, dv. */
struct sdpa_call {
    SDPA_attributes how;
    bool backward;
    std::vector<bound_array> arrays;

    bool sees(int64_t query, int64_t key) const {
        const bool right = how.diagonal_alignment == DiagonalAlignment_t::BOTTOM_RIGHT;
        const int64_t own = query + (right ? arrays[1].of.dim[2] - arrays[0].of.dim[2] : 0);
        return (how.diagonal_band_right_bound < 0 || key <= own + how.diagonal_band_right_bound) &&
               (how.diagonal_band_left_bound < 0 || key > own - how.diagonal_band_left_bound);
    }
    double dot(const bound_array &a, int64_t head_a, int64_t row_a, const bound_array &b, int64_t head_b,
               int64_t row_b) const {
        double sum = 0;
        for (int64_t i = 0; i < a.of.dim[3]; i++) sum += a.get(head_a, row_a, i) * b.get(head_b, row_b, i);
        return sum;
    }
    void run() const {
        const bound_array &q = arrays[0], &k = arrays[1];
        const int64_t heads = q.of.dim[1], group = heads / k.of.dim[1], rows = q.of.dim[2];
        std::vector<double> dk((size_t)(k.of.dim[1] * k.of.dim[2] * k.of.dim[3])), dv = dk;
        for (int64_t h = 0; h < heads; h++)
            for (int64_t row = 0; row < rows; row++)
                if (backward) run_backward(h, h / group, row, dk.data(), dv.data());
                else run_forward(h, h / group, row);
        for (size_t i = 0; backward && i < dk.size(); i++) {
            const int64_t size = k.of.dim[3], row = (int64_t)i / size, n = k.of.dim[2];
            arrays[7].put(row / n, row % n, (int64_t)i % size, dk[i]);
            arrays[8].put(row / n, row % n, (int64_t)i % size, dv[i]);
        }
    }
    void run_forward(int64_t h, int64_t kv, int64_t row) const {
        const bound_array &q = arrays[0], &k = arrays[1], &v = arrays[2], &out = arrays[3];
        double top = -INFINITY, sum = 0;
        std::vector<double> score((size_t)k.of.dim[2], -INFINITY), mean((size_t)v.of.dim[3]);
        for (int64_t key = 0; key < k.of.dim[2]; key++)
            if (sees(row, key)) top = fmax(top, score[(size_t)key] = how.attn_scale * dot(q, h, row, k, kv, key));
        for (int64_t key = 0; key < k.of.dim[2]; key++) {
            const double share = exp(score[(size_t)key] - top);
            sum += share;
            for (size_t i = 0; i < mean.size() && share != 0; i++) mean[i] += share * v.get(kv, key, (int64_t)i);
        }
        for (size_t i = 0; i < mean.size(); i++) out.put(h, row, (int64_t)i, mean[i] / sum);
        arrays[4].put(h, row, 0, top + log(sum));
    }
    void run_backward(int64_t h, int64_t kv, int64_t row, double *dk, double *dv) const {
        const bound_array &q = arrays[0], &k = arrays[1], &v = arrays[2], &out = arrays[3], &dout = arrays[4];
        const double lse = arrays[5].get(h, row, 0), all = dot(out, h, row, dout, h, row);
        const int64_t size = q.of.dim[3];
        std::vector<double> dq((size_t)size);
        for (int64_t key = 0; key < k.of.dim[2]; key++) {
            if (!sees(row, key)) continue;
            const double share = exp(how.attn_scale * dot(q, h, row, k, kv, key) - lse);
            const double slope = share * (dot(dout, h, row, v, kv, key) - all) * how.attn_scale;
            const int64_t at = (kv * k.of.dim[2] + key) * size;
            for (int64_t i = 0; i < size; i++) {
                dq[(size_t)i] += slope * k.get(kv, key, i);
                dk[at + i] += slope * q.get(h, row, i);
                dv[at + i] += share * dout.get(h, row, i);
            }
        }
        for (int64_t i = 0; i < size; i++) arrays[6].put(h, row, i, dq[(size_t)i]);
    }
};

struct Graph {
    DataType_t io_data_type = DataType_t::NOT_SET, intermediate_data_type = DataType_t::NOT_SET,
               compute_data_type = DataType_t::NOT_SET;
    EMU_SET(Graph, io_data_type, DataType_t)
    EMU_SET(Graph, intermediate_data_type, DataType_t)
    EMU_SET(Graph, compute_data_type, DataType_t)
    SDPA_attributes how;
    std::vector<tensor_ref> inputs, outputs;
    bool built = false;

    tensor_ref tensor(const Tensor_attributes &of) { return std::make_shared<Tensor_attributes>(of); }
    std::vector<tensor_ref> sdpa(tensor_ref q, tensor_ref k, tensor_ref v, const SDPA_attributes &of) {
        return take({q, k, v}, 2, of);
    }
    std::vector<tensor_ref> sdpa_backward(tensor_ref q, tensor_ref k, tensor_ref v, tensor_ref out, tensor_ref dout,
                                          tensor_ref lse, const SDPA_attributes &of) {
        return take({q, k, v, out, dout, lse}, 3, of);
    }
    std::vector<tensor_ref> take(const std::vector<tensor_ref> &from, int n_outputs, const SDPA_attributes &of) {
        inputs = from;
        how = of;
        for (int i = 0; i < n_outputs; i++) outputs.push_back(std::make_shared<Tensor_attributes>());
        return outputs;
    }

    error_t build(cudnnHandle_t, const std::vector<HeurMode_t> &) {
        if (compute_data_type != DataType_t::FLOAT || intermediate_data_type != DataType_t::FLOAT)
            return {"sums are not of float"};
        if (inputs.size() == 3 && !how.generate_stats) return {"log-sums are not asked for"};
        for (const tensor_ref &t : outputs)
            if (!t->output) return {"a result is no output"};
        for (const std::vector<tensor_ref> *list : {&inputs, &outputs})
            for (const tensor_ref &t : *list) {
                if (t->uid == 0 || t->dim.size() != 4 || t->stride.size() != 4 || t->dim[0] != 1)
                    return {"an array is not described"};
                if (t->data_type == DataType_t::NOT_SET) t->data_type = io_data_type;
            }
        built = true;
        return {};
    }
    error_t get_workspace_size(int64_t &bytes) const {
        bytes = 1000;
        return built ? error_t() : error_t{"the graph is not built"};
    }
    error_t execute(cudnnHandle_t handle, std::unordered_map<int64_t, void *> &pack, void *workspace) const {
        std::unique_ptr<sdpa_call> call(new sdpa_call{how, inputs.size() > 3, {}});
        if (!built || workspace == NULL) return {"the graph is not built, or has no workspace"};
        for (const std::vector<tensor_ref> *list : {&inputs, &outputs})
            for (const tensor_ref &t : *list) {
                if (pack[t->uid] == NULL) return {"an array is missing"};
                call->arrays.push_back({*t, (char *)pack[t->uid]});
            }
        const cudaError_t status = cudaLaunchHostFunc(
            handle->stream,
            [](void *user) {
                const std::unique_ptr<sdpa_call> own((sdpa_call *)user);
                own->run();
            },
            call.get());
        if (status != cudaSuccess) return {"the stream does not take it"};
        (void)call.release();
        cudnn_emu_calls++;
        return {};
    }
};

} /* namespace graph */

} /* namespace cudnn_frontend */

#endif /* CUDNN_FRONTEND_EMU_H */
