/* config_json.h - a model's description from the config.json that comes with its weights. */

#ifndef CHUNKFLOW_CONFIG_JSON_H
#define CHUNKFLOW_CONFIG_JSON_H

#include "cli.h"

typedef struct config_json {
    cf_model model; /* its name points to `name` */
    char name[64];
} config_json;

/* Reads the file at `path`. Understood are dense models of the types qwen2, qwen3, llama and mistral whose attention
   sees the whole prefix. A mixture of experts, a sliding window and anything else is refused: counted by these formulas
   it would come out wrong. Returns an exit code; on failure *out is untouched and the
   message names the file, the line and the member. */
int config_json_read(const char *path, config_json *out);

#endif /* CHUNKFLOW_CONFIG_JSON_H */
