/* Tests attention by blocks of keys, and the state that streams for it. A long sequence goes chunk by chunk through
   forward and backward. Its prefix is either whole on the device, or in host memory and comes block by block through a
   small ring. Both give the same bits and agree with float64 on the sequence in one piece, whatever order the device
   chooses. Runs under the emulation and on a device. */

#include "../harness.h"
#include "device.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#define OK(call) CHECK((call) == cudaSuccess)

/* ---- a chain of chunks ---- */

struct chain_setting {
    cf_dtype dtype = CF_DTYPE_BF16;
    int n_heads = 2, n_kv_heads = 1, head_size = 64, window = 0, n_layers = 2;
    double softcap = 0.0;
    cf_attention_path path = getenv("CHUNKFLOW_TEST_WGMMA") != NULL ? CF_ATTENTION_WGMMA : CF_ATTENTION_MMA;
    bool deterministic = true;
    int arch = 80, processors = 0;
    std::vector<int> own = {20, 20, 20}; /* the sequence's rows in each chunk */
    std::vector<int> documents;          /* whole documents in the last chunk, after the sequence's rows */
    int block_rows = 16, n_slots = 2;
    bool streamed = true;
    bool replays = false; /* every chunk's forward is repeated before its backward */

    int length() const {
        int n = 0;
        for (int rows : own) n += rows;
        return n;
    }
};

/* Returns the sequence in one piece, followed by the documents. */
static host_problem whole_problem(const chain_setting &g) {
    host_problem p;
    p.dtype = g.dtype;
    p.n_heads = g.n_heads, p.n_kv_heads = g.n_kv_heads, p.head_size = g.head_size;
    p.window = g.window, p.softcap = g.softcap;
    p.add_slice(g.length(), g.length());
    for (int rows : g.documents) p.add_slice(rows, rows);
    return p;
}

/* Converts an array to the device's bytes, and back. */
static std::vector<unsigned char> device_bytes(cf_dtype dtype, const float *from, size_t n) {
    const size_t number = dtype == CF_DTYPE_FP32 ? 4 : 2;
    std::vector<unsigned char> to(n * number);
    for (size_t i = 0; i < n; i++) {
        const uint16_t bits = dtype == CF_DTYPE_FP32 ? (uint16_t)0 : to_bits(dtype, from[i]);
        if (dtype == CF_DTYPE_FP32) memcpy(&to[i * 4], &from[i], 4);
        else memcpy(&to[i * 2], &bits, 2);
    }
    return to;
}

static std::vector<double> numbers_of(cf_dtype dtype, const unsigned char *from, size_t n) {
    std::vector<double> to(n);
    for (size_t i = 0; i < n; i++) {
        float x;
        uint16_t bits;
        if (dtype == CF_DTYPE_FP32) {
            memcpy(&x, from + i * 4, 4);
        } else {
            memcpy(&bits, from + i * 2, 2);
            x = from_bits(dtype, bits);
        }
        to[i] = x;
    }
    return to;
}

/* An array of the whole problem on the device, full of NaN at first, with rows of `width` numbers. */
struct rows_array {
    cf_dtype dtype = CF_DTYPE_BF16;
    int rows = 0, width = 0;
    unsigned char *data = nullptr;

    size_t row_bytes() const { return (size_t)width * (dtype == CF_DTYPE_FP32 ? 4 : 2); }
    size_t bytes() const { return row_bytes() * (size_t)rows; }
    void *at(int row) const { return data + (size_t)row * row_bytes(); }
    cf_tensor tensor(int row) const {
        const cf_tensor t = {at(row), 0, 0};
        return t;
    }

    void make(cf_dtype type, int n_rows, int row_width) {
        dtype = type, rows = n_rows, width = row_width;
        OK(cudaMalloc((void **)&data, bytes() + 16));
        OK(cudaMemset(data, 0xFF, bytes() + 16));
    }
    void put(const std::vector<float> &from) const {
        const std::vector<unsigned char> bits = device_bytes(dtype, from.data(), (size_t)rows * (size_t)width);
        OK(cudaMemcpy(data, bits.data(), bits.size(), cudaMemcpyHostToDevice));
    }
    std::vector<unsigned char> get() const {
        std::vector<unsigned char> to(bytes());
        OK(cudaMemcpy(to.data(), data, to.size(), cudaMemcpyDeviceToHost));
        return to;
    }
};

/* A prepared problem with its tiles on the device. */
struct prepared_tiles {
    std::vector<uint64_t> memory;
    const cf_attention *a = nullptr;
    void *tiles = nullptr;

    void upload() {
        OK(cudaMalloc(&tiles, a->tiles_bytes + 1));
        OK(cudaMemcpy(tiles, a->tiles, a->tiles_bytes, cudaMemcpyHostToDevice));
    }
    ~prepared_tiles() { cudaFree(tiles); }
};

/* A chunk: its first row in the whole problem, its attention and that of its blocks. */
struct chunk_work {
    int row = 0, own = 0, rows = 0; /* rows: with documents */
    prepared_tiles chunk;
    std::vector<prepared_tiles> blocks;
    std::vector<int64_t> first, n;
};

/* What a layer has. */
struct layer_arrays {
    rows_array q, k, v, dout, out, dq, dk, dv, lse;
};

struct chain_run {
    const chain_setting &g;
    host_problem whole;
    int rows = 0;
    std::vector<chunk_work> chunks;
    std::vector<layer_arrays> layers;
    rows_array resident, resident_gradient;        /* planes one after another, if nothing streams */
    rows_array ring, gradient_ring, scratch[2]; /* scratch: packed rows of K and V of a forward, by layer */
    unsigned char *host = nullptr, *host_gradient = nullptr;
    void *workspace = nullptr;
    size_t workspace_bytes = 0;
    cudaStream_t compute = nullptr, in = nullptr, out = nullptr;
    cublasHandle_t cublas = nullptr;
    cf_state_stream *stream = nullptr;
    cf_error error = {};
    bool ok = true;

    explicit chain_run(const chain_setting &setting) : g(setting), whole(whole_problem(setting)) {}
    chain_run(const chain_run &) = delete;
    chain_run &operator=(const chain_run &) = delete;
    ~chain_run();

    void note(cf_result code) { ok = call_ok(code, error) && ok; }
    void make_streams() {
        for (cudaStream_t *s : {&compute, &in, &out}) OK(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
    }
    int kv_width() const { return g.n_kv_heads * g.head_size; }
    cf_state state(void *data, cf_dtype dtype) const {
        cf_state s = {};
        s.data = data, s.n_layers = g.n_layers, s.n_kv_heads = g.n_kv_heads, s.head_size = g.head_size;
        s.dtype = dtype, s.rows = g.length();
        return s;
    }
    void prepare_chunk(chunk_work &c, int prefix, bool last);
    void prepare();
    void make_stream();
    void make_arrays(const std::vector<host_inputs> &inputs);
    cf_attention_tensors tensors_of(const chunk_work &c, int layer) const;
    void attend(const prepared_tiles &p, cf_attention_tensors x, bool backward, bool finish);
    cf_state_pass pass_of(const chunk_work &c, bool backward, bool last) const;
    void walk_blocks(const chunk_work &c, cf_attention_tensors x, int layer, bool backward);
    void resident_blocks(const chunk_work &c, cf_attention_tensors x, int layer, bool backward);
    void copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, int n);
    void forward(const chunk_work &c, bool sends);
    void backward(const chunk_work &c, bool last);
    void run();
};

chain_run::~chain_run() {
    cf_state_stream_free(stream);
    for (layer_arrays &l : layers)
        for (rows_array *a : {&l.q, &l.k, &l.v, &l.dout, &l.out, &l.dq, &l.dk, &l.dv, &l.lse}) cudaFree(a->data);
    for (rows_array *a : {&resident, &resident_gradient, &ring, &gradient_ring, &scratch[0], &scratch[1]})
        cudaFree(a->data);
    cudaFree(workspace);
    cudaFreeHost(host);
    cudaFreeHost(host_gradient);
    if (cublas) cublasDestroy(cublas);
    for (cudaStream_t s : {compute, in, out})
        if (s) cudaStreamDestroy(s);
}

static void *aligned(std::vector<uint64_t> &memory, size_t bytes) {
    memory.resize(bytes / 8 + 3);
    return (void *)(((uintptr_t)memory.data() + 15) / 16 * 16);
}

void chain_run::prepare_chunk(chunk_work &c, int prefix, bool last) {
    std::vector<int32_t> cu = {0, c.own};
    cf_attention_desc d = {};
    size_t bytes = 0;
    c.row = prefix;
    for (size_t i = 0; last && i < g.documents.size(); i++) cu.push_back(cu.back() + g.documents[i]);
    c.rows = cu.back();
    d.n_heads = g.n_heads, d.n_kv_heads = g.n_kv_heads, d.head_size = g.head_size, d.dtype = g.dtype;
    d.n_slices = (int64_t)cu.size() - 1, d.cu_seqlens_q = cu.data(), d.cu_seqlens_k = cu.data();
    d.window = g.window, d.softcap = g.softcap, d.path = g.path, d.deterministic = g.deterministic;
    d.prefix = prefix, d.n_processors = g.processors;
#ifdef CHUNKFLOW_CUDA_EMULATION
    d.arch = g.path == CF_ATTENTION_WGMMA ? 90 : g.arch;
#endif
    note(cf_attention_size(&d, &bytes, &error));
    note(cf_attention_prepare(&d, aligned(c.chunk.memory, bytes), bytes, &c.chunk.a, &error));
    if (!ok) return;
    workspace_bytes = std::max({workspace_bytes, c.chunk.a->forward_bytes, c.chunk.a->backward_bytes});
    int64_t first = 0;
    while (const int64_t n = cf_state_stream_block(g.block_rows, prefix, g.window, (int64_t)c.n.size(), &first))
        c.first.push_back(first), c.n.push_back(n);
    c.blocks.resize(c.n.size());
    for (size_t i = 0; i < c.n.size() && ok; i++) {
        note(cf_attention_block_size(c.chunk.a, c.first[i], c.n[i], &bytes, &error));
        note(cf_attention_block_prepare(c.chunk.a, c.first[i], c.n[i], aligned(c.blocks[i].memory, bytes), bytes,
                                        &c.blocks[i].a, &error));
        const cf_attention *a = c.blocks[i].a;
        if (ok) workspace_bytes = std::max({workspace_bytes, a->forward_bytes, a->backward_bytes});
    }
    if (!ok) return;
    c.chunk.upload();
    for (prepared_tiles &block : c.blocks) block.upload();
}

