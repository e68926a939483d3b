/* config_json.h - a model's description from the config.json that comes with its weights. */

#ifndef CHUNKFLOW_CONFIG_JSON_H
#define CHUNKFLOW_CONFIG_JSON_H

#include "cli.h"

#define CONFIG_MAX_KINDS 4     /* of layers; no family has more */
#define CONFIG_MAX_LAYERS 1024 /* of a model whose layers differ */

typedef struct config_json {
    cf_model model; /* its name, kinds and pattern point into this struct; after a copy use config_json_take_model */
    char name[64];
    cf_layer kinds[CONFIG_MAX_KINDS];
    char pattern[CONFIG_MAX_LAYERS + 1];
} config_json;

/* Reads the file at `path`; of a multimodal model, its text_config. It reads the types that config_json.c lists, and
   refuses any other, because these formulas would count it wrong. Prediction layers (num_nextn_predict_layers) are not
   counted, because transformers does not load them. Returns an exit code; on failure *out is untouched and the message
   names the file, the line and the member. */
int config_json_read(const char *path, config_json *out);

/* Returns the model, with pointers into this copy of the struct. */
cf_model config_json_take_model(const config_json *config);

#endif /* CHUNKFLOW_CONFIG_JSON_H */
