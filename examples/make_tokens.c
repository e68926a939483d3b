/* make_tokens.c - makes the token file that train_cuda reads - MIT or public domain

       build/make_tokens --out docs.tokens my_texts/                     bytes: a file is a document, as in text.h
       build/make_tokens --ids --vocabulary 151936 --out sft.tokens ids.txt

   With --ids a line is a document: token ids as any tokenizer prints them, separated by blanks. Each "|" switches
   between prompt, which is not predicted, and answer: "1 2 | 3 4 | 5 6 | 7" is a question, its answer, another question
   and its answer. A line without any is all answer. */

#define _POSIX_C_SOURCE 200809L

#include "arguments.h"
#include "tokens.h"

typedef struct settings {
    int64_t vocabulary, longest, prompt;
    const char *out;
    const char **paths;
    int64_t n_paths;
    int ids, help;
} settings;

static int64_t list_settings(settings *s, option list[MAX_OPTIONS]) {
    const option all[] = {
        {"out", TEXT, &s->out, 0, 0, NULL, "the file to write"},
        {"ids", FLAG, &s->ids, 0, 0, NULL, "the files hold token ids, a document a line"},
        {"vocabulary", INTEGER, &s->vocabulary, 1, INT32_MAX, NULL, "with --ids: how many tokens there are"},
        {"max-length", INTEGER, &s->longest, 0, MANY, NULL, "cut longer texts at blank lines to this, 0: never"},
        {"prompt", INTEGER, &s->prompt, 0, MANY, NULL, "first tokens of each document that are no targets"},
        {"help", FLAG, &s->help, 0, 0, NULL, "this"},
    };
    memcpy(list, all, sizeof all);
    return (int64_t)(sizeof all / sizeof all[0]);
}

static settings parse_settings(int argc, char **argv) {
    settings s;
    option list[MAX_OPTIONS];
    memset(&s, 0, sizeof s);
    s.vocabulary = VOCABULARY;
    s.paths = TAKE(const char *, argc);
    const int64_t n = list_settings(&s, list);
    s.n_paths = parse_arguments(argc, argv, list, n, s.paths);
    if (s.help) {
        printf("usage: make_tokens --out FILE [options] FILE|DIRECTORY ...\nMakes a token file for train_cuda.\n\n");
        print_options(list, n);
        return s;
    }
    if (!s.out || s.n_paths == 0) fail(EXIT_BAD_INPUT, "give --out FILE and what to read; --help says more");
    if (s.longest > 0 && s.longest < 3) fail(EXIT_BAD_INPUT, "--max-length must be 0 or at least 3");
    return s;
}

/* ---- documents of ids, while they are read ---- */

typedef struct builder {
    token_set set;
    int64_t n_tokens, documents_room, tokens_room, masks_room;
    int any_mask;
} builder;

static void add_id(builder *b, int64_t id, int ignored) {
    token_set *s = &b->set;
    s->tokens = (int32_t *)grow(s->tokens, &b->tokens_room, b->n_tokens + 1, sizeof *s->tokens);
    s->ignored = (unsigned char *)grow(s->ignored, &b->masks_room, b->n_tokens + 1, 1);
    s->tokens[b->n_tokens] = (int32_t)id;
    s->ignored[b->n_tokens++] = (unsigned char)ignored;
    b->any_mask |= ignored;
}

static void end_document(builder *b) {
    token_set *s = &b->set;
    s->first = (int64_t *)grow(s->first, &b->documents_room, s->count + 2, sizeof *s->first);
    if (s->count == 0) s->first[0] = 0;
    s->first[++s->count] = b->n_tokens;
}

/* Adds a line. The ids before the document's first "|", those between its second and third one, and so on are not
   predicted. */
static void add_line(builder *b, const char *path, int64_t number, char *line, int64_t prompt) {
    int ignored = strchr(line, '|') != NULL;
    const int64_t first = b->n_tokens;
    for (char *word = strtok(line, " \t\r,"); word; word = strtok(NULL, " \t\r,")) {
        char *end = NULL;
        if (strcmp(word, "|") == 0) {
            ignored = !ignored;
            continue;
        }
        errno = 0;
        const long long id = strtoll(word, &end, 10);
        if (*end || errno || id < 0 || id >= b->set.vocabulary)
            fail(EXIT_BAD_INPUT, "%s:%lld: \"%.40s\" is no token id below %lld", path, (long long)number, word,
                 (long long)b->set.vocabulary);
        add_id(b, id, ignored || b->n_tokens - first < prompt);
    }
    if (b->n_tokens > first) end_document(b);
}

static void add_id_file(builder *b, const char *path, int64_t prompt) {
    unsigned char *bytes;
    const int64_t length = read_file(path, &bytes);
    char *text = TAKE(char, length + 1);
    int64_t number = 1;
    memcpy(text, bytes, (size_t)length);
    if (memchr(text, 0, (size_t)length)) fail(EXIT_BAD_INPUT, "%s: it is no text", path);
    for (char *line = text, *next; line; line = next, number++) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        add_line(b, path, number, line, prompt);
    }
    free(text);
    free(bytes);
}

static void add_texts(builder *b, const settings *s) {
    documents d;
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < s->n_paths; i++) add_path(&d, s->paths[i], s->longest);
    for (int64_t i = 0; i < d.count; i++) {
        for (int64_t k = d.first[i]; k < d.first[i + 1]; k++) add_id(b, d.tokens[k], k - d.first[i] < s->prompt);
        end_document(b);
    }
    documents_free(&d);
}

int main(int argc, char **argv) {
    settings s = parse_settings(argc, argv);
    builder b;
    memset(&b, 0, sizeof b);
    b.set.vocabulary = s.ids ? s.vocabulary : VOCABULARY;
    for (int64_t i = 0; i < s.n_paths && s.ids && !s.help; i++) add_id_file(&b, s.paths[i], s.prompt);
    if (!s.ids && !s.help) add_texts(&b, &s);
    if (b.set.count == 0 && !s.help) fail(EXIT_BAD_INPUT, "there is no document in what was read");
    if (!s.help) {
        unsigned char *const masks = b.set.ignored;
        if (!b.any_mask) b.set.ignored = NULL;
        tokens_write(s.out, &b.set);
        printf("%s: %lld documents, %lld tokens, longest %lld%s\n", s.out, (long long)b.set.count,
               (long long)b.n_tokens, (long long)longest_document(&b.set), b.any_mask ? ", with masks" : "");
        b.set.ignored = masks;
    }
    token_set_free(&b.set);
    free((void *)s.paths);
    must_be_printed();
    return 0;
}
