// Blocks of results of silicon.c, in double or in FP32: rows of B by vectors of rows of A, whose sums stay in registers.
// It is included once for each, with what differs as macros.

static inline void BLOCK_OF(block)(const Sums *s, int64_t row, int64_t lane, int halves) {
  enum { ALL_LANES = BLOCK_VECTORS * BLOCK_LANES };
  const Mma *mma = s->mma;
  Reals above[BLOCK_ROWS][BLOCK_VECTORS], below[BLOCK_ROWS][BLOCK_VECTORS];
  CellInts apart[BLOCK_ROWS][BLOCK_VECTORS];  // -1: what `one_result` computes
  CellInts cut = {0}, endless = {0}, huge = {0};
  uint32_t *cells[BLOCK_VECTORS];
  int vectors = (int)((mma->m - lane) / BLOCK_LANES), lowest = halves ? -14 : -126;
  int32_t bias = BIAS + DIGITS - (int32_t)mma->fraction, lowest_of_zero = (int32_t)mma->lowest;
  UNROLLED for (int v = 0; v < BLOCK_VECTORS; v++)  // beyond m: the first ones, and nothing is stored
    cells[v] = row_of(mma, s->cells, row) + lane_offset(mma, v < vectors ? lane + BLOCK_LANES * v : lane);
  UNROLLED for (int r = 0; r < BLOCK_ROWS; r++)
    UNROLLED for (int v = 0; v < BLOCK_VECTORS; v++) {
      CellBits bits = {0};
      if (s->accumulate) bits = *(const CellBits *)(cells[v] + r * mma->column_stride);
      CellBits size = halves ? bits & 0x7FFF : bits & INT32_MAX;
      CellInts zero = size == 0, special = size >= (halves ? 0x7C00 : 0x7F800000);
      endless |= special;
      bits &= ~special;  // NaN or an infinity, as the result is then
      CellInts exponents = halves ? (CellInts)(size >> 10) - 15 : (CellInts)(size >> 23) - 127;
      CellInts subnormal = exponents < lowest;
      exponents = (exponents & ~subnormal) | (lowest & subnormal);
      zero |= special;
      exponents = (exponents & ~zero) | (lowest_of_zero & zero);
      CellInts tops = *(const CellInts *)(s->tops[r] + lane + BLOCK_LANES * v), higher = tops > exponents;
      exponents = (tops & higher) | (exponents & ~higher);
      apart[r][v] = (CellInts){0};
      if (LARGEST < MOST_TERM) apart[r][v] = exponents > LARGEST;
      if (s->specials)
        apart[r][v] |= *(const CellInts *)(s->a->special + lane + BLOCK_LANES * v) | s->b->special[row + r];
      huge |= apart[r][v] | (exponents > FINITE);
      // Last digits of products may be below the quantum.
      cut |= *(const CellInts *)(s->a->least + lane + BLOCK_LANES * v) + s->b->least[row + r] < exponents - s->spare;
      // Half as much again as a power of two: what is added may be negative, too.
      Words half = (Words){0} + (1LL << (DIGITS - 1));
      Reals magic = (Reals)(__builtin_convertvector(exponents + bias, Words) << DIGITS | half);
      Reals old = halves ? of_halves(bits) : of_floats(bits);
      Words negative = old < 0;
      above[r][v] = magic + (Reals)((Words)old & ~negative);
      below[r][v] = magic + (Reals)((Words)-old & negative);
    }
  const Real *a = s->a->BLOCK_OF(sizes) + lane / ALL_LANES * s->k * PLANES * ALL_LANES;
  const Real *b = s->b->BLOCK_OF(sizes) + s->k * row;
  const int32_t *negative = s->b->negative + s->k * row;
  if (!any_of(cut)) {
    for (int i = s->first; i < s->last; i++) {
      const Real *left = a + ALL_LANES * (PLANES * i + 2);
      UNROLLED for (int r = 0; r < BLOCK_ROWS; r++) {
        Reals right = (negative[s->k * r + i] ? -b[s->k * r + i] : b[s->k * r + i]) - (Reals){0};
        UNROLLED for (int v = 0; v < BLOCK_VECTORS; v++)
          above[r][v] = product_added(above[r][v], *(const Reals *)(left + BLOCK_LANES * v), right);
      }
    }
  } else {
    for (int i = s->first; i < s->last; i++)
      UNROLLED for (int r = 0; r < BLOCK_ROWS; r++) {
        Reals right = b[s->k * r + i] - (Reals){0};
        int64_t sign = negative[s->k * r + i];
        const Real *same = a + ALL_LANES * (PLANES * i + sign), *other = a + ALL_LANES * (PLANES * i + 1 - sign);
        UNROLLED for (int v = 0; v < BLOCK_VECTORS; v++) {
          above[r][v] = product_added(above[r][v], *(const Reals *)(same + BLOCK_LANES * v), right);
          below[r][v] = product_added(below[r][v], *(const Reals *)(other + BLOCK_LANES * v), right);
        }
      }
  }
  int has_huge = any_of(huge), has_endless = any_of(endless);
  CellBits kept = (CellBits){0} + (halves ? ~0u : ~0u << (23 - mma->result)), negative_zero = (CellBits){0} + (halves ? 0x8000u : 0x80000000u);
  UNROLLED for (int r = 0; r < BLOCK_ROWS; r++)
    UNROLLED for (int v = 0; v < BLOCK_VECTORS; v++) {
      if (v >= vectors) continue;
      uint32_t *to = cells[v] + r * mma->column_stride;
      Reals sum = above[r][v] - below[r][v];
      CellBits results = halves ? to_halves(sum) : has_huge ? to_floats(sum) : to_finite(sum);
      results &= kept;
      results &= ~(CellBits)(results == negative_zero);
      if (__builtin_expect(has_endless, 0)) {
        uint32_t largest = halves ? 0x7FFF : INT32_MAX, infinity = halves ? 0x7C00 : 0x7F800000;
        CellBits old = *(const CellBits *)to, size = old & largest;
        CellBits special = (CellBits)(size >= infinity), nan = (CellBits)(size > infinity);
        results = (results & ~special) | (((old & ~nan) | (largest & nan)) & special);
      }
      if (__builtin_expect(has_huge && any_of(apart[r][v]), 0))
        for (int i = 0; i < BLOCK_LANES; i++)
          if (apart[r][v][i]) results[i] = one_result(s, row + r, lane + BLOCK_LANES * v + i, to + i);
      *(CellBits *)to = results;
    }
}

static void BLOCK_OF(product)(const Sums *s) {
  for (int64_t lanes = 0; lanes < s->mma->m; lanes += LANES_OF_16) {
    for (int64_t row = 0; row < s->mma->n; row += BLOCK_ROWS) {
      find_tops(s, row, BLOCK_ROWS, lanes);
      for (int64_t lane = lanes; lane < lanes + LANES_OF_16 && lane < s->mma->m; lane += BLOCK_VECTORS * BLOCK_LANES) {
        if (s->halves) BLOCK_OF(block)(s, row, lane, 1);
        else BLOCK_OF(block)(s, row, lane, 0);
      }
    }
  }
}

#undef BLOCK_OF
#undef BLOCK_ROWS
#undef BLOCK_VECTORS
#undef BLOCK_LANES
#undef Real
#undef Reals
#undef Words
#undef CellInts
#undef CellBits
#undef DIGITS
#undef BIAS
#undef LARGEST
#undef any_of
#undef product_added
#undef of_halves
#undef of_floats
#undef to_halves
#undef to_floats
#undef to_finite
