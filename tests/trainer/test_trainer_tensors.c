/* test_trainer_tensors.c - tests the reader and the writer of safetensors files. Written tensors are read back, files
   by another writer are reproduced byte for byte, and damaged files are refused or read within their bounds.

       test_trainer_tensors DIRECTORY     for the files that it makes
   */

#define _XOPEN_SOURCE 700

#define CHUNKFLOW_IMPLEMENTATION
#include "../../chunkflow.h"

#include "../../examples/safetensors.h"

#include <unistd.h>

static int passed = 0, failed = 0;

static void expect(int holds, const char *what) {
    if (holds) passed++;
    else failed++;
    if (!holds) printf("FAIL %s\n", what);
}

static char path[4096], again[4096], words[4096];

/* Returns the text on standard error, which goes to a file, since the last call. */
static const char *said(void) {
    static char text[4096];
    static long at;
    FILE *file = fopen(words, "rb");
    text[0] = 0;
    if (!file) return text;
    fseek(file, at, SEEK_SET);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    at = ftell(file);
    fclose(file);
    return text;
}

static void expect_said(const char *why) {
    const char *text = said();
    const char *end = strchr(text, '\n');
    const int placed = strchr(why, '/') || strstr(text, ":1: ") != NULL; /* names the file, or its first line */
    const int holds = strstr(text, why) != NULL && placed && end && end[1] == 0; /* in one line */
    expect(holds, why);
    if (!holds) printf("    it said: %s", text);
}

/* Makes a file with this header and so many bytes of data: 0, 1, 2, ... */
static void make_file(const char *header, int64_t claimed, int64_t data_bytes) {
    FILE *file = fopen(path, "wb");
    if (!file) fail(EXIT_CHECK_FAILED, "%s cannot be written", path);
    for (int i = 0; i < 8; i++) fputc((int)((uint64_t)claimed >> 8 * i & 255), file);
    fputs(header, file);
    for (int64_t i = 0; i < data_bytes; i++) fputc((int)(i & 255), file);
    fclose(file);
}

static int opens(const char *header, int64_t data_bytes) {
    safetensors s;
    make_file(header, (int64_t)strlen(header), data_bytes);
    const int code = safetensors_open(path, &s);
    if (code == CLI_OK) safetensors_close(&s);
    return code;
}

/* ---- faults, and the source of the message: standard error, which the script reads ---- */