void chain_run::prepare() {
    int prefix = 0;
    chunks.resize(g.own.size());
    for (size_t i = 0; i < chunks.size() && ok; i++) {
        chunks[i].own = g.own[i];
        prepare_chunk(chunks[i], prefix, i + 1 == chunks.size());
        prefix += g.own[i];
    }
    rows = whole.rows_q();
}

void chain_run::make_stream() {
    cf_state_stream_desc d = {};
    d.state = state(nullptr, g.dtype);
    d.block_rows = g.block_rows, d.n_slots = g.n_slots;
    d.in = in, d.out = out;
    ring.make(g.dtype, g.n_slots * g.block_rows * 2, kv_width());
    gradient_ring.make(CF_DTYPE_FP32, g.n_slots * g.block_rows * 2, kv_width());
    d.ring = ring.data, d.gradient_ring = gradient_ring.data;
    note(cf_state_stream_create(&d, &stream, &error));
}

void chain_run::make_arrays(const std::vector<host_inputs> &inputs) {
    const int width = g.n_heads * g.head_size, planes = 2 * g.n_layers * g.length();
    layers.resize((size_t)g.n_layers);
    for (size_t i = 0; i < layers.size(); i++) {
        layer_arrays &l = layers[i];
        for (rows_array *a : {&l.q, &l.dout, &l.out, &l.dq}) a->make(g.dtype, rows, width);
        for (rows_array *a : {&l.k, &l.v}) a->make(g.dtype, rows, kv_width());
        for (rows_array *a : {&l.dk, &l.dv}) a->make(CF_DTYPE_FP32, rows, kv_width());
        l.lse.make(CF_DTYPE_FP32, g.n_heads, rows);
        l.q.put(inputs[i].q), l.k.put(inputs[i].k), l.v.put(inputs[i].v), l.dout.put(inputs[i].dout);
    }
    for (rows_array &a : scratch) a.make(g.dtype, rows, 2 * kv_width());
    resident.make(g.dtype, planes, kv_width());
    resident_gradient.make(CF_DTYPE_FP32, planes, kv_width());
    if (!g.streamed) OK(cudaMemset(resident_gradient.data, 0, resident_gradient.bytes()));
    OK(cudaMallocHost((void **)&host, resident.bytes() + 1));
    OK(cudaMallocHost((void **)&host_gradient, resident_gradient.bytes() + 1));
    memset(host, 0xFF, resident.bytes() + 1);
    memset(host_gradient, 0xFF, resident_gradient.bytes() + 1);
    OK(cudaMalloc(&workspace, workspace_bytes + 1));
    OK(cudaMemset(workspace, 0xFF, workspace_bytes + 1));
    if (chunks[0].chunk.a->path == CF_ATTENTION_UNFUSED) CHECK(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS);
}

cf_attention_tensors chain_run::tensors_of(const chunk_work &c, int layer) const {
    const layer_arrays &l = layers[(size_t)layer];
    cf_attention_tensors x = {};
    x.q = l.q.tensor(c.row), x.out = l.out.tensor(c.row), x.dout = l.dout.tensor(c.row), x.dq = l.dq.tensor(c.row);
    x.k = l.k.tensor(c.row), x.v = l.v.tensor(c.row), x.dk = l.dk.tensor(c.row), x.dv = l.dv.tensor(c.row);
    x.lse = (float *)l.lse.data + c.row;
    x.lse_stride = rows;
    x.workspace = workspace, x.workspace_bytes = workspace_bytes;
    x.cublas = cublas;
    return x;
}

void chain_run::attend(const prepared_tiles &p, cf_attention_tensors x, bool backward, bool finish) {
    x.tiles = p.tiles;
    x.finish = finish;
    note(backward ? cf_attention_backward(p.a, &x, compute, &error) : cf_attention_forward(p.a, &x, compute, &error));
}

cf_state_pass chain_run::pass_of(const chunk_work &c, bool backward, bool last) const {
    cf_state_pass p = {};
    p.state = state(host, g.dtype);
    if (backward) p.gradient = state(host_gradient, CF_DTYPE_FP32);
    p.prefix = c.row, p.own = c.own, p.window = g.window;
    p.overwrite = last;
    return p;
}

/* Attends to the prefix in the ring. */
void chain_run::walk_blocks(const chunk_work &c, cf_attention_tensors x, int layer, bool backward) {
    const cf_tensor dk = x.dk, dv = x.dv;
    cf_state_block b = {};
    for (int64_t n = 0; ok;) {
        note(cf_state_stream_next(stream, compute, &b, &error));
        if (!ok || !CHECK_INT(b.layer, layer) || b.n_rows == 0) {
            if (ok) CHECK_INT(n, (int64_t)c.n.size());
            return;
        }
        if (b.own) {
            CHECK(backward && n == 0 && b.first_row >= c.row && b.first_row + b.n_rows <= c.row + c.own);
            note(cf_state_stream_add(stream, &b, &dk, &dv, compute, &error));
            continue;
        }
        if (!CHECK_INT(b.index, n) || !CHECK_INT(b.first_row, c.first[(size_t)n]) ||
            !CHECK_INT(b.n_rows, c.n[(size_t)n]))
            return;
        x.k = cf_state_k(&b.state, 0, 0), x.v = cf_state_v(&b.state, 0, 0);
        x.dk = cf_state_k(&b.gradient, 0, 0), x.dv = cf_state_v(&b.gradient, 0, 0);
        x.overwrite = 0;
        attend(c.blocks[(size_t)n++], x, backward, false);
    }
}

/* Attends to the same blocks, all on the device. */
void chain_run::resident_blocks(const chunk_work &c, cf_attention_tensors x, int layer, bool backward) {
    const cf_state kv = state(resident.data, g.dtype), gradient = state(resident_gradient.data, CF_DTYPE_FP32);
    for (size_t i = 0; i < c.n.size() && ok; i++) {
        x.k = cf_state_k(&kv, layer, c.first[i]), x.v = cf_state_v(&kv, layer, c.first[i]);
        x.dk = cf_state_k(&gradient, layer, c.first[i]), x.dv = cf_state_v(&gradient, layer, c.first[i]);
        x.overwrite = 0;
        attend(c.blocks[i], x, backward, false);
    }
}

void chain_run::copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, int n) {
    OK(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, (size_t)n, cudaMemcpyDeviceToDevice, compute));
}

/* Runs a forward. K and V go into scratch memory that every second layer reuses, and that the pass leaves full of
   NaN. */
void chain_run::forward(const chunk_work &c, bool sends) {
    const cf_state_pass pass = pass_of(c, false, false);
    const cf_state kv = state(resident.data, g.dtype);
    if (g.streamed) note(cf_state_stream_begin(stream, &pass, &error));
    for (int layer = 0; layer < g.n_layers && ok; layer++) {
        cf_attention_tensors x = tensors_of(c, layer);
        rows_array &own = scratch[layer % 2];
        const size_t width = own.row_bytes() / 2;
        const cf_tensor k = {own.data, 2 * kv_width(), 0}, v = {own.data + width, 2 * kv_width(), 0};
        copy_rows(k.data, 2 * width, x.k.data, width, width, c.rows);
        copy_rows(v.data, 2 * width, x.v.data, width, width, c.rows);
        x.k = k, x.v = v;
        attend(c.chunk, x, false, false);
        if (g.streamed) walk_blocks(c, x, layer, false);
        else resident_blocks(c, x, layer, false);
        if (ok && c.row > 0) attend(c.chunk, x, false, true);
        if (ok && g.streamed && sends) note(cf_state_stream_append(stream, compute, layer, &x.k, &x.v, &error));
        if (ok && !g.streamed) {
            copy_rows(cf_state_k(&kv, layer, c.row).data, width, x.k.data, 2 * width, width, c.own);
            copy_rows(cf_state_v(&kv, layer, c.row).data, width, x.v.data, 2 * width, width, c.own);
        }
    }
    if (ok && g.streamed) note(cf_state_stream_end(stream, compute, &error));
    for (rows_array &a : scratch) OK(cudaMemsetAsync(a.data, 0xFF, a.bytes(), compute));
}

/* Runs a backward. If nothing streams, the gradients from later chunks are added to the chunk's own rows at the end. */
void chain_run::backward(const chunk_work &c, bool last) {
    const cf_state_pass pass = pass_of(c, true, last);
    if (g.streamed) note(cf_state_stream_begin(stream, &pass, &error));
    for (int layer = g.n_layers - 1; layer >= 0 && ok; layer--) {
        cf_attention_tensors x = tensors_of(c, layer);
        OK(cudaMemsetAsync(workspace, 0xFF, workspace_bytes + 1, compute));
        x.overwrite = 1;
        attend(c.chunk, x, true, false);
        if (g.streamed) walk_blocks(c, x, layer, true);
        else resident_blocks(c, x, layer, true);
        if (ok && c.row > 0) attend(c.chunk, x, true, true);
    }
    if (ok && g.streamed) note(cf_state_stream_end(stream, compute, &error));
}

void chain_run::run() {
    for (size_t i = 0; i < chunks.size() && ok; i++) forward(chunks[i], i + 1 < chunks.size());
    for (size_t i = chunks.size(); i-- > 0 && ok;) {
        if (g.replays) forward(chunks[i], false);
        if (ok) backward(chunks[i], i + 1 == chunks.size());
    }
}

