/* Files of tensors. The first byte says whether the length of the header is put right, so that what lies behind that
   check is also reached: then the header ends with the last '}' of the input. */

#define _XOPEN_SOURCE 700
#include "fuzz.h"

#include "examples/safetensors.h"

const char *fuzz_json_fault(const char *text, size_t bytes); /* by the tests' own reader; NULL: it is JSON */

enum { LENGTH = 8 };

/* A copy of `bytes` bytes, with the length of its header put right if that is wanted and there is one. */
static unsigned char *make_file(const uint8_t *data, size_t bytes, int right) {
    unsigned char *file = TAKE(unsigned char, (int64_t)bytes);
    size_t end = bytes, i;
    memcpy(file, data, bytes);
    while (end > LENGTH && file[end - 1] != '}') end--;
    if (right && end > LENGTH)
        for (i = 0; i < LENGTH; i++) file[i] = (unsigned char)((uint64_t)(end - LENGTH) >> 8 * i);
    return file;
}

/* Shape and dtype, multiplied out in floating point, which has no bounds to be watched. */
static double bytes_of(const safetensor *t) {
    double bytes = t->dtype == TENSOR_F32 ? 4 : 2;
    int64_t i;
    for (i = 0; i < t->n_dimensions; i++) bytes *= (double)t->shape[i];
    return bytes;
}

/* Every byte of the data belongs to one tensor, and every tensor has as many as it says. */
static void check_places(const safetensors *s) {
    unsigned char *owners = TAKE(unsigned char, s->data_bytes);
    int64_t i, k;
    memset(owners, 0, (size_t)s->data_bytes);
    for (i = 0; i < s->count; i++) {
        const safetensor *t = &s->tensors[i];
        FUZZ_CHECK(t->begin >= 0 && t->begin <= t->end && t->end <= s->data_bytes, "tensor %s: %lld to %lld", t->name,
                   (long long)t->begin, (long long)t->end);
        FUZZ_CHECK(t->dtype == TENSOR_OTHER || bytes_of(t) == (double)(t->end - t->begin), "tensor %s: %g bytes",
                   t->name, bytes_of(t));
        for (k = t->begin; k < t->end; k++) FUZZ_CHECK(owners[k]++ == 0, "tensor %s: a byte of two", t->name);
    }
    for (k = 0; k < s->data_bytes; k++) FUZZ_CHECK(owners[k] == 1, "byte %lld is nobody's", (long long)k);
    free(owners);
}

/* The number in these bits, by arithmetic. */
static double half_value(unsigned bits) {
    int exponent = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
    double size = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) size = fraction ? (double)NAN : (double)INFINITY;
    return bits >> 15 ? -size : size;
}

/* Returns the number in these bytes, lowest first. Every float that is no NaN is one double, so that bits need not be
   compared. */
static double value_at(const unsigned char *bytes, tensor_dtype dtype) {
    uint32_t bits = (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8;
    float value;
    if (dtype == TENSOR_F16) return half_value(bits);
    bits = dtype == TENSOR_BF16 ? bits << 16 : bits | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static void check_numbers(const safetensors *s, const safetensor *t, const unsigned char *data) {
    int64_t size = tensor_dtype_bytes(t->dtype), n = (t->end - t->begin) / size, i;
    float *got;
    if (t->dtype == TENSOR_OTHER) return;
    got = TAKE(float, n);
    memset(got, 0xff, (size_t)n * sizeof *got);
    FUZZ_CHECK(fuzz_exit(safetensors_read(s, t, 0, n, got)), "tensor %s cannot be read", t->name);
    for (i = 0; i < n; i++) {
        double wanted = value_at(data + t->begin + i * size, t->dtype);
        FUZZ_CHECK(isnan(wanted) ? isnan(got[i]) : wanted == (double)got[i] && !signbit(wanted) == !signbit(got[i]),
                   "tensor %s, number %lld: wanted %g, got %g", t->name, (long long)i, wanted, (double)got[i]);
    }
    free(got);
}

static void check_tensors(const safetensors *s, const unsigned char *file, size_t bytes) {
    const char *fault = fuzz_json_fault(s->text, (size_t)s->data_at - LENGTH);
    int64_t i;
    FUZZ_CHECK(fault == NULL, "the other reader says: %s", fault);
    FUZZ_CHECK(s->data_at + s->data_bytes == (int64_t)bytes, "%lld bytes of data", (long long)s->data_bytes);
    check_places(s);
    for (i = 0; i < s->count; i++) {
        const safetensor *t = &s->tensors[i], *found = safetensors_find(s, t->name);
        FUZZ_CHECK(memchr(t->name, '\0', sizeof t->name) != NULL, "a name without an end");
        FUZZ_CHECK(found != NULL && found <= t, "tensor %s cannot be found", t->name);
        check_numbers(s, t, file + s->data_at);
    }
}

static void run_safetensors(const uint8_t *data, size_t size) {
    size_t bytes = size > 0 ? size - 1 : 0;
    unsigned char *file = make_file(data + (size > 0), bytes, size > 0 && data[0] != 0);
    safetensors s;
    fuzz_file(file, bytes);
    memset(&s, 0xff, sizeof s);
    if (fuzz_exit(safetensors_open("a.safetensors", &s))) {
        check_tensors(&s, file, bytes);
        safetensors_close(&s);
    }
    FUZZ_CHECK(!s.file && !s.text && !s.tensors && s.count == 0 && !s.header.nodes, "something is left");
    free(file);
}

const fuzz_target fuzz_safetensors = {"safetensors", run_safetensors, 0};
