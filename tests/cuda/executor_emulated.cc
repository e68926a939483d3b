/* Runs examples/executor_cuda.cu under the emulation. Its main is renamed and called here, after the environment has
   set up the emulation, and before the emulation's counts are checked. First it checks that the example's --check can
   fail.

       CUDA_EMU_DEVICES=N       so many devices
       CUDA_EMU_POLICY=NAME     the order of the device's work: in-order, immediate, lazy, newest-first, stream-late or
                                random
       CUDA_EMU_CHOICE=N        the policy's stream or seed
       CUDA_EMU_BACKWARDS=1     warps and blocks in descending order
       CUDA_EMU_ARCH=90         another architecture
       CUDA_EMU_WGMMA=1         a run without a product of wgmma fails
       CUDA_EMU_FAIL_CALL=N     the N-th call fails
       CUDA_EMU_FAIL_KERNEL=N   the N-th kernel fails

   A counted fault, or a resource that was not released, turns success into failure. */

#define main executor_cuda_main
#include "../../examples/executor_cuda.cu"
#undef main

/* Checks the comparison that --check uses: it finds a difference, or a NaN, at any place. */
static bool comparison_finds_all() {
    const model_config config = {VOCABULARY, 1, 4, 1, 1, 4, 1, 0, 1e6, 1e-6};
    weights a = weights_new(&config), b = weights_new(&config);
    char *owned = TAKE(char, a.n_tensors);
    const char *whose = NULL;
    bool ok = true;
    for (int64_t i = 0; i < a.n_tensors; i++) owned[i] = 1;
    for (int64_t i = 0; i < a.count; i++) a.flat[i] = b.flat[i] = 1 + (double)(i % 7);
    const auto is = [&](double loss_a, double loss_b, double difference, const char *name) {
        const double got = largest_difference(&a, &b, owned, loss_a, loss_b, &whose);
        ok = ok && (got == difference || fabs(got - difference) < 1e-12) && strcmp(whose, name) == 0;
    };
    is(3, 3, 0, "loss");
    is(3.03, 3, 0.01, "loss");
    for (const double bad : {(double)NAN, (double)INFINITY, -(double)INFINITY}) {
        is(bad, 3, INFINITY, "loss");
        is(3, bad, INFINITY, "loss");
        is(bad, bad, INFINITY, "loss");
    }
    for (int64_t i = 0; i < a.n_tensors; i++) {
        const tensor *t = &a.tensors[i];
        double *const last = a.flat + t->offset + t->count - 1, before = *last;
        *last = NAN;
        is(3, 3, INFINITY, t->name);
        owned[i] = 0;
        is(3, 3, 0, "loss");
        owned[i] = 1;
        *last = before + 1e-3;
        double squares = 0;
        for (int64_t k = 0; k < t->count; k++) squares += b.flat[t->offset + k] * b.flat[t->offset + k];
        is(3, 3, 1e-3 / sqrt(squares), t->name);
        *last = before;
    }
    free(owned);
    weights_free(&a);
    weights_free(&b);
    return ok;
}

/* Checks that exactly one of a chunk's forwards and replays runs the head, and that its backward ends at the embedding.
   A process with only one end of the model cannot check this. */
template <typename T> static bool head_runs_once_a_chunk() {
    const int64_t losses = cuda_emu_launches((const void *)cross_entropy_kernel<T>);
    const int64_t ends = cuda_emu_launches((const void *)embed_backward_kernel<T>);
    if (losses > 0 && ends > 0 && losses != ends)
        fprintf(stderr, "emulation: %lld chunks' heads ran for %lld backwards\n", (long long)losses, (long long)ends);
    return losses == 0 || ends == 0 || losses == ends;
}

static long long asked(const char *name, long long otherwise) {
    const char *value = getenv(name);
    return value ? atoll(value) : otherwise;
}

static bool set_policy(const char *name) {
    static const char *const names[] = {"in-order", "immediate", "lazy", "newest-first", "stream-late", "random"};
    if (!name) return true;
    for (int i = 0; i < 6; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        cuda_emu_set_policy((cuda_emu_policy)i, (uint64_t)asked("CUDA_EMU_CHOICE", 0));
        return true;
    }
    return false;
}

int main(int argc, char **argv) {
    if (!comparison_finds_all()) {
        fprintf(stderr, "emulation: --check overlooks differences\n");
        return 3;
    }
    if (!set_policy(getenv("CUDA_EMU_POLICY"))) {
        fprintf(stderr, "emulation: unknown CUDA_EMU_POLICY\n");
        return 3;
    }
    cuda_emu_set_devices((int)asked("CUDA_EMU_DEVICES", 1));
    cuda_emu_set_order((int)asked("CUDA_EMU_BACKWARDS", 0));
    if (asked("CUDA_EMU_ARCH", 0)) cuda_emu_set_arch((int)asked("CUDA_EMU_ARCH", 0));
    cuda_emu_fail_call(asked("CUDA_EMU_FAIL_CALL", 0), (cudaError_t)719);
    if (asked("CUDA_EMU_FAIL_KERNEL", 0) > 0) cuda_emu_fail_kernel(asked("CUDA_EMU_FAIL_KERNEL", 0), (cudaError_t)719);
    const int code = executor_cuda_main(argc, argv);
    const cuda_emu_live live = cuda_emu_live_objects();
    if (code == 0 && cuda_emu_faults() > 0) {
        fprintf(stderr, "emulation: %lld faults; the first one: %s\n", (long long)cuda_emu_faults(),
                cuda_emu_first_fault());
        return 3;
    }
    if (code == 0 && !(head_runs_once_a_chunk<__nv_bfloat16>() && head_runs_once_a_chunk<__half>())) return 3;
    if (code == 0 && asked("CUDA_EMU_WGMMA", 0) && cuda_emu_total().wgmma == 0) {
        fprintf(stderr, "emulation: nothing was multiplied by wgmma\n");
        return 3;
    }
    const int64_t objects = live.streams + live.events + live.handles + live.communicators;
    if (code == 0 && live.allocations + live.pinned + objects > 0) {
        fprintf(stderr, "emulation: not given back: %lld blocks, %lld pinned, %lld streams, events and handles\n",
                (long long)live.allocations, (long long)live.pinned, (long long)objects);
        return 3;
    }
    return code;
}