/* The outputs of all layers. */
struct chain_results {
    std::vector<host_results> layers;
    std::vector<unsigned char> bits;
};

static std::vector<host_inputs> chain_inputs(const chain_setting &g, uint64_t seed) {
    std::vector<host_inputs> inputs;
    for (int i = 0; i < g.n_layers; i++) inputs.push_back(random_inputs(whole_problem(g), seed * 100 + (uint64_t)i));
    return inputs;
}

static bool run_chain(const chain_setting &g, const std::vector<host_inputs> &inputs, chain_results *to) {
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_set_arch(g.path == CF_ATTENTION_WGMMA ? 90 : g.arch);
#endif
    chain_run r(g);
    r.make_streams();
    r.prepare();
    if (r.ok && g.streamed) r.make_stream();
    if (!r.ok) return false;
    r.make_arrays(inputs);
    OK(cudaDeviceSynchronize());
    r.run();
    OK(cudaDeviceSynchronize());
    OK(cudaGetLastError());
    if (!r.ok) return false;
    to->layers.clear(), to->bits.clear();
    const std::vector<unsigned char> later = r.resident_gradient.get();
    const std::vector<double> sums = numbers_of(CF_DTYPE_FP32, later.data(), later.size() / 4);
    const size_t plane = (size_t)(g.length() * r.kv_width());
    for (const layer_arrays &l : r.layers) {
        host_results h;
        const double *k_sums = &sums[2 * to->layers.size() * plane];
        std::vector<double> *const into[] = {&h.out, &h.dq, &h.dk, &h.dv, &h.lse};
        const rows_array *const from[] = {&l.out, &l.dq, &l.dk, &l.dv, &l.lse};
        for (int i = 0; i < 5; i++) {
            const std::vector<unsigned char> bits = from[i]->get();
            *into[i] = numbers_of(from[i]->dtype, bits.data(), (size_t)from[i]->rows * (size_t)from[i]->width);
            to->bits.insert(to->bits.end(), bits.begin(), bits.end());
        }
        for (size_t i = 0; i < plane && !g.streamed; i++) {
            h.dk[i] = (float)h.dk[i] + (float)k_sums[i];
            h.dv[i] = (float)h.dv[i] + (float)k_sums[plane + i];
        }
        to->layers.push_back(h);
    }
    return true;
}

static void note_chain(const chain_setting &g) {
    char text[300];
    int n = snprintf(text, sizeof text,
                     "%s%s dtype %d, heads %d/%d of %d, window %d, blocks of %d x %d, arch %d, chunks",
                     cf_attention_path_name(g.path), g.deterministic ? " deterministic" : "", (int)g.dtype, g.n_heads,
                     g.n_kv_heads, g.head_size, g.window, g.block_rows, g.n_slots, g.arch);
    for (size_t i = 0; i < g.own.size() && n < 270; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, " %d", g.own[i]);
    harness_note("%s", text);
}

/* Returns whether sums of dQ have a fixed order: atomic sums only if deterministic. */
static bool has_one_order(const chain_setting &g) { return g.deterministic || g.path == CF_ATTENTION_UNFUSED; }

/* Compares with float64, and with the bits of the resident prefix if dQ has a fixed order. */
static bool check_chain(chain_setting g, uint64_t seed) {
    const std::vector<host_inputs> inputs = chain_inputs(g, seed);
    const host_problem whole = whole_problem(g);
    chain_results streamed, resident;
    note_chain(g);
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_reset();
#endif
    if (!run_chain(g, inputs, &streamed)) return false;
    bool ok = true;
    for (int i = 0; i < g.n_layers; i++) {
        const host_results &got = streamed.layers[(size_t)i], exact = reference_exact(whole, inputs[(size_t)i]),
                           rounded = reference_rounded(whole, inputs[(size_t)i]);
        ok = check_accuracy("out", g.dtype, got.out, exact.out, rounded.out, 2.0) && ok;
        ok = check_accuracy("lse", CF_DTYPE_FP32, got.lse, exact.lse, rounded.lse, 2.0) && ok;
        ok = check_accuracy("dq", g.dtype, got.dq, exact.dq, rounded.dq, 3.0) && ok;
        ok = check_accuracy("dk", g.dtype, got.dk, exact.dk, rounded.dk, 3.0) && ok;
        ok = check_accuracy("dv", g.dtype, got.dv, exact.dv, rounded.dv, 3.0) && ok;
    }
    g.streamed = false;
    if (!ok || !run_chain(g, inputs, &resident)) return false;
#ifdef CHUNKFLOW_CUDA_EMULATION
    if (cuda_emu_faults() > 0) FAIL("%lld faults; the first: %s", (long long)cuda_emu_faults(), cuda_emu_first_fault());
#endif
    for (size_t i = 0; i < resident.layers.size() && ok; i++) {
        const host_results &x = streamed.layers[i], &y = resident.layers[i];
        ok = CHECK(x.out == y.out) && CHECK(x.lse == y.lse) && CHECK(x.dk == y.dk) && CHECK(x.dv == y.dv);
        if (ok && has_one_order(g)) ok = CHECK(x.dq == y.dq);
    }
    return ok;
}

static chain_setting unfused(cf_dtype dtype) {
    chain_setting g;
    g.path = CF_ATTENTION_UNFUSED;
    g.dtype = dtype;
    g.head_size = 16;
    g.block_rows = 8;
    return g;
}

/* ---- what comes out ---- */

TEST(types) {
    for (int i = 0; i < 3; i++) {
        chain_setting g = unfused((cf_dtype)(CF_DTYPE_BF16 + i));
        g.own = {13, 21, 9};
        g.documents = {5, 11};
        g.window = i == 1 ? 18 : 0;
        g.softcap = i == 2 ? 2.0 : 0.0;
        if (!check_chain(g, 10 + (uint64_t)i)) return;
        g.n_heads = g.n_kv_heads = 3;
        g.n_slots = 4, g.n_layers = 3;
        if (!check_chain(g, 20 + (uint64_t)i)) return;
    }
}

/* Prefixes of no rows, of one, of a block and one more or less; blocks larger than the prefix. */
TEST(prefixes) {
    const std::vector<int> own[] = {{5}, {1, 6, 9}, {7, 1, 1}, {8, 9}, {9, 8, 7, 1}, {15, 2, 16}};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
        chain_setting g = unfused(CF_DTYPE_FP32);
        g.own = own[i];
        g.replays = i % 2 != 0;
        if (!check_chain(g, 30 + i)) return;
        g.block_rows = i % 3 ? 1 : 100;
        if (!check_chain(g, 40 + i)) return;
    }
}

/* Sliding windows, down to one that stays inside a chunk: a window of 1 leaves no block. */
TEST(windows) {
    const int windows[] = {1, 2, 7, 9, 17, 30, 52, 53, 200};
    for (int window : windows) {
        chain_setting g = unfused(window == 1 ? CF_DTYPE_BF16 : CF_DTYPE_FP32);
        g.own = {16, 4, 18, 15};
        g.window = window;
        g.documents = {12};
        g.replays = window % 2 != 0;
        if (!check_chain(g, 50 + (uint64_t)window)) return;
    }
}

TEST(fused) {
    for (int i = harness_rounds(0, 1); i < 6; i += harness_rounds(1, 4)) {
        chain_setting g;
        g.dtype = i % 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        g.n_layers = 1;
        const bool small = i > harness_rounds(5, 0);
        g.n_heads = i == 2 ? 7 : small ? 2 : 4, g.n_kv_heads = i == 2 || small ? 1 : 2;
        const bool large = i == harness_rounds(3, 5) && g.path == CF_ATTENTION_MMA && largest_mma_head() == 256;
        g.head_size = large ? 256 : i % 3 == 2 ? 128 : i == 4 ? 40 : 64;
        g.own = small ? std::vector<int>{45, 1, 33} : i % 2 ? std::vector<int>{70, 1, 65} : std::vector<int>{90, 60};
        g.documents = {20, 33};
        g.block_rows = i % 2 ? 40 : 64;
        g.window = i == 1 ? 50 : i == 4 ? 75 : 0;
        g.softcap = i == 3 ? 3.0 : 0.0;
        g.arch = i == 4 ? 86 : 80;
        if (!check_chain(g, 70 + (uint64_t)i)) return;
    }
}

/* dQ from atomic sums is right in any order. */
TEST(fused_sums_in_memory) {
    chain_setting g;
    g.n_layers = 1;
    g.deterministic = false;
    g.own = {80, 70};
    g.block_rows = 48;
    if (!check_chain(g, 80)) return;
    g.window = 33, g.head_size = 128, g.dtype = CF_DTYPE_FP16;
    check_chain(g, 81);
}

/* Split tiles, of a block and of the chunk itself. */
TEST(fused_parts) {
    chain_setting g;
    g.n_layers = 1;
    g.processors = 132;
    g.own = {harness_rounds(1100, 600), 30};
    g.block_rows = harness_rounds(1100, 600);
    g.n_heads = 2, g.n_kv_heads = 1;
    check_chain(g, 90);
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK(cuda_emu_kernel("attention_combine").blocks > 0);
    CHECK(cuda_emu_kernel("attention_join").blocks > 0);
#endif
}

TEST(wgmma) {
    if (last_path() != CF_ATTENTION_WGMMA) SKIP("needs wgmma");
    for (int i = 0; i < 3; i++) {
        chain_setting g;
        g.path = CF_ATTENTION_WGMMA;
        g.n_layers = 1;
        g.dtype = i % 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        g.deterministic = i != 1;
        g.head_size = i == 2 ? 128 : 64;
        g.own = {70, 33};
        g.documents = {20};
        g.block_rows = 60;
        g.window = i == 1 ? 60 : 0;
        if (!check_chain(g, 95 + (uint64_t)i)) return;
    }
}

/* ---- in which order ---- */

