/* The reader of JSON that the tests have, under another name beside the one that it is compared with. */

#define json_parse reference_parse
#define json_free reference_free
#define json_get reference_get
#define json_at reference_at
#define json_type_of reference_type_of
#define json_size reference_size
#define json_is_int reference_is_int
#define json_is_string reference_is_string
#define json_double reference_double
#include "../reference/json.c"

const char *fuzz_json_fault(const char *text, size_t bytes);

const char *fuzz_json_fault(const char *text, size_t bytes) {
    json_document document = json_parse(text, bytes);
    const char *fault = document.fault;
    json_free(&document);
    return fault;
}
