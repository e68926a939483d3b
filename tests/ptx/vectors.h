/* vectors.h - part of ptx.h: the 32 lanes of a register in pieces that the processor has vectors for */

#if defined(__AVX512F__) && defined(__AVX512DQ__)
const int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
const int VECTOR_BYTES = 32;
#else
const int VECTOR_BYTES = 16;
#endif

template <typename T, int N> struct vector_of { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <typename T, int N> using vec = typename vector_of<T, N>::type;
template <size_t BYTES> struct whole_of;
template <> struct whole_of<4> { typedef int32_t type; };
template <> struct whole_of<8> { typedef int64_t type; };

/* As many lanes as fit with the widest of the types. */
template <typename... T> constexpr int lanes_of() {
    size_t widest = 4;
    for (size_t one : {sizeof(T)...}) widest = one > widest ? one : widest;
    return VECTOR_BYTES / (int)widest;
}

template <typename T, int N> inline vec<T, N> piece(warp &w, uint32_t place, int k) {
    return ((const vec<T, N> *)at<T>(w, place))[k];
}

/* Writes the lanes of the mask. */
template <typename T, int N> inline void put(warp &w, uint32_t place, int k, vec<T, N> x) {
    vec<T, N> *to = (vec<T, N> *)at<T>(w, place) + k;
    if (w.mask == ALL_LANES) {
        *to = x;
        return;
    }
    typedef typename whole_of<sizeof(T)>::type whole;
    const vec<whole, N> mask = __builtin_convertvector(((const vec<int32_t, N> *)w.lanes)[k], vec<whole, N>);
    *to = mask ? x : *to;
}

/* The lanes of a predicate's bits, 0 or -1. */
template <typename T, int N> inline vec<typename whole_of<sizeof(T)>::type, N> spread(uint32_t bits, int k) {
    typedef typename whole_of<sizeof(T)>::type whole;
    vec<whole, N> bit;
    for (int l = 0; l < N; l++) bit[l] = (whole)1 << l;
    return ((whole)(bits >> (k * N)) & bit) != 0;
}

/* The other way. */
template <typename V> inline uint32_t gather_bits(V mask, int n) {
    uint32_t bits = 0;
    for (int l = 0; l < n; l++) bits |= (uint32_t)mask[l] & 1u << l;
    return bits;
}

/* d = f(a), f(a, b) or f(a, b, c), lane by lane. F::of takes vectors. */
template <typename D, typename A, typename F> void map1(warp &w, const instruction &i) {
    constexpr int N = lanes_of<D, A>();
    for (int k = 0; k < LANES / N; k++) put<D, N>(w, i.d, k, F::template of<N>(piece<A, N>(w, i.a, k)));
}
template <typename D, typename A, typename B, typename F> void map2(warp &w, const instruction &i) {
    constexpr int N = lanes_of<D, A, B>();
    for (int k = 0; k < LANES / N; k++)
        put<D, N>(w, i.d, k, F::template of<N>(piece<A, N>(w, i.a, k), piece<B, N>(w, i.b, k)));
}
template <typename D, typename A, typename C, typename F> void map3(warp &w, const instruction &i) {
    constexpr int N = lanes_of<D, A, C>();
    for (int k = 0; k < LANES / N; k++)
        put<D, N>(w, i.d, k, F::template of<N>(piece<A, N>(w, i.a, k), piece<A, N>(w, i.b, k), piece<C, N>(w, i.c, k)));
}

/* The same by a function of single numbers, of the mask's lanes only. */
template <typename D, typename A, D (*F)(A)> void each1(warp &w, const instruction &i) {
    D *d = at<D>(w, i.d);
    const A *a = at<A>(w, i.a);
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) d[l] = F(a[l]);
}
template <typename D, typename A, D (*F)(A, A)> void each2(warp &w, const instruction &i) {
    D *d = at<D>(w, i.d);
    const A *a = at<A>(w, i.a), *b = at<A>(w, i.b);
    for (int l = 0; l < LANES; l++)
        if (w.mask >> l & 1) d[l] = F(a[l], b[l]);
}

/* A predicate = f(a, b). */
template <typename A, typename F> void compare(warp &w, const instruction &i) {
    constexpr int N = lanes_of<A>();
    uint32_t bits = 0;
    for (int k = 0; k < LANES / N; k++)
        bits |= gather_bits(F::template of<N>(piece<A, N>(w, i.a, k), piece<A, N>(w, i.b, k)), N) << (k * N);
    uint32_t *d = at<uint32_t>(w, i.d);
    *d = (bits & w.mask) | (*d & ~w.mask);
}
template <typename F> void predicates(warp &w, const instruction &i) {
    uint32_t *d = at<uint32_t>(w, i.d);
    *d = (F::of(*at<uint32_t>(w, i.a), *at<uint32_t>(w, i.b)) & w.mask) | (*d & ~w.mask);
}