#ifdef CHUNKFLOW_CUDA_EMULATION
/* Whatever the device runs first, and whichever of the three streams is late, no bit changes. */
TEST(every_order) {
    for (int i = 0; i < 4; i++) {
        chain_setting g = unfused(CF_DTYPE_FP32);
        g.head_size = 8;
        g.own = i == 3 ? std::vector<int>{9, 7, 10, 6} : std::vector<int>{19, 6, 12};
        g.block_rows = i == 1 ? 32 : 5; /* one block a layer, or more blocks than ring slots */
        g.n_layers = 3;
        g.n_slots = i == 2 ? 3 : 2;
        g.window = i == 2 ? 14 : 0;
        g.replays = i == 3;
        const std::vector<host_inputs> inputs = chain_inputs(g, 200 + (uint64_t)i);
        note_chain(g);
        cuda_emu_reset();
        const std::string race = cuda_emu_find_race(harness_rounds(8, 1), [&] {
            chain_results got;
            (void)run_chain(g, inputs, &got);
            return got.bits;
        });
        if (!CHECK_STR(race.c_str(), "")) break;
    }
    cuda_emu_defaults();
}

/* A pass reads what the pass before sent out, however late that stream is. One layer and one block, so that nothing
   else makes the pass wait. */
TEST(what_was_sent_is_there) {
    chain_setting g = unfused(CF_DTYPE_FP32);
    g.head_size = 8;
    g.own = {5, 4, 6};
    g.block_rows = 5;
    g.n_layers = 1;
    g.n_slots = 2;
    const std::vector<host_inputs> inputs = chain_inputs(g, 250);
    chain_results in_order, late;
    note_chain(g);
    cuda_emu_reset();
    if (!run_chain(g, inputs, &in_order)) return;
    for (uint64_t stream = 1; stream <= 3; stream++) {
        cuda_emu_reset();
        cuda_emu_set_policy(CUDA_EMU_STREAM_LATE, stream);
        if (!run_chain(g, inputs, &late) || !CHECK(late.bits == in_order.bits)) break;
    }
    cuda_emu_defaults();
}

/* Abandons a pass at each point, then runs another one: nothing in transit does harm. */
TEST(passes_that_are_given_up) {
    chain_setting g = unfused(CF_DTYPE_FP32);
    g.n_layers = 2;
    g.own = {21, 17};
    const std::vector<host_inputs> inputs = chain_inputs(g, 300);
    for (int after = 0; after < 8; after += harness_rounds(1, after % 3 ? 3 : 1)) { /* 0, 1, 4, 7 */
        const std::string race = cuda_emu_find_race(harness_rounds(4, 1), [&] {
            chain_run r(g);
            cf_state_block b = {};
            std::vector<unsigned char> bits;
            r.make_streams();
            r.prepare();
            r.make_stream();
            r.make_arrays(inputs);
            OK(cudaDeviceSynchronize());
            r.forward(r.chunks[0], true);
            const cf_state_pass given_up = r.pass_of(r.chunks[1], after % 2 != 0, true);
            r.note(cf_state_stream_begin(r.stream, &given_up, &r.error));
            for (int i = 0; i < after; i++) r.note(cf_state_stream_next(r.stream, r.compute, &b, &r.error));
            r.note(cf_state_stream_end(r.stream, r.compute, &r.error));
            r.forward(r.chunks[1], false);
            r.backward(r.chunks[1], true);
            r.backward(r.chunks[0], false);
            OK(cudaDeviceSynchronize());
            for (const rows_array *a : {&r.layers[0].out, &r.layers[1].dk, &r.layers[0].dv}) {
                const std::vector<unsigned char> more = a->get();
                bits.insert(bits.end(), more.begin(), more.end());
            }
            return bits;
        });
        if (!CHECK_STR(race.c_str(), "")) break;
    }
    cuda_emu_defaults();
}

/* Between the first and the last pass nothing is allocated, and the host never waits. */
TEST(passes_allocate_nothing) {
    static const char *const names[] = {"cudaMalloc", "cudaFree", "cudaMallocHost", "cudaFreeHost", "cudaHostAlloc",
                                        "cudaEventCreate", "cudaEventCreateWithFlags", "cudaStreamCreateWithFlags",
                                        "cudaMemcpy", "cudaMemset", "cudaDeviceSynchronize", "cudaStreamSynchronize",
                                        "cudaEventSynchronize", "cudaEventQuery", "cudaStreamQuery"};
    chain_setting g = unfused(CF_DTYPE_BF16);
    chain_run r(g);
    cuda_emu_reset();
    r.make_streams();
    r.prepare();
    r.make_stream();
    r.make_arrays(chain_inputs(g, 310));
    int64_t calls = 0, copies = 0;
    for (const char *name : names) calls -= cuda_emu_calls(name);
    copies -= cuda_emu_calls("cudaMemcpy2DAsync");
    r.run();
    for (const char *name : names) calls += cuda_emu_calls(name);
    copies += cuda_emu_calls("cudaMemcpy2DAsync");
    CHECK(r.ok);
    CHECK_INT(calls, 0);
    CHECK(copies > 20);
    OK(cudaDeviceSynchronize());
}

/* Each CUDA call of begin, next and end fails in turn. The error says so, and the stream can be freed. */
TEST(every_call_fails_once) {
    chain_setting g = unfused(CF_DTYPE_FP32);
    g.n_layers = 1;
    const std::vector<host_inputs> inputs = chain_inputs(g, 320);
    int64_t n = 1;
    for (bool failed = true; failed && n < 1000; n++) {
        chain_run r(g);
        cf_state_block b = {};
        cuda_emu_reset();
        r.make_streams();
        r.prepare();
        r.make_stream();
        r.make_arrays(inputs);
        const cf_state_pass pass = r.pass_of(r.chunks[1], true, false);
        const cf_tensor k = {r.scratch[0].data, 2 * r.kv_width(), 0}, v = k;
        cuda_emu_fail_call(n, cudaErrorInvalidValue);
        cf_result code = cf_state_stream_begin(r.stream, &pass, &r.error);
        for (bool more = true; code == CF_OK && more;) {
            code = cf_state_stream_next(r.stream, r.compute, &b, &r.error);
            more = b.n_rows > 0;
        }
        if (code == CF_OK) code = cf_state_stream_append(r.stream, r.compute, 0, &k, &v, &r.error);
        if (code == CF_OK) code = cf_state_stream_end(r.stream, r.compute, &r.error);
        failed = cuda_emu_failed();
        cuda_emu_fail_call(0, cudaSuccess);
        CHECK_INT(code, failed ? CF_ERROR_DEVICE : CF_OK);
        if (failed) CHECK_INT(r.error.got, (int64_t)cudaErrorInvalidValue);
        (void)cudaGetLastError();
        OK(cudaDeviceSynchronize());
    }
    CHECK(n > 20);
    cuda_emu_reset();
}

/* ---- how long it takes ---- */

/* Returns the end of a pass on the compute stream, with 4 layers of 6 blocks. own and block_seconds: compute before a
   layer's blocks and for each block. K and V of a block arrive in 1 s, its gradients in 2 s, and leave in 2 s. */
static double pass_seconds(bool backward, int n_slots, double own, double block_seconds) {
    chain_setting g = unfused(CF_DTYPE_BF16);
    cf_state_block b = {};
    g.n_layers = 4, g.own = {60}, g.block_rows = 10, g.n_slots = n_slots;
    chain_run r(g);
    cuda_emu_reset();
    r.make_streams();
    r.prepare();
    r.make_stream();
    r.make_arrays(chain_inputs(g, 330));
    OK(cudaDeviceSynchronize());
    cuda_emu_set_host_time(0.0);
    cuda_emu_set_rule([](const cuda_emu_work &w) {
        return w.kind == CUDA_EMU_WORK_COPY ? (double)w.bytes / (2 * 10 * 16 * 2) : 0.0;
    });
    cf_state_pass pass = r.pass_of(r.chunks[0], backward, false);
    pass.prefix = 60, pass.own = 0;
    r.note(cf_state_stream_begin(r.stream, &pass, &r.error));
    for (int layer = 0; layer < g.n_layers && r.ok; layer++) {
        cuda_emu_delay(r.compute, own);
        for (bool more = true; more && r.ok;) {
            r.note(cf_state_stream_next(r.stream, r.compute, &b, &r.error));
            more = b.n_rows > 0;
            if (more) cuda_emu_delay(r.compute, block_seconds);
        }
    }
    r.note(cf_state_stream_end(r.stream, r.compute, &r.error));
    OK(cudaStreamSynchronize(r.compute));
    const double seconds = cuda_emu_host_time();
    OK(cudaDeviceSynchronize());
    return seconds;
}

static bool near(double x, double y) { return std::fabs(x - y) <= 1e-9 * y; }

/* Time is the larger of compute and stream, plus the exposed part of the first load. */
TEST(copies_hide) {
    CHECK(near(pass_seconds(false, 2, 1.0, 1.5), 4 * (1.0 + 6 * 1.5)));
    CHECK(near(pass_seconds(false, 2, 0.25, 1.5), 0.75 + 4 * (0.25 + 6 * 1.5)));
    CHECK(near(pass_seconds(false, 2, 0.25, 0.25), 24 * 1.0 + 0.25));
    CHECK(near(pass_seconds(true, 3, 1.0, 3.0), 2.0 + 4 * (1.0 + 6 * 3.0)));
    CHECK(near(pass_seconds(true, 3, 0.25, 0.25), 24 * 3.0 + 0.25));
    CHECK(pass_seconds(true, 2, 1.0, 3.0) > 2.0 + 4 * (1.0 + 6 * 3.0) + 2.0); /* why there are three */
    cuda_emu_defaults();
}
#endif

/* ---- any order of calls ---- */

#ifdef CHUNKFLOW_CUDA_EMULATION
/* Two layers of 30 rows of 2 heads of 8 numbers; a pass has `prefix` and `own` rows, in blocks of 10. Also the expected
   host memory. */
