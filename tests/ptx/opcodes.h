/* opcodes.h - the tables of opcodes, each ended by one without a name, and what several files compute */

#ifndef PTX_OPCODES_H
#define PTX_OPCODES_H

#include "ptx.h"

namespace ptx {

extern const opcode ARITHMETIC[]; /* arithmetic.cc */
extern const opcode CONTROL[];    /* run.cc */
extern const opcode MEMORY[];     /* memory.cc */
extern const opcode ASYNC[];      /* async.cc */

void check_product_range(const void *place, size_t bytes); /* cuda.cc */
uint32_t bf16_of(float x);
uint32_t f16_of(float x);
float float_of_bf16(uint32_t x);
float float_of_f16(uint32_t x);
void fused(warp &w, const instruction &i);
void fused_minus(warp &w, const instruction &i);
void fused_from(warp &w, const instruction &i);

} /* namespace ptx */

#endif