static void test_refusals(void) {
    static const char *const bad[] = {
        "", "{", "[]", "{} x", "{\"a\":1}", "{\"a\":{}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}",         /* less than the shape */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}",         /* more */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}",         /* backwards */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}",        /* past the end */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[9223372036854775807,4],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387905],\"data_offsets\":[0,8]}}", /* 4 times that is 4 */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",         /* bytes of nobody at the end */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",         /* and at the beginning */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
        "\"data_offsets\":[4,8]}}",                                                 /* overlapping */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"a\":{\"dtype\":\"F32\",\"shape\":[2],"
        "\"data_offsets\":[0,8]}}",                                                 /* a name twice */
        "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", "{\"a\":{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},\"b\":3}", /* the first is sound */
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]},\"b\":{\"dtype\":\"F32\",\"shape\":[1],"
        "\"data_offsets\":[7,11]}}",                                                /* two things are wrong */
    };
    static const char *const whys[] = {
        "wanted a JSON value", "wanted the name of a member", "the header is no object", "there is more behind",
        "a: it is no object", "a: wanted a dtype, a string", "hold more or less", "hold more or less",
        "the end lies before", "past the end of the file", "is negative", "is negative", "too many numbers",
        "wanted two numbers", "a whole number of at most 63 bits", "hold more or less", "hold more or less",
        "a whole number of at most 63 bits", "too many numbers", "there are 4 bytes more",
        "before it there is a hole", "b: data_offsets: it overlaps", "a: given twice", "dtype: given twice",
        "a: wanted a dtype, a string", "a: wanted a dtype, a string", "a: wanted a dtype, a string",
        "a: wanted a dtype, a string", "b: it is no object", "data_offsets: they lead past the end of the file"};
    char what[64];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(what, sizeof what, "header %d is refused", (int)i);
        (void)said();
        expect(opens(bad[i], 8) == CLI_WRONG, what);
        expect_said(whys[i]);
    }
    expect(opens("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8) == CLI_OK, "a whole file");
    expect(opens("{\"a\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8) == CLI_OK, "another type");
    expect(opens("{\"a\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]},"
                 "\"b\":{\"dtype\":\"BF16\",\"shape\":[],\"data_offsets\":[0,2]}}", 2) == CLI_OK, "an empty tensor and a number");
    static const char *const three[] = {"\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}",
                                        "\"b\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[2,2]}",
                                        "\"c\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]}"};
    for (int first = 0; first < 3; first++) /* in any order of the header */
        for (int second = 0; second < 3; second++) {
            char header[400];
            if (first == second) continue;
            snprintf(header, sizeof header, "{%s,%s,%s}", three[first], three[second], three[3 - first - second]);
            expect(opens(header, 6) == CLI_OK, "an empty tensor where another begins");
        }
    static const int64_t most = SAFETENSORS_MAX_HEADER;
    const int64_t claims[] = {-1, INT64_MIN, INT64_MAX, most + 1, most, 3, 1, 0};
    for (size_t i = 0; i < sizeof claims / sizeof claims[0]; i++) {
        safetensors s;
        make_file("{}", claims[i], 0);
        (void)said();
        expect(safetensors_open(path, &s) == CLI_WRONG && !s.file && !s.tensors, "a header of another length");
        expect_said(i < 4 ? "bytes, more than 100000000" : i == 4 ? "claims 100000000 bytes, the file has 2" :
                    i == 5 ? "claims 3 bytes, the file has 2" : i == 6 ? "the name of a member" : "wanted a JSON value");
    }
    FILE *file = fopen(path, "wb");
    for (int i = 0; i < 7; i++) fputc(0, file);
    fclose(file);
    safetensors s;
    expect(safetensors_open(path, &s) == CLI_WRONG, "7 bytes");
    expect_said("too short for a safetensors file");
}

/* ---- asking for tensors ---- */

static void test_wants(void) {
    safetensors s;
    static const char header[] = "{\"a\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
                                 "\"b\":{\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[12,16]},"
                                 "\"d\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[16,18]}}";
    make_file(header, (int64_t)strlen(header), 18);
    expect(safetensors_open(path, &s) == CLI_OK && s.count == 3, "three tensors");
    expect(safetensors_want(&s, "d", 1, 0) == &s.tensors[2], "of one dimension");
    (void)said();
    expect(safetensors_want(&s, "a", 2, 3) == &s.tensors[0] && said()[0] == 0, "found");
    expect(!safetensors_want(&s, "a", 3, 2), "another shape");
    expect_said("a: its shape must be [3, 2]");
    expect(!safetensors_want(&s, "a", 2, 2), "of columns");
    expect_said("a: its shape must be [2, 2]");
    expect(!safetensors_want(&s, "a", 3, 3), "of rows");
    expect_said("a: its shape must be [3, 3]");
    expect(!safetensors_want(&s, "a", 6, 0), "another number of dimensions");
    expect_said("a: its shape must be [6]");
    expect(!safetensors_want(&s, "b", 2, 0), "another type");
    expect_said("b: its dtype must be");
    expect(!safetensors_want(&s, "c", 2, 0), "no such tensor");
    expect_said("tensor c: it is missing");
    safetensors_close(&s);
}

/* ---- numbers there and back ---- */

static void fetch_numbers(void *user, int64_t index, int64_t first, int64_t bytes, void *to) {
    memcpy(to, ((const unsigned char **)user)[index] + first, (size_t)bytes);
}

static void test_numbers(void) {
    static const float numbers[6] = {1, -2.5f, 0, 3.4e38f, 1e-40f, -1e-3f};
    static const uint16_t halves[6] = {0x3C00, 0xC100, 0x7BFF, 0x8003, 0x7C00, 0xFC00};
    static const uint16_t shorts[6] = {0x3F80, 0xC020, 0x7F7F, 0x0001, 0x7F80, 0xFF80};
    static const double of_halves[6] = {1, -2.5, 65504, -3 * 5.9604644775390625e-08, INFINITY, -INFINITY};
    const void *data[2] = {numbers, numbers};
    tensor_source two[2] = {{"b", 2, 3, 0}, {"a", 6, 0, 1}};
    float back[6];
    safetensors s;
    expect(safetensors_write(path, two, 2, TENSOR_F32, fetch_numbers, (void *)data) == CLI_OK, "written");
    expect(safetensors_open(path, &s) == CLI_OK && s.data_at % 8 == 0, "opened");
    expect(strcmp(s.tensors[0].name, "a") == 0 && s.tensors[1].begin == 24, "sorted by name");
    expect(safetensors_read(&s, &s.tensors[1], 1, 5, back) == CLI_OK, "read");
    expect(memcmp(back, numbers + 1, 20) == 0, "fp32 comes back");
    safetensors_close(&s);
    tensor_source many[40]; /* given in reverse, and some without data, at the place where the next one begins */
    static char names[40][SAFETENSORS_NAME];
    const void *all[40];
    for (int64_t i = 0; i < 40; i++) {
        snprintf(names[i], sizeof names[i], "%0100d", (int)(99 - i));
        many[i].name = names[i];
        many[i].rows = i % 4 == 0 ? 0 : 2;
        many[i].columns = 3;
        many[i].index = i;
        all[i] = numbers;
    }
    expect(safetensors_write(path, many, 40, TENSOR_F32, fetch_numbers, (void *)all) == CLI_OK, "many are written");
    expect(safetensors_open(path, &s) == CLI_OK && s.count == 40, "and opened");
    for (int64_t i = 0, at = 0; i < s.count; i++) {
        const safetensor *t = &s.tensors[i];
        expect(atoi(t->name) == 60 + (int)i && t->begin == at && t->end == at + ((39 - i) % 4 == 0 ? 0 : 24), "sorted");
        at = t->end;
    }
    safetensors_close(&s);
    for (int bf16 = 0; bf16 < 2; bf16++) {
        tensor_source one = {"x", 6, 0, 0};
        data[0] = bf16 ? shorts : halves;
        expect(safetensors_write(path, &one, 1, bf16 ? TENSOR_BF16 : TENSOR_F16, fetch_numbers, (void *)data) == CLI_OK,
               "16-bit numbers are written");
        expect(safetensors_open(path, &s) == CLI_OK && safetensors_read(&s, &s.tensors[0], 0, 6, back) == CLI_OK,
               "and read");
        for (int i = 0; i < 6; i++) {
            const float wanted = bf16 ? float_of_bits((uint32_t)shorts[i] << 16) : (float)of_halves[i];
            expect(memcmp(&back[i], &wanted, 4) == 0, "a 16-bit number comes back");
        }
        safetensors_close(&s);
    }
    (void)said();
    const int code = safetensors_write("/no/such/folder/file", two, 2, TENSOR_F32, fetch_numbers, (void *)data);
    expect(code != CLI_OK, "no file");
    expect_said("/no/such/folder/file");
}

/* Checks every 16-bit number against the value of its sign, exponent and fraction. */
static void test_all_halves(void) {
    enum { ALL = 65536 };
    static uint16_t bits[ALL];
    static float back[ALL];
    const void *data[1] = {bits};
    tensor_source one = {"x", ALL, 0, 0};
    safetensors s;
    for (int i = 0; i < ALL; i++) bits[i] = (uint16_t)i;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const int digits = bf16 ? 7 : 10, widest = bf16 ? 255 : 31, bias = bf16 ? 127 : 15;
        int wrong = 0;
        const int code = safetensors_write(path, &one, 1, bf16 ? TENSOR_BF16 : TENSOR_F16, fetch_numbers, (void *)data);
        expect(code == CLI_OK && safetensors_open(path, &s) == CLI_OK &&
                   safetensors_read(&s, &s.tensors[0], 0, ALL, back) == CLI_OK,
               "all of 16 bits are read");
        for (int i = 0; i < ALL; i++) {
            const int exponent = (i & 0x7FFF) >> digits, fraction = i & ((1 << digits) - 1);
            const double whole = fraction + (exponent > 0 ? 1 << digits : 0);
            double wanted = ldexp(whole, (exponent > 0 ? exponent : 1) - bias - digits);
            if (exponent == widest) wanted = fraction ? NAN : INFINITY;
            wrong += !signbit(back[i]) != !(i & 0x8000);
            wrong += isnan(wanted) ? !isnan(back[i]) : fabs((double)back[i]) != wanted;
        }
        expect(wrong == 0, "all of 16 bits are what they say");
        safetensors_close(&s);
        static const safetensors empty;
        expect(memcmp(&s, &empty, sizeof s) == 0, "what is closed is empty");
    }
}

/* A file that was shortened after it was opened: none of its data is passed on. The bytes before the tensors are more
   than one read at opening. */
static void test_short_reads(void) {
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[80000,80012]},"
                                 "\"b\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[80012,80018]},"
                                 "\"c\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[80018,80024]},"
                                 "\"d\":{\"dtype\":\"F32\",\"shape\":[20000],\"data_offsets\":[0,80000]}}";
    for (int64_t i = 0; i < 3; i++) {
        safetensors s;
        float numbers[3], before[3];
        memset(numbers, 0x5A, sizeof numbers);
        memset(before, 0x5A, sizeof before);
        make_file(header, (int64_t)strlen(header), 80024);
        expect(safetensors_open(path, &s) == CLI_OK && s.count == 4, "four tensors");
        expect(truncate(path, (off_t)(s.data_at + s.tensors[i].end - 1)) == 0, "and a byte less");
        (void)said();
        expect(safetensors_read(&s, &s.tensors[i], 0, 3, numbers) != CLI_OK, "a tensor that is cut off");
        expect_said(path);
        expect(memcmp(numbers, before, sizeof numbers) == 0, "which leaves the numbers as they are");
        safetensors_close(&s);
    }
}

/* ---- a good file, damaged in hundreds of ways: read within its bounds or refused ---- */

static unsigned char *read_bytes(const char *from, int64_t *n) {
    FILE *file = fopen(from, "rb");
    unsigned char *bytes = TAKE(unsigned char, 1 << 16);
    *n = file ? (int64_t)fread(bytes, 1, 1 << 16, file) : 0;
    if (file) fclose(file);
    return bytes;
}

static int try_bytes(const unsigned char *bytes, int64_t n) {
    FILE *file = fopen(again, "wb");
    safetensors s;
    float numbers[64];
    fwrite(bytes, 1, (size_t)n, file);
    fclose(file);
    if (safetensors_open(again, &s) != CLI_OK) return 0;
    for (int64_t i = 0; i < s.count; i++) {
        const safetensor *t = &s.tensors[i];
        const int64_t count = t->dtype == TENSOR_OTHER ? 0 : (t->end - t->begin) / tensor_dtype_bytes(t->dtype);
        expect(t->begin >= 0 && t->end <= s.data_bytes && s.data_at + s.data_bytes == n, "a tensor within the file");
        expect(safetensors_read(&s, t, 0, min_of(count, 64), numbers) == CLI_OK, "a tensor can be read");
    }
    safetensors_close(&s);
    return 1;
}

static void test_damage(void) {
    static const float numbers[6] = {1, 2, 3, 4, 5, 6};
    const void *data[3] = {numbers, numbers, numbers};
    tensor_source three[3] = {{"model.a", 2, 3, 0}, {"model.b", 6, 0, 1}, {"model.c", 1, 2, 2}};
    int64_t n = 0, n_refused = 0, n_read = 0;
    expect(safetensors_write(path, three, 3, TENSOR_F32, fetch_numbers, (void *)data) == CLI_OK, "written");
    unsigned char *good = read_bytes(path, &n), *bad = TAKE(unsigned char, n + 64);
    expect(try_bytes(good, n), "the file as it was");
    for (int64_t length = 0; length < n; length += 3) n_refused += !try_bytes(good, length);
    expect(n_refused == (n + 2) / 3, "every shorter file is refused");
    for (uint64_t i = 0; i < 600; i++) {
        static const unsigned char likely[] = "0123456789[]{}\",:-. \\e";
        memcpy(bad, good, (size_t)n);
        for (uint64_t k = 0; k <= i % 3; k++) {
            const uint64_t bits = mix64_pair(i, k);
            const int64_t place = (int64_t)(bits % (uint64_t)(i % 5 == 0 ? 8 : n));
            bad[place] = i % 2 ? likely[bits >> 32 & 15] : (unsigned char)(bits >> 40);
        }
        n_read += try_bytes(bad, n);
    }
    expect(n_read > 20 && n_read < 500, "of the damaged files some are refused, some read");
    free(good);
    free(bad);
}

int main(int argc, char **argv) {
    if (argc != 2) return EXIT_BAD_INPUT;
    snprintf(path, sizeof path, "%s/tensors.safetensors", argv[1]);
    snprintf(again, sizeof again, "%s/damaged.safetensors", argv[1]);
    snprintf(words, sizeof words, "%s/tensors.said", argv[1]);
    if (!freopen(words, "wb", stderr)) return EXIT_CHECK_FAILED;
    setvbuf(stderr, NULL, _IONBF, 0);
    test_refusals();
    test_wants();
    test_numbers();
    test_all_halves();
    test_short_reads();
    test_damage();
    remove(path);
    remove(again);
    remove(words);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
