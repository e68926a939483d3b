/* A file that only calls what chunkflow_cuda.cu declares, where no header of CUDA need be. */

#define CHUNKFLOW_CUDA_HEADER_ONLY
#include "chunkflow_cuda.cu"

#ifdef __cplusplus
extern "C"
#endif
cf_result attend(const cf_cuda_step *step, cf_attention_tensors *tensors, const cf_layer_attention *layer,
                 cf_error *error);

cf_result attend(const cf_cuda_step *step, cf_attention_tensors *tensors, const cf_layer_attention *layer,
                 cf_error *error) {
    tensors->k = cf_state_k(&step->state, 0, 0);
    tensors->v = cf_state_v(&step->state, 0, 0);
    tensors->tiles = step->tiles;
    tensors->workspace = step->attention_workspace;
    tensors->workspace_bytes = step->attention_workspace_bytes;
    if (layer != NULL) return cf_layer_attention_forward(step, layer, error);
    return cf_attention_forward(step->attention, tensors, step->stream, error);
}
