/* Checks the graphs of examples/cudnn_attention.h with the real cudnn-frontend and cuDNN, without a device. They are
   compiled with these libraries' headers, and validated as far as cuDNN does before it makes a plan. cudnn_check.sh
   builds this. */

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_CUDA_HEADER_ONLY
#include "../../chunkflow_cuda.cu"

#include "../../examples/base.h"
#include "../../examples/cudnn_attention.h"

extern "C" {

/* A fake device for the checks. These definitions take precedence over the CUDA runtime's own. */
static int major_version = 9;
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *of, int) {
    return *of = {}, of->major = major_version, of->multiProcessorCount = 132, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int) {
    return *value = what == cudaDevAttrComputeCapabilityMajor ? major_version : 0, cudaSuccess;
}

/* No kernel runs here. */
cf_result cf_attention_add(const cf_attention *, const cf_tensor *, const cf_tensor *, const cf_attention_tensors *,
                           cf_cuda_stream, cf_error *) {
    return CF_OK;
}

} /* extern "C" */

static int left = 0; /* graphs that the adapter leaves to chunkflow_cuda.cu */

/* Returns the fault of the graph; empty if there is none. */
static std::string judge(int64_t head_size, int options, int64_t backward) {
    cf_attention_desc d = {};
    d.n_heads = 8, d.n_kv_heads = options & 1 ? 2 : 8, d.head_size = head_size, d.scale = 0.1;
    d.dtype = options & 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
    d.deterministic = options & 4, d.window = options & 8 ? 100 : 0;
    const int32_t zero = 0;
    d.n_slices = 1, d.starts_q = d.starts_k = &zero, d.arch = 10 * major_version;
    cf_attention a = {};
    a.desc = d, a.rows_q = 256, a.rows_k = 1024;
    if (!cudnn_takes(NULL, &a)) return left++, "";
    cf_tensor arrays[CUDNN_END] = {};
    for (const int i : {CUDNN_Q, CUDNN_K, CUDNN_V}) arrays[i].row_stride = (8 + 2 * d.n_kv_heads) * head_size;
    arrays[CUDNN_LSE] = {NULL, 1, 256};
    fe::error_t said = cudnn_describe(d, {256, 1024, backward}, arrays)->validate();
    return said.is_good() ? "" : said.get_message();
}

int main(int argc, char **) {
    int passed = 0, failed = 0;
    if (argc > 1) delete cudnn_attention_new();
    if (judge(100, 0, 0).empty()) printf("a head size of 100 is taken\n"), failed++;
    for (const int version : {8, 9, 10, 12})
        for (const int64_t head_size : {64, 128, 192, 256})
            for (int options = 0; options < 16; options++)
                for (int64_t backward = 0; backward < 2; backward++) {
                    major_version = version;
                    const std::string fault = judge(head_size, options, backward);
                    (fault.empty() ? passed : failed)++;
                    if (!fault.empty())
                        printf("%d.0, head size %d, options %d, pass %d: %s\n", version, (int)head_size, options,
                               (int)backward, fault.c_str());
                }
    if (left != 3 * 2 * 16 * 2) printf("%d are left to chunkflow_cuda.cu\n", left), failed++;
    printf("%d passed, %d failed\n", passed - left, failed);
    return failed > 0;
}
