// Sums of products with scales of their blocks of K, and of elements of less than eight bits: results one by one.
//
// A term is a product times the scales of its row of A and of B; its exponent is the sum of all four encoded exponents.
// Of pairs of FP4, a term is the exact sum of `group` products, and its exponent that of the scales.
#include <math.h>

#include "products.h"

typedef struct Addends {
  int count;
  double values[MOST_K + 1];  // one more: C
  int32_t exponents[MOST_K];
} Addends;

// The terms of a block of `size` elements of K, of rows i and j.
static inline void add_block(
    const ScaledProduct *p, int64_t i, int64_t j, int block, int size, int group, Addends *to) {
  const ScaledOperand *a = &p->a, *b = &p->b;
  int64_t of_a = i * p->k + block * size, of_b = j * p->k + block * size;
  const double *x = a->values + of_a, *y = b->values + of_b;
  i = i * p->blocks + block;
  j = j * p->blocks + block;
  double scale = a->scales[i] * b->scales[j], *values = to->values + to->count;
  int32_t exponent = a->scale_exponents[i] + b->scale_exponents[j], *exponents = to->exponents + to->count;
  to->count += size / group;
  for (int n = 0; n < size && group == 1; n++) {
    values[n] = x[n] * y[n] * scale;
    exponents[n] = a->exponents[of_a + n] + b->exponents[of_b + n] + exponent;
  }
  for (int n = 0; n < size && group > 1; n += group) {
    double dot = 0;
    int some = 0;
    for (int l = n; l < n + group; l++) {
      dot += x[l] * y[l];
      some |= x[l] * y[l] != 0;
    }
    values[n / group] = dot * scale;
    exponents[n / group] = some && scale != 0 ? exponent : NO_EXPONENT;
  }
}

// NaN or an infinity where operands have some. Exact sums are rounded to odd, others not yet rounded.
static inline double sum_of(const ScaledProduct *p, double old, Addends *terms) {
  int32_t top = (int32_t)p->lowest, least = (int32_t)p->lowest_of_c;
  int special = !isfinite(old);
  if (old != 0) top = !special && ilogb(old) > least ? ilogb(old) : least;
  for (int n = 0; n < terms->count; n++) top = terms->exponents[n] > top ? terms->exponents[n] : top;
  for (int n = 0; n < terms->count; n++) special |= !(fabs(terms->values[n]) < HUGE_VAL);
  if (special) {
    for (int n = 0; n < terms->count; n++) old += terms->values[n];
    return old;
  }
  if (!p->fraction) {
    terms->values[terms->count] = old;
    return exact_sum(terms->values, terms->count + 1);
  }
  double units = power((int)p->fraction - top);
  int64_t total = (int64_t)(old * units);
  for (int n = 0; n < terms->count; n++) total += (int64_t)(terms->values[n] * units);
  return (double)total * power(top - (int)p->fraction);
}

void scaled_product(const ScaledProduct *p) {
  Addends terms;
  int size = (int)(p->k / p->blocks);
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      terms.count = 0;
      if (p->group == 1 && size == MOST_K) add_block(p, i, j, 0, MOST_K, 1, &terms);
      else
        for (int block = 0; block < p->blocks; block++) add_block(p, i, j, block, size, (int)p->group, &terms);
      p->d[i * p->n + j] = sum_of(p, p->c[i * p->n + j], &terms);
    }
}
