/* cuda_emu_device.h - the instructions of chunkflow_cuda.cu (>>device) under the emulation - MIT or public domain

   Included there, in place of the functions with assembly, each of which has its meaning in a comment. */

#define CF_UNROLL
#define CF_ROLLED
#define CF_HOPPER 1
#ifndef CHUNKFLOW_CUDA_VARIANTS
#define CHUNKFLOW_CUDA_VARIANTS
#endif

inline void name_launch(const char *name) { cuda_emu_name_next_launch(name); }
CF_DEVICE shared_address shared_start() { return 0; }
CF_DEVICE void shared_store_4(shared_address to, uint32_t value) { cuda_emu_shared_store(to, &value, 4); }
CF_DEVICE void shared_store_8(shared_address to, uint2 value) { cuda_emu_shared_store(to, &value, 8); }

[[maybe_unused]] CF_DEVICE void shared_store_16(shared_address to, uint4 value) {
    cuda_emu_shared_store(to, &value, 16);
}

CF_DEVICE float shared_load_float(shared_address from) {
    float value;
    cuda_emu_shared_load(&value, from, 4);
    return value;
}

CF_DEVICE uint2 shared_load_8(shared_address from) {
    uint2 value;
    cuda_emu_shared_load(&value, from, 8);
    return value;
}

CF_DEVICE uint4 shared_load_16(shared_address from) {
    uint4 value;
    cuda_emu_shared_load(&value, from, 16);
    return value;
}

CF_DEVICE void ldmatrix_x4(uint32_t (&to)[4], shared_address row) { cuda_emu_ldmatrix_x4(to, row, false); }
CF_DEVICE void ldmatrix_x4_transposed(uint32_t (&to)[4], shared_address row) { cuda_emu_ldmatrix_x4(to, row, true); }

template <typename T> CF_DEVICE void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <> CF_DEVICE void mma_16x8x16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    cuda_emu_mma_16x8x16(c, a, b, true);
}

template <> CF_DEVICE void mma_16x8x16<__half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    cuda_emu_mma_16x8x16(c, a, b, false);
}

CF_DEVICE void copy_async_16(shared_address to, const void *from, bool wanted) {
    cuda_emu_cp_async(to, from, 16, wanted ? 16 : 0);
}

CF_DEVICE void copy_async_commit() { cuda_emu_cp_async_commit(); }
template <int LEFT> CF_DEVICE void copy_async_wait() { cuda_emu_cp_async_wait(LEFT); }
CF_DEVICE float exp2_fast(float x) { return std::exp2(x); }
CF_DEVICE float reciprocal_fast(float x) { return 1.0f / x; }
CF_DEVICE int compute_here(int x) { return x; }

CF_DEVICE uint4 global_load_16(const void *from) {
    if (!cuda_emu_check_global(from, 16)) return make_uint4(0, 0, 0, 0);
    return *static_cast<const uint4 *>(from);
}

CF_DEVICE void global_store_16(void *to, uint4 value) {
    if (!cuda_emu_check_global(to, 16)) return;
    *static_cast<uint4 *>(to) = value;
}

CF_DEVICE void global_update_8(float *to, float x, float y, bool overwrite, bool wanted) {
    if (!wanted || !cuda_emu_check_global(to, 8)) return;
    to[0] = (overwrite ? 0.0f : to[0]) + x;
    to[1] = (overwrite ? 0.0f : to[1]) + y;
}

CF_DEVICE bool adds_quads() { return cuda_emu_arch() >= 90; }
CF_HOPPER_DEVICE void mbarrier_init(shared_address barrier, int arrivals) { cuda_emu_mbarrier_init(barrier, arrivals); }
CF_HOPPER_DEVICE void fence_mbarrier_init() { cuda_emu_fence_mbarrier_init(); }
CF_HOPPER_DEVICE void mbarrier_arrive(shared_address barrier) { cuda_emu_mbarrier_arrive(barrier); }

CF_HOPPER_DEVICE void mbarrier_arrive_expect(shared_address barrier, int bytes) {
    cuda_emu_mbarrier_arrive_expect(barrier, bytes);
}

CF_HOPPER_DEVICE void mbarrier_wait(shared_address barrier, int parity) { cuda_emu_mbarrier_wait(barrier, parity); }
CF_HOPPER_DEVICE void fence_proxy_async() { cuda_emu_fence_proxy_async(); }
template <int ID, int THREADS> CF_DEVICE void named_barrier() { cuda_emu_named_barrier(ID, THREADS, true); }
template <int THREADS> CF_DEVICE void named_barrier(int id) { cuda_emu_named_barrier(id, THREADS, true); }
template <int THREADS> CF_DEVICE void named_barrier_arrive(int id) { cuda_emu_named_barrier(id, THREADS, false); }
template <int N> CF_DEVICE void give_registers_back() { cuda_emu_setmaxnreg(N, false); }
template <int N> CF_DEVICE void take_registers() { cuda_emu_setmaxnreg(N, true); }

CF_HOPPER_DEVICE void copy_box(shared_address to, const CUtensorMap *map, int x, int y, int z, shared_address barrier) {
    const int at[3] = {x, y, z};
    cuda_emu_bulk_tensor(to, map, 3, at, barrier);
}

CF_HOPPER_DEVICE void copy_bulk(shared_address to, const void *from, int bytes, shared_address barrier) {
    cuda_emu_bulk_copy(to, from, bytes, barrier);
}

CF_HOPPER_DEVICE void stmatrix_x4(shared_address row, const uint32_t (&from)[4]) {
    cuda_emu_stmatrix_x4(row, from, false);
}

CF_HOPPER_DEVICE void wgmma_fence() { cuda_emu_wgmma_fence(); }
CF_HOPPER_DEVICE void wgmma_commit() { cuda_emu_wgmma_commit(); }
template <int LEFT> CF_DEVICE void wgmma_wait() { cuda_emu_wgmma_wait(LEFT); }
CF_HOPPER_DEVICE void keep_order() {}
template <int N> CF_DEVICE void hold_registers(float (&c)[N][4]) { (void)c; }
template <int N> CF_DEVICE void hold_registers(uint32_t (&a)[N][4]) { (void)a; }

template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, int N>
CF_HOPPER_DEVICE void wgmma_shared(float (&c)[N][4], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 8 || N == 16, "64 or 128 columns");
    cuda_emu_wgmma({&c[0][0], 8 * N, nullptr, a, b, add, A_TRANSPOSED, B_TRANSPOSED, IS_BF16<T>});
}

template <typename T, bool B_TRANSPOSED, int N>
CF_HOPPER_DEVICE void wgmma_registers(float (&c)[N][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(N == 8 || N == 16, "64 or 128 columns");
    cuda_emu_wgmma({&c[0][0], 8 * N, a, 0, b, add, false, B_TRANSPOSED, IS_BF16<T>});
}