struct any_order {
    enum { LAYERS = 2, ROWS = 30, WIDTH = 16 };
    cf_state_stream *stream = nullptr;
    unsigned char *device = nullptr;
    uint16_t *host = nullptr;
    float *gradient = nullptr, *own_gradient = nullptr;
    std::vector<float> wanted = std::vector<float>(LAYERS * 2 * ROWS * WIDTH);
    cf_state_pass pass = {};
    bool open = false, backward = false, may_add = false;
    int64_t layer = 0, place = 0; /* finished layers, and blocks of the current layer that were handed out */
    cf_state_block held = {};
    cf_error error = {};

    any_order() {
        cf_state_stream_desc d = {};
        d.state.n_layers = LAYERS, d.state.n_kv_heads = 2, d.state.head_size = 8;
        d.block_rows = 10, d.n_slots = 2;
        OK(cudaMalloc((void **)&device, 3840));
        OK(cudaMalloc((void **)&own_gradient, 2 * ROWS * WIDTH * sizeof(float)));
        OK(cudaMallocHost((void **)&host, wanted.size() * 2));
        OK(cudaMallocHost((void **)&gradient, wanted.size() * 4));
        for (size_t i = 0; i < wanted.size(); i++) host[i] = (uint16_t)i, gradient[i] = wanted[i] = 0;
        d.ring = device, d.gradient_ring = device + 1280;
        CHECK_INT(cf_state_stream_create(&d, &stream, &error), CF_OK);
        pass.state = d.state, pass.state.data = host, pass.state.rows = ROWS;
    }
    ~any_order() {
        OK(cudaDeviceSynchronize());
        cf_state_stream_free(stream);
        cudaFree(device), cudaFree(own_gradient);
        cudaFreeHost(host), cudaFreeHost(gradient);
    }

    size_t at(int64_t l, int plane, int64_t row) const { return (size_t)(((2 * l + plane) * ROWS + row) * WIDTH); }
    int64_t n_own() const {
        return backward && !pass.overwrite ? (pass.prefix + pass.own + 9) / 10 - pass.prefix / 10 : 0;
    }
    int64_t n_blocks() const { return (pass.own > 0 ? n_own() : 0) + (pass.prefix + 9) / 10; }

    void begin(harness_rng *rng) {
        cf_state_pass p = pass;
        if (open) return;
        p.prefix = harness_between(rng, 0, 20), p.own = harness_between(rng, 0, 10);
        p.overwrite = harness_chance(rng, 0.3);
        p.gradient = cf_state();
        if (harness_chance(rng, 0.6))
            p.gradient = p.state, p.gradient.data = gradient, p.gradient.dtype = CF_DTYPE_FP32;
        CHECK_INT(cf_state_stream_begin(stream, &p, &error), CF_OK);
        pass = p;
        open = true, backward = p.gradient.data != NULL;
        layer = place = 0;
        held = cf_state_block();
    }

    /* Checks the ring against the host's numbers, and adds one to each gradient of a block of the prefix. */
    void use_held() {
        OK(cudaDeviceSynchronize());
        for (int plane = 0; plane < 2; plane++)
            for (int64_t row = 0; row < held.n_rows; row++) {
                const size_t from = at(held.layer, plane, held.first_row + row);
                uint16_t state[WIDTH];
                float sum[WIDTH];
                if (!held.own) {
                    const cf_tensor t = plane ? cf_state_v(&held.state, 0, row) : cf_state_k(&held.state, 0, row);
                    OK(cudaMemcpy(state, t.data, sizeof state, cudaMemcpyDeviceToHost));
                    CHECK(memcmp(state, host + from, sizeof state) == 0);
                }
                if (!backward) continue;
                const cf_tensor t = plane ? cf_state_v(&held.gradient, 0, row) : cf_state_k(&held.gradient, 0, row);
                OK(cudaMemcpy(sum, t.data, sizeof sum, cudaMemcpyDeviceToHost));
                for (int i = 0; i < WIDTH; i++) {
                    CHECK(sum[i] == (pass.overwrite ? 0 : wanted[from + (size_t)i]));
                    sum[i]++;
                }
                if (!held.own) OK(cudaMemcpy(t.data, sum, sizeof sum, cudaMemcpyHostToDevice));
            }
    }

    void note_release() {
        for (int plane = 0; plane < 2 && backward && held.n_rows > 0 && !held.own; plane++)
            for (int64_t row = 0; row < held.n_rows; row++)
                for (size_t i = 0; i < WIDTH; i++) {
                    float *sum = &wanted[at(held.layer, plane, held.first_row + row) + i];
                    *sum = (pass.overwrite ? 0 : *sum) + 1;
                }
        held = cf_state_block();
    }

    void next(harness_rng *rng) {
        cf_state_block block = {};
        const bool done = layer == LAYERS, fails = !done && harness_chance(rng, 0.3);
        if (!open) return;
        if (fails) {
            cuda_emu_fail_call(harness_between(rng, 1, 12), cudaErrorInvalidValue);
            const cf_result code = cf_state_stream_next(stream, nullptr, &block, &error);
            const bool failed = cuda_emu_failed();
            cuda_emu_fail_call(0, cudaSuccess);
            (void)cudaGetLastError();
            CHECK_INT(code, failed ? CF_ERROR_DEVICE : CF_OK);
            may_add = may_add && !failed; /* the block may already have been returned */
            if (failed) return;
        } else {
            CHECK_INT(cf_state_stream_next(stream, nullptr, &block, &error), done ? CF_ERROR_ARGUMENT : CF_OK);
            if (done) return;
        }
        note_release();
        CHECK_INT(block.layer, backward ? LAYERS - 1 - layer : layer);
        CHECK_INT(block.n_rows > 0, place < n_blocks());
        place = block.n_rows > 0 ? place + 1 : 0;
        layer += block.n_rows == 0;
        held = block;
        may_add = true;
        if (held.n_rows > 0) use_held();
    }

    void add() {
        cf_tensor dk = {}, dv = {};
        dk.data = own_gradient, dv.data = own_gradient + ROWS * WIDTH;
        if (held.own && may_add) CHECK_INT(cf_state_stream_add(stream, &held, &dk, &dv, nullptr, &error), CF_OK);
    }

    void append(harness_rng *rng) {
        const int64_t l = harness_between(rng, 0, LAYERS - 1);
        cf_tensor k = {}, v = {};
        if (!open) return;
        std::vector<uint16_t> rows(ROWS * WIDTH, (uint16_t)harness_between(rng, 0, 60000));
        k.data = v.data = own_gradient;
        OK(cudaMemcpy(own_gradient, rows.data(), rows.size() * 2, cudaMemcpyHostToDevice));
        std::vector<uint16_t> before(host, host + wanted.size());
        CHECK_INT(cf_state_stream_append(stream, nullptr, l, &k, &v, &error), CF_OK);
        OK(cudaDeviceSynchronize());
        for (int plane = 0; plane < 2; plane++)
            for (int64_t row = pass.prefix; row < pass.prefix + pass.own; row++)
                for (size_t i = 0; i < WIDTH; i++) before[at(l, plane, row) + i] = rows[0];
        CHECK(memcmp(host, before.data(), before.size() * 2) == 0);
    }

    void end() {
        if (!open) return;
        CHECK_INT(cf_state_stream_end(stream, nullptr, &error), CF_OK);
        note_release();
        open = false;
        OK(cudaDeviceSynchronize());
        CHECK(memcmp(gradient, wanted.data(), wanted.size() * 4) == 0);
    }
};

/* Calls in an order that nobody would choose, with CUDA failing now and then. Host memory holds what the blocks
   added. */
TEST(any_order_of_calls) {
    int64_t n = 0;
    for (uint64_t seed = 1; seed <= (uint64_t)harness_rounds(200, 40); seed++) {
        harness_rng rng = {seed};
        any_order a;
        for (int i = 0; i < 60; i++) {
            const int64_t what = harness_between(&rng, 0, 9);
            harness_note("seed %llu, call %d", (unsigned long long)seed, i);
            if (what < 2) a.begin(&rng);
            else if (what < 6) a.next(&rng);
            else if (what < 8) a.add();
            else if (what < 9) a.append(&rng);
            else a.end();
            n += a.layer == any_order::LAYERS;
        }
    }
    harness_note("%s", "");
    CHECK(n > 20); /* some passes reach their end */
}
#endif

/* ---- what is refused ---- */

#define REFUSED(call, result, name)                 \
    do {                                            \
        error = cf_error();                         \
        if (CHECK_INT(call, result)) CHECK_STR(error.field, name); \
    } while (0)

/* A callback that attends to too many layers, and rows of K and V that a copy cannot take at once. */
TEST(layers_and_rows_that_are_refused) {
    cf_error error;
    cf_state_stream *stream = NULL;
    cf_state_block block = {};
    unsigned char *memory = NULL, *host = NULL;
    cf_state_stream_desc d = {};
    cf_state_pass p = {};
    cf_tensor t = {};
    OK(cudaMalloc((void **)&memory, 8192));
    OK(cudaMallocHost((void **)&host, 65536));
    memset(host, 0, 65536);
    d.state.n_kv_heads = 2, d.state.head_size = 8;
    d.block_rows = 10, d.n_slots = 2, d.ring = memory;
    CHECK_INT(cf_state_stream_create(&d, &stream, &error), CF_OK);
    p.state = d.state, p.state.n_layers = 2, p.state.data = host, p.state.rows = 30, p.prefix = 20, p.own = 10;
    CHECK_INT(cf_state_stream_begin(stream, &p, &error), CF_OK);
    for (int layer = 0; layer < 2; layer++)
        for (int i = 0; i < 3; i++) {
            CHECK_INT(cf_state_stream_next(stream, NULL, &block, &error), CF_OK);
            CHECK_INT(block.layer, layer);
            CHECK_INT(block.n_rows, i < 2 ? 10 : 0);
        }
    REFUSED(cf_state_stream_next(stream, NULL, &block, &error), CF_ERROR_ARGUMENT, "stream");
    t.data = memory;
    t.head_stride = 16;
    REFUSED(cf_state_stream_append(stream, NULL, 0, &t, &t, &error), CF_ERROR_ARGUMENT, "k");
    t.head_stride = 0, t.row_stride = 8;
    REFUSED(cf_state_stream_append(stream, NULL, 0, &t, &t, &error), CF_ERROR_ARGUMENT, "k");
    CHECK_INT(cf_state_stream_end(stream, NULL, &error), CF_OK);
    OK(cudaDeviceSynchronize());
    cf_state_stream_free(stream);
    cudaFree(memory);
    cudaFreeHost(host);
}

