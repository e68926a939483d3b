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
void fused(warp &w, const instruction &i);
void fused_minus(warp &w, const instruction &i);
void fused_from(warp &w, const instruction &i);

/* Products of matrices spend much of their time here. */
inline float float_of_bf16(uint32_t x) {
    const uint32_t bits = x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

inline float float_of_f16(uint32_t x) {
    uint32_t bits = (x & 0x7FFF) << 13;
    float y;
    memcpy(&y, &bits, 4);
    y *= 0x1p112f;
    memcpy(&bits, &y, 4);
    if ((x & 0x7C00) == 0x7C00) bits = 0x7F800000 | (x & 0x3FF) << 13;
    bits |= (x & 0x8000) << 16;
    memcpy(&y, &bits, 4);
    return y;
}

} /* namespace ptx */

#endif
