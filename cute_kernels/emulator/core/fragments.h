// Parts of matrices in registers: D and A of wgmma.mma_async, D, A and B of mma.sync (PTX ISA, "Matrix fragments"). Of
// eight rows lane l has row l / 4; all 32 lanes of a register lie side by side.
#pragma once
#include <string.h>

#include "core.h"

enum { QUADS = 4, ROWS_OF_REGISTER = LANES / QUADS };  // lanes of a quad have one row
enum { CHUNK = 16, CHUNKS = K_BYTES / CHUNK };          // bytes of a row that a quad has

// A register of FP32 or integers: lane l has column 2 (l % 4). Cells of D are transposed: column j of row i is at
// j * stride + i.
static inline void take_register(const uint32_t *restrict values, uint32_t *restrict first, int64_t stride) {
  for (int row = 0; row < ROWS_OF_REGISTER; row++)
    for (int quad = 0; quad < QUADS; quad++) first[2 * quad * stride + row] = values[QUADS * row + quad];
}
static inline void give_register(uint32_t *restrict values, const uint32_t *restrict first, int64_t stride) {
  for (int row = 0; row < ROWS_OF_REGISTER; row++)
    for (int quad = 0; quad < QUADS; quad++) values[QUADS * row + quad] = first[2 * quad * stride + row];
}

// One of pairs of FP16: it has the next column too.
static inline void take_halves(const uint32_t *restrict values, uint32_t *restrict first, int64_t stride) {
  for (int lane = 0; lane < LANES; lane++) {
    uint32_t *cell = first + lane % QUADS * 2 * stride + lane / QUADS;
    cell[0] = values[lane] & 0xFFFF;
    cell[stride] = values[lane] >> 16;
  }
}
static inline void give_halves(uint32_t *restrict values, const uint32_t *restrict first, int64_t stride) {
  for (int lane = 0; lane < LANES; lane++) {
    const uint32_t *cell = first + lane % QUADS * 2 * stride + lane / QUADS;
    values[lane] = (cell[0] & 0xFFFF) | cell[stride] << 16;
  }
}

// Registers of D at offsets of `state`, to cells or, with `store`, from there. Registers 4 g to 4 g + 3 of lane l are
// columns 8 g + 2 (l % 4) and the next one, of row l / 4 and then of row l / 4 + 8. FP16: a register is both columns.
static inline void move_accumulators(
    uint8_t *state, const uint32_t *offsets, int64_t registers, uint32_t *cells, int64_t stride, int halves, int store) {
  for (int64_t j = 0; j < registers; j++) {
    uint32_t *values = (uint32_t *)(void *)(state + offsets[j]);
    int64_t column = halves ? j / 2 * 8 : j / 4 * 8 + j % 2, row = (halves ? j % 2 : j / 2 % 2) * ROWS_OF_REGISTER;
    uint32_t *first = cells + column * stride + row;
    if (halves && store) give_halves(values, first, stride);
    else if (halves) take_halves(values, first, stride);
    else if (store) give_register(values, first, stride);
    else take_register(values, first, stride);
  }
}

// A register of A or B: a chunk of each of eight rows of K_BYTES.
static inline void take_chunks(const uint32_t *values, uint8_t *first) {
  for (int row = 0; row < ROWS_OF_REGISTER; row++) memcpy(first + row * K_BYTES, &values[QUADS * row], CHUNK);
}