/* Bad arguments of prepared blocks: their shapes and sizes. */
TEST(blocks_that_are_refused) {
    const int32_t cu[] = {0, 20, 30};
    const int32_t fewer[] = {0, 19, 30};
    cf_attention_desc d = {};
    cf_error error;
    size_t bytes = 0, small = 0;
    std::vector<uint64_t> memory, room;
    const cf_attention *chunk = NULL, *block = NULL;
    d.n_heads = 2, d.head_size = 64, d.n_slices = 2, d.cu_seqlens_q = d.cu_seqlens_k = cu, d.arch = 80;
    d.prefix = -1;
    REFUSED(cf_attention_size(&d, &bytes, &error), CF_ERROR_ARGUMENT, "prefix");
    d.prefix = (int64_t)1 << 30;
    REFUSED(cf_attention_size(&d, &bytes, &error), CF_ERROR_LIMIT, "prefix");
    d.prefix = 100, d.cu_seqlens_k = fewer;
    REFUSED(cf_attention_size(&d, &bytes, &error), CF_ERROR_ARGUMENT, "cu_seqlens_k");
    d.cu_seqlens_k = cu, d.n_slices = 0;
    REFUSED(cf_attention_size(&d, &bytes, &error), CF_ERROR_ARGUMENT, "prefix");
    d.n_slices = 2;
    CHECK_INT(cf_attention_size(&d, &bytes, &error), CF_OK);
    void *place = aligned(memory, bytes);
    CHECK_INT(cf_attention_prepare(&d, place, bytes, &chunk, &error), CF_OK);
    REFUSED(cf_attention_block_size(NULL, 0, 10, &bytes, &error), CF_ERROR_ARGUMENT, "chunk");
    REFUSED(cf_attention_block_size(chunk, 0, 10, NULL, &error), CF_ERROR_ARGUMENT, "bytes");
    for (int64_t first : {(int64_t)-1, (int64_t)100, INT64_MAX, INT64_MIN})
        REFUSED(cf_attention_block_size(chunk, first, 10, &bytes, &error), CF_ERROR_ARGUMENT, "first");
    for (int64_t n : {(int64_t)0, (int64_t)-1, (int64_t)91, INT64_MAX})
        REFUSED(cf_attention_block_size(chunk, 10, n, &bytes, &error), CF_ERROR_ARGUMENT, "n");
    CHECK_INT(cf_attention_block_size(chunk, 10, 90, &bytes, &error), CF_OK);
    CHECK_INT(cf_attention_block_size(chunk, 10, 1, &small, &error), CF_OK);
    void *at = aligned(room, bytes);
    REFUSED(cf_attention_block_prepare(chunk, 10, 90, at, bytes, NULL, &error), CF_ERROR_ARGUMENT, "out");
    REFUSED(cf_attention_block_prepare(chunk, 10, 90, NULL, bytes, &block, &error), CF_ERROR_ARGUMENT, "memory");
    REFUSED(cf_attention_block_prepare(chunk, 10, 90, at, bytes - 1, &block, &error), CF_ERROR_SPACE, "bytes");
    CHECK(block == NULL);
    CHECK_INT(cf_attention_block_prepare(chunk, 10, 90, at, bytes, &block, &error), CF_OK);
    CHECK_INT(block->pairs, 20 * 90); /* pairs of the first slice only */
    REFUSED(cf_attention_block_size(block, 0, 1, &bytes, &error), CF_ERROR_ARGUMENT, "first");
    cf_attention_tensors x = {};
    x.finish = 1;
    REFUSED(cf_attention_forward(block, &x, NULL, &error), CF_ERROR_ARGUMENT, "finish");
}

/* The pairs of a chunk's own keys and of all blocks of its prefix add up to those of the whole slice, for any
   window. */
TEST(pairs) {
    for (int window = 0; window < 90; window += 1 + window / 8)
        for (int prefix = 1; prefix < 60; prefix += 7) {
            const int32_t q[] = {0, 23}, k[] = {0, 23 + prefix};
            cf_attention_desc d = {};
            std::vector<uint64_t> memory, room;
            const cf_attention *whole = NULL, *chunk = NULL, *block = NULL;
            size_t bytes = 0;
            int64_t pairs = 0, first = 0, n = 0, next = std::max(0, window ? prefix - window + 1 : 0);
            d.n_heads = 1, d.head_size = 64, d.n_slices = 1, d.cu_seqlens_q = q, d.cu_seqlens_k = k, d.arch = 80;
            d.window = window;
            CHECK_INT(cf_attention_size(&d, &bytes, NULL), CF_OK);
            void *place = aligned(memory, bytes);
            CHECK_INT(cf_attention_prepare(&d, place, bytes, &whole, NULL), CF_OK);
            pairs = whole->pairs;
            d.cu_seqlens_k = q, d.prefix = prefix;
            CHECK_INT(cf_attention_size(&d, &bytes, NULL), CF_OK);
            place = aligned(memory, bytes);
            CHECK_INT(cf_attention_prepare(&d, place, bytes, &chunk, NULL), CF_OK);
            pairs -= chunk->pairs;
            for (int i = 0; (n = cf_state_stream_block(9, prefix, window, i, &first)) > 0; i++) {
                CHECK_INT(first, next);
                CHECK(n <= 9 && ((first + n) % 9 == 0 || first + n == prefix));
                next = first + n;
                CHECK_INT(cf_attention_block_size(chunk, first, n, &bytes, NULL), CF_OK);
                place = aligned(room, bytes);
                CHECK_INT(cf_attention_block_prepare(chunk, first, n, place, bytes, &block, NULL), CF_OK);
                CHECK(block->pairs > 0);
                pairs -= block->pairs;
            }
            CHECK_INT(next, std::max((int64_t)prefix, next));
            CHECK_INT(pairs, 0);
        }
}

/* ---- trees ---- */

/* The slices of one chunk of a tree, and the path above it. */
struct tree_setting {
    cf_dtype dtype = CF_DTYPE_FP32;
    cf_attention_path path = CF_ATTENTION_UNFUSED;
    int n_heads = 2, n_kv_heads = 1, head_size = 16, window = 0, arch = 80, processors = 0;
    double softcap = 0.0;
    bool deterministic = true, overwrite = false;
    int prefix = 0, gap = 0; /* gap: rows of padding after each slice */
    std::vector<int32_t> length, parent, begin;
    std::vector<int> blocks; /* blocks of the path, in the order of their calls: first, n, first, n, ... */

    void add(int rows, int goes_on_from, int from_key) {
        length.push_back(rows), parent.push_back(goes_on_from), begin.push_back(from_key);
    }
    int n() const { return (int)length.size(); }
    /* Returns the key at place j of slice s's path: rows of the path come first, then those of the slices, one after
       another. */
    int key(int s, int j) const {
        for (; s >= 0 && j < begin[(size_t)s]; s = parent[(size_t)s]) continue;
        if (s < 0) return j;
        int row = prefix + j - begin[(size_t)s];
        for (int i = 0; i < s; i++) row += length[(size_t)i];
        return row;
    }
};

/* The same problem with each slice's keys copied for it, so that no tree is needed. */
struct tree_copies {
    host_problem problem;
    host_inputs inputs;
    std::vector<int> key; /* for each copied key, its row in the tree */
    std::vector<float> k, v;
    int n_keys = 0;
};

static std::vector<float> copied_rows(const std::vector<float> &from, const std::vector<int> &rows, size_t width) {
    std::vector<float> to;
    for (int row : rows) {
        const auto begin = from.begin() + (long)((size_t)row * width);
        to.insert(to.end(), begin, begin + (long)width);
    }
    return to;
}

static tree_copies copy_tree(const tree_setting &t, uint64_t seed) {
    tree_copies to;
    host_problem together;
    host_problem &p = to.problem;
    const size_t width = (size_t)(t.n_kv_heads * t.head_size);
    p.dtype = t.dtype, p.n_heads = t.n_heads, p.n_kv_heads = t.n_kv_heads, p.head_size = t.head_size;
    p.window = t.window, p.softcap = t.softcap;
    together = p;
    for (int s = 0; s < t.n(); s++) {
        const int begin = t.begin[(size_t)s], rows = t.length[(size_t)s];
        p.add_slice(rows, begin + rows);
        together.add_slice(rows, rows + (s == 0 ? t.prefix : 0));
        for (int j = 0; j < begin + rows; j++) to.key.push_back(t.key(s, j));
    }
    to.inputs = random_inputs(together, seed);
    to.n_keys = together.rows_k();
    to.k = to.inputs.k, to.v = to.inputs.v;
    to.inputs.k = copied_rows(to.k, to.key, width);
    to.inputs.v = copied_rows(to.v, to.key, width);
    return to;
}

/* Adds up the values of each key's copies in the tree. */
static std::vector<double> sum_copies(const tree_copies &c, const std::vector<double> &of_copies) {
    const size_t width = (size_t)(c.problem.n_kv_heads * c.problem.head_size);
    std::vector<double> sums((size_t)c.n_keys * width, 0.0);
    for (size_t i = 0; i < c.key.size(); i++)
        for (size_t j = 0; j < width; j++) sums[(size_t)c.key[i] * width + j] += of_copies[i * width + j];
    return sums;
}

struct tree_run {
    const tree_setting &t;
    rows_array q, k, v, out, dout, dq, dk, dv, lse, path[4]; /* path: K, V and their gradients */
    prepared_tiles chunk;
    std::vector<prepared_tiles> blocks;
    std::vector<int32_t> cu = {0}, starts;
    void *workspace = nullptr;
    size_t workspace_bytes = 0;
    cublasHandle_t cublas = nullptr;
    cf_error error = {};
    bool ok = true;

    explicit tree_run(const tree_setting &setting) : t(setting) {}
    tree_run(const tree_run &) = delete;
    tree_run &operator=(const tree_run &) = delete;
    ~tree_run() {
        for (rows_array *a : {&q, &k, &v, &out, &dout, &dq, &dk, &dv, &lse, &path[0], &path[1], &path[2], &path[3]})
            cudaFree(a->data);
        cudaFree(workspace);
        if (cublas) cublasDestroy(cublas);
    }
    int rows() const { return starts.back() + t.length.back() + t.gap; }
    void note(cf_result code) { ok = call_ok(code, error) && ok; }
    void prepare();
    void prepare_block(int64_t first, int64_t n);
    void make_arrays(const tree_copies &c);
    void attend(bool backward);
    std::vector<float> spread(const std::vector<float> &from, int first, int width) const;
    std::vector<double> gather(const rows_array &from) const;
};

void tree_run::prepare_block(int64_t first, int64_t n) {
    size_t bytes = 0;
    blocks.emplace_back();
    prepared_tiles &b = blocks.back();
    note(cf_attention_block_size(chunk.a, first, n, &bytes, &error));
    if (ok) note(cf_attention_block_prepare(chunk.a, first, n, aligned(b.memory, bytes), bytes, &b.a, &error));
    if (!ok) return;
    workspace_bytes = std::max({workspace_bytes, b.a->forward_bytes, b.a->backward_bytes});
    b.upload();
}

void tree_run::prepare() {
    cf_attention_desc d = {};
    size_t bytes = 0;
    for (int32_t n : t.length) starts.push_back(cu.back() + t.gap * (int)starts.size()), cu.push_back(cu.back() + n);
    d.n_heads = t.n_heads, d.n_kv_heads = t.n_kv_heads, d.head_size = t.head_size, d.dtype = t.dtype;
    d.n_slices = t.n(), d.cu_seqlens_q = d.cu_seqlens_k = cu.data(), d.starts_q = d.starts_k = starts.data();
    d.window = t.window, d.softcap = t.softcap, d.path = t.path, d.deterministic = t.deterministic;
    d.prefix = t.prefix, d.begins = t.begin.data(), d.parents = t.parent.data(), d.n_processors = t.processors;
#ifdef CHUNKFLOW_CUDA_EMULATION
    d.arch = t.path == CF_ATTENTION_WGMMA ? 90 : t.arch;
#endif
    note(cf_attention_size(&d, &bytes, &error));
    if (ok) note(cf_attention_prepare(&d, aligned(chunk.memory, bytes), bytes, &chunk.a, &error));
    if (!ok) return;
    chunk.upload();
    workspace_bytes = std::max(chunk.a->forward_bytes, chunk.a->backward_bytes);
    blocks.reserve(t.blocks.size() / 2 + (size_t)chunk.a->n_levels);
    for (size_t i = 0; i < t.blocks.size() && ok; i += 2) prepare_block(t.blocks[i], t.blocks[i + 1]);
    for (int64_t i = 0; i < chunk.a->n_levels && ok; i++) prepare_block(i, 0);
}

/* Places rows of the slices, from row `first` of `from`, where they are in the chunk; NaN between them. */
std::vector<float> tree_run::spread(const std::vector<float> &from, int first, int width) const {
    std::vector<float> to((size_t)(rows() * width), NAN);
    for (int s = 0; s < t.n(); s++)
        memcpy(&to[(size_t)(starts[(size_t)s] * width)], &from[(size_t)((first + cu[(size_t)s]) * width)],
               (size_t)(t.length[(size_t)s] * width) * sizeof(float));
    return to;
}

/* The reverse of spread. The rows between slices must still be NaN. */
std::vector<double> tree_run::gather(const rows_array &from) const {
    const std::vector<unsigned char> bits = from.get();
    const std::vector<double> all = numbers_of(from.dtype, bits.data(), (size_t)from.rows * (size_t)from.width);
    std::vector<double> to;
    size_t n_numbers = 0;
    for (int s = 0; s < t.n(); s++) {
        const auto begin = all.begin() + (long)(starts[(size_t)s] * from.width);
        to.insert(to.end(), begin, begin + (long)(t.length[(size_t)s] * from.width));
    }
    for (double x : all) n_numbers += !std::isnan(x);
    CHECK_INT((int64_t)n_numbers, (int64_t)to.size());
    return to;
}

void tree_run::make_arrays(const tree_copies &c) {
    const int width = t.n_heads * t.head_size, kv = t.n_kv_heads * t.head_size;
    for (rows_array *a : {&q, &dout, &out, &dq}) a->make(t.dtype, rows(), width);
    for (rows_array *a : {&k, &v}) a->make(t.dtype, rows(), kv);
    for (rows_array *a : {&dk, &dv}) a->make(CF_DTYPE_FP32, rows(), kv);
    lse.make(CF_DTYPE_FP32, rows(), t.n_heads); /* by head: see transposed */
    for (int i = 0; i < 4; i++) path[i].make(i < 2 ? t.dtype : CF_DTYPE_FP32, t.prefix, kv);
    q.put(spread(c.inputs.q, 0, width)), dout.put(spread(c.inputs.dout, 0, width));
    k.put(spread(c.k, t.prefix, kv)), v.put(spread(c.v, t.prefix, kv));
    path[0].put(c.k), path[1].put(c.v);
    for (int i = 2; i < 4 && !t.overwrite; i++) OK(cudaMemset(path[i].data, 0, path[i].bytes()));
    OK(cudaMalloc(&workspace, workspace_bytes + 1));
    OK(cudaMemset(workspace, 0xFF, workspace_bytes + 1));
    if (t.path == CF_ATTENTION_UNFUSED) CHECK(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS);
}

void tree_run::attend(bool backward) {
    const auto run = backward ? cf_attention_backward : cf_attention_forward;
    cf_attention_tensors own = {};
    own.q = q.tensor(0), own.k = k.tensor(0), own.v = v.tensor(0), own.out = out.tensor(0), own.dout = dout.tensor(0);
    own.dq = dq.tensor(0), own.dk = dk.tensor(0), own.dv = dv.tensor(0);
    own.lse = (float *)lse.data, own.lse_stride = rows();
    own.tiles = chunk.tiles, own.workspace = workspace, own.workspace_bytes = workspace_bytes, own.cublas = cublas;
    own.overwrite = 1;
    note(run(chunk.a, &own, nullptr, &error));
    for (size_t i = 0; i < blocks.size() && ok; i++) {
        cf_attention_tensors x = own;
        x.tiles = blocks[i].tiles;
        x.overwrite = 0;
        if (2 * i < t.blocks.size()) {
            const int row = t.blocks[2 * i];
            x.k = path[0].tensor(row), x.v = path[1].tensor(row);
            x.dk = path[2].tensor(row), x.dv = path[3].tensor(row);
            x.overwrite = t.overwrite;
        }
        note(run(blocks[i].a, &x, nullptr, &error));
    }
    own.finish = 1;
    if (ok && !blocks.empty()) note(run(chunk.a, &own, nullptr, &error));
}

static std::vector<double> after_path(const std::vector<double> &of_path, const std::vector<double> &own) {
    std::vector<double> all = of_path;
    all.insert(all.end(), own.begin(), own.end());
    return all;
}

static bool check_tree(const tree_setting &t, uint64_t seed) {
    const tree_copies copies = copy_tree(t, seed);
    const host_results exact = reference_exact(copies.problem, copies.inputs);
    const host_results rounded = reference_rounded(copies.problem, copies.inputs);
    harness_note("%s%s dtype %d, heads %d/%d of %d, window %d, path %d, %d slices, arch %d, tree %d",
                 cf_attention_path_name(t.path), t.deterministic ? " deterministic" : "", (int)t.dtype, t.n_heads,
                 t.n_kv_heads, t.head_size, t.window, t.prefix, t.n(), t.arch, (int)seed);
#ifdef CHUNKFLOW_CUDA_EMULATION
    cuda_emu_reset();
    cuda_emu_set_arch(t.path == CF_ATTENTION_WGMMA ? 90 : t.arch);
#endif
    tree_run r(t);
    r.prepare();
    if (!r.ok) return false;
    int64_t pairs = r.chunk.a->pairs;
    for (const prepared_tiles &b : r.blocks) pairs += b.a->pairs;
    r.make_arrays(copies);
    r.attend(false);
    OK(cudaDeviceSynchronize());
    OK(cudaMemset(r.workspace, 0xFF, r.workspace_bytes + 1));
    r.attend(true);
    OK(cudaDeviceSynchronize());
#ifdef CHUNKFLOW_CUDA_EMULATION
    if (cuda_emu_faults() > 0) FAIL("%lld faults; the first: %s", (long long)cuda_emu_faults(), cuda_emu_first_fault());
#endif
    if (!r.ok) return false;
    int64_t visible = 0; /* counted one by one */
    for (int s = 0; s < t.n(); s++)
        for (int i = 0; i < t.length[(size_t)s]; i++)
            visible += t.window > 0 ? std::min(t.window, t.begin[(size_t)s] + i + 1) : t.begin[(size_t)s] + i + 1;
    bool ok = CHECK_INT(pairs, visible);
    ok = check_accuracy("out", t.dtype, r.gather(r.out), exact.out, rounded.out, 2.0) && ok;
    ok = check_accuracy("dq", t.dtype, r.gather(r.dq), exact.dq, rounded.dq, 3.0) && ok;
    rows_array *const path[] = {&r.path[2], &r.path[3]}, *const own[] = {&r.dk, &r.dv};
    const std::vector<double> *const right[] = {&exact.dk, &exact.dv}, *const excused[] = {&rounded.dk, &rounded.dv};
    for (int i = 0; i < 2; i++) {
        const std::vector<unsigned char> bits = path[i]->get();
        const std::vector<double> got =
            after_path(numbers_of(CF_DTYPE_FP32, bits.data(), bits.size() / 4), r.gather(*own[i]));
        ok = check_accuracy(i ? "dv" : "dk", t.dtype, got, sum_copies(copies, *right[i]),
                            sum_copies(copies, *excused[i]), 3.0) && ok;
    }
    return ok;
}

/* Grows a tree of n slices, whose path comes in several pieces. */
static void grow(tree_setting *t, harness_rng *rng, int n, int most_rows, int prefix) {
    t->prefix = prefix;
    t->length.clear(), t->parent.clear(), t->begin.clear(), t->blocks.clear();
    for (int s = 0; s < n; s++) {
        int from = s - 1;
        for (int64_t up = harness_between(rng, 0, 3); up > 0 && from >= 0; up--) from = t->parent[(size_t)from];
        const int last = from >= 0 ? t->begin[(size_t)from] + t->length[(size_t)from] : prefix;
        const int first = from >= 0 ? t->begin[(size_t)from] + 1 : 0;
        const bool is_end = harness_between(rng, 0, 1) == 0;
        t->add(1 + (int)harness_between(rng, 0, most_rows - 1), from,
               is_end ? last : first + (int)harness_between(rng, 0, (last - first + 1) - 1));
    }
    if (n == 1 && t->begin[0] == 0) t->begin[0] = prefix; /* a path exists only if some slice sees it */
    for (int first = 0, rows; first < prefix; first += rows) {
        rows = std::min(prefix - first, 1 + (int)harness_between(rng, 0, prefix - 1));
        t->blocks.insert(harness_between(rng, 0, 1) == 0 ? t->blocks.begin() : t->blocks.end(), {first, rows});
    }
}

/* A prompt and its answers in one chunk; answers of a path; nested answers; a chain. */
TEST(trees) {
    for (int i = 0; i < 4; i++) {
        tree_setting t;
        t.dtype = (cf_dtype)(CF_DTYPE_BF16 + i % 3);
        if (i == 1) t.prefix = 21, t.blocks = {0, 8, 8, 13};
        else t.add(13, -1, 0);
        for (int s = 0; s < 4; s++) {
            if (i == 1) t.add(3 + s, -1, 21 - 2 * s);
            else t.add(3 + s, i == 3 ? s : 0, i == 3 ? t.begin.back() + t.length.back() : 13);
        }
        if (i == 2) t.add(5, 4, t.begin[4] + 2), t.add(2, 5, t.begin[5] + 5), t.add(4, 0, 6), t.add(7, -1, 0);
        if (!check_tree(t, 400 + (uint64_t)i)) return;
        for (t.window = 2; t.window < 32 && i < 2; t.window++) /* all of their edges */
            if (!check_tree(t, 400 + (uint64_t)i)) return;
    }
}

#ifdef CHUNKFLOW_CUDA_EMULATION
/* Answers of one prompt add to its gradients one after another; those of different prompts do so at the same time. */
TEST(siblings_take_turns) {
    tree_setting t;
    t.path = CF_ATTENTION_MMA, t.dtype = CF_DTYPE_BF16, t.head_size = 64;
    for (int prompt = 0; prompt < 3; prompt++) {
        const int first = t.n();
        t.add(20, -1, 0);
        for (int s = 0; s < 2 + prompt; s++) t.add(5, first, 20);
    }
    if (!check_tree(t, 450)) return;
    CHECK_INT(cuda_emu_kernel("attention_backward").launches, 1 + 4);
}
#endif

TEST(random_trees) {
    harness_rng rng = {77};
    for (int i = 0; i < harness_rounds(60, 14); i++) {
        tree_setting t;
        grow(&t, &rng, 1 + (int)harness_between(&rng, 0, 8), 12, i % 3 ? (int)harness_between(&rng, 0, 39) : 0);
        t.dtype = i % 2 ? CF_DTYPE_FP32 : CF_DTYPE_BF16;
        t.window = i % 4 == 1 ? 2 + (int)harness_between(&rng, 0, 48) : 0;
        t.gap = i % 5 == 2 ? 3 : 0;
        t.overwrite = i % 2;
        if (!check_tree(t, 410 + (uint64_t)i)) return;
    }
}

/* Trees on the fused paths, with tiles of every kind. */
TEST(fused_trees) {
    harness_rng rng = {78};
    const int last = last_path() == CF_ATTENTION_WGMMA ? 2 : 1;
    for (int i = 0; i < harness_rounds(24, 7); i++) {
        tree_setting t;
        t.path = i % (last + 1) == 1 ? CF_ATTENTION_WGMMA : CF_ATTENTION_MMA;
        if (last == 1) t.path = CF_ATTENTION_MMA;
        t.dtype = i % 3 == 2 ? CF_DTYPE_FP16 : CF_DTYPE_BF16;
        t.n_heads = i % 5 == 3 ? harness_rounds(7, 3) : 2;
        t.head_size = i % 4 == 3 ? 128 : 64;
        t.deterministic = i % 3 != 1;
        t.window = i % 4 == 2 ? 20 + (int)harness_between(&rng, 0, 99) : 0;
        t.gap = i % 3 == 1 ? 5 : 0;
        t.overwrite = i % 4 == 0;
        grow(&t, &rng, 2 + (int)harness_between(&rng, 0, 4), 70, i % 4 ? 60 + (int)harness_between(&rng, 0, 99) : 0);
        if (i == 6) t.processors = 132, t.n_kv_heads = 1;
        if (i == 6) t.length[0] = harness_rounds(600, 300), t.blocks = {0, t.prefix};
        if (!check_tree(t, 500 + (uint64_t)i)) return;
    }
}

/* Trees and blocks that cannot be. */
TEST(trees_that_are_refused) {
    static const struct {
        int32_t parents[3], begins[3], keys[4];
        const char *field;
    } cases[] = {
        {{-2, 0, 0}, {0, 4, 4}, {0, 4, 6, 9}, "parents"}, {{-1, 1, 0}, {0, 4, 4}, {0, 4, 6, 9}, "parents"},
        {{-1, -1, 0}, {0, 4, 4}, {0, 4, 6, 9}, "parents"}, {{-1, 0, 0}, {0, 0, 4}, {0, 4, 6, 9}, "begins"},
        {{-1, 0, 0}, {0, 5, 4}, {0, 4, 6, 9}, "begins"}, {{-1, 0, -1}, {0, 4, 8}, {0, 4, 6, 9}, "begins"},
        {{-1, 0, -1}, {-1, 4, 0}, {0, 4, 6, 9}, "begins"}, {{-1, 0, 0}, {0, 4, 4}, {0, 4, 7, 10}, "cu_seqlens_k"},
    };
    static const int32_t cu[] = {0, 4, 6, 9};
    cf_attention_desc d = {};
    cf_error error = {};
    size_t bytes = 12345;
    d.n_heads = 1, d.head_size = 64, d.n_slices = 3, d.cu_seqlens_q = cu, d.arch = 80, d.prefix = 7;
    for (const auto &c : cases) {
        d.cu_seqlens_k = c.keys, d.parents = c.parents, d.begins = c.begins;
        CHECK_INT(cf_attention_size(&d, &bytes, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, c.field);
    }
    d.begins = NULL;
    CHECK_INT(cf_attention_size(&d, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "begins");
    CHECK_INT((int64_t)bytes, 12345);
    std::vector<int32_t> chain(66), begins(66), rows(67);
    for (int i = 0; i < 66; i++) chain[(size_t)i] = i - 1, begins[(size_t)i] = i, rows[(size_t)i + 1] = i + 1;
    d.parents = chain.data(), d.begins = begins.data(), d.cu_seqlens_q = d.cu_seqlens_k = rows.data(), d.prefix = 0;
    d.n_slices = 66;
    CHECK_INT(cf_attention_size(&d, &bytes, &error), CF_ERROR_LIMIT);
    CHECK_INT(error.item, 65);
    d.n_slices = 65;
    std::vector<uint64_t> memory;
    const cf_attention *a = nullptr;
    CHECK_INT(cf_attention_size(&d, &bytes, &error), CF_OK);
    CHECK_INT(cf_attention_prepare(&d, aligned(memory, bytes), bytes, &a, &error), CF_OK);
    CHECK_INT(a->n_levels, 64);
    for (int64_t first : {-1, 64}) {
        CHECK_INT(cf_attention_block_size(a, first, 0, &bytes, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "first");
    }
    CHECK_INT(cf_attention_block_size(a, 63, 0, &bytes, &error), CF_OK);
    CHECK_INT(cf_attention_block_size(a, 0, 1, &bytes, &error), CF_ERROR_ARGUMENT);
}

#ifdef CHUNKFLOW_CUDA_EMULATION
#define EMULATED_CASES \
    , CASE(siblings_take_turns), CASE(every_order), CASE(what_was_sent_is_there), \
        CASE(passes_that_are_given_up), CASE(passes_allocate_nothing), \
        CASE(every_call_fails_once), CASE(copies_hide), CASE(any_order_of_calls)
#else
#define EMULATED_CASES
#endif

SUITE(blocks, CASE(types), CASE(prefixes), CASE(windows), CASE(fused), CASE(fused_sums_in_memory), CASE(fused_parts),
      CASE(wgmma), CASE(layers_and_rows_that_are_refused),
      CASE(blocks_that_are_refused), CASE(pairs), CASE(trees), CASE(random_trees), CASE(fused_trees),
      CASE(trees_that_are_refused) EMULATED_CASES);
