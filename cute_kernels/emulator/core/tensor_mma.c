// tcgen05.mma of dense kinds with both operands in shared memory, where operations take effect when they are issued.
// dense_mma.py has the general case, and words what is wrong with an MMA that is not executed here.
#include <stddef.h>
#include <string.h>

#include "descriptors.h"
#include "events.h"
#include "matrix.h"
#include "meter.h"
#include "races.h"

// An MMA that is legal as far as its descriptors say: fields, operands, its CTAs, and of each of them the rows of A and
// of B and the columns of D.
typedef struct Issued {
  MmaFields fields;
  const MmaSums *sums;
  SharedOperand a, b;
  int64_t ctas, first_rank, m, n, column, columns;
} Issued;

static int operand_of(int64_t descriptor, int64_t rows, int64_t element, int64_t mn_major, SharedOperand *operand) {
  int64_t element_bytes = element == TF32 ? 4 : element == F16 || element == BF16 ? 2 : 1;
  Matrix matrix;
  if (matrix_fields(descriptor, &matrix)) return 0;
  int by_words = matrix.swizzle == SWIZZLE_128B_ATOM32B;
  if (mn_major ? element_bytes == 4 && !by_words : by_words) return 0;
  return shared_operand(&matrix, &(MatrixRows){rows, element_bytes, mn_major}, operand);
}

static int decode(const Tables *t, const MmaArguments *arguments, Issued *mma) {
  MmaFields *f = &mma->fields;
  const MmaKind *kind = &t->mma_kinds[arguments->kind];
  int64_t group = arguments->group, lane = arguments->d >> 16 & 0xFFFF;
  if (arguments->disabled || mma_fields(kind, group, arguments->instruction, f)) return 0;
  if (is_narrow(f->a) || is_narrow(f->b) || lane || (group == 1 && f->m == 64)) return 0;
  mma->sums = &kind->sums[f->d];
  mma->ctas = group;
  mma->first_rank = arguments->issuer & 0xFF;
  if (mma->sums->fraction == UNKNOWN_SUMS || mma->first_rank % group || mma->first_rank + group > t->ranks) return 0;
  mma->m = f->m / group;
  mma->n = f->n / group;
  mma->column = arguments->d & 0xFFFF;
  mma->columns = mma->m == 64 ? mma->n : f->n;  // the other half is in lanes 64 to 127
  if (mma->column + mma->columns > TENSOR_COLUMNS) return 0;
  operands_make_room();
  if (!operand_of(arguments->a, mma->m, f->a, f->a_mn_major, &mma->a)) return 0;
  if (!operand_of(arguments->b, mma->n, f->b, f->b_mn_major, &mma->b)) return 0;
  for (int64_t i = 0; i < group; i++) {
    int64_t size = t->ctas[mma->first_rank + i].size;
    if (mma->a.high > size || mma->b.high > size) return 0;
  }
  return 1;
}

// Whether all of D is allocated, and written where that counts. An MMA that writes all of it may be the first to.
static int may_access(const Tables *t, const Issued *mma, int64_t accumulate) {
  for (int64_t i = 0; i < mma->ctas; i++) {
    const TensorCells *memory = &t->tensor_cells[mma->first_rank + i];
    if (memchr(memory->allocated + mma->column, 0, (size_t)mma->columns)) return 0;
    if (accumulate && memchr(memory->full + mma->column, 0, (size_t)mma->columns)) return 0;
  }
  return 1;
}

static void mark_written(const Tables *t, const Issued *mma) {
  for (int64_t i = 0; i < mma->ctas; i++) {
    const TensorCells *memory = &t->tensor_cells[mma->first_rank + i];
    if (!memchr(memory->full + mma->column, 0, (size_t)mma->columns)) continue;
    memset(memory->full + mma->column, 1, (size_t)mma->columns);
    memset(memory->written + mma->column * TENSOR_LANES, 1, (size_t)(mma->columns * TENSOR_LANES));
  }
}

static PipelinedAccess read_of(const Tables *t, int64_t rank, const SharedOperand *operand) {
  return (PipelinedAccess){
      .shadow = t->ctas[rank].shadow, .grain = GRANULE, .offsets = operand->starts, .rows = operand->count,
      .count = operand->nbytes, .epochs = t->context->epochs,
  };
}

// The race detector hears of the operands and of D, as from `Mma.issue`. Accesses that are recorded before one that is not
// in order are recorded again by Python, under the same identity.
static int watch(Tables *t, const Issued *mma, MmaIssuer *issuer, int32_t instruction) {
  enum { PER_CTA = 3, GROUPS = TENSOR_LANES / LANE_GROUP };
  PipelinedAccess accesses[PER_CTA * MOST_CTAS];
  int64_t count = 0;
  Stream *stream = issuer->stream;
  if (!log_flush(t) || !stream || !t->context) return 0;
  const Context *context = t->context;
  for (int64_t rank = mma->first_rank; rank < mma->first_rank + mma->ctas; rank++) {
    accesses[count++] = read_of(t, rank, &mma->b);
    accesses[count++] = read_of(t, rank, &mma->a);
    accesses[count++] = (PipelinedAccess){
        .write = 1, .shadow = t->tensor_cells[rank].shadow, .grain = 1, .rows = 1, .first = mma->column * GROUPS,
        .count = mma->columns * GROUPS, .epochs = t->context->epochs,
    };
  }
  if (!stream->identity) {
    if (!has_room(context->epochs, 1)) return 0;
    stream->identity = new_epoch(context->epochs, stream->column, stream->commits + 1, issuer->text, 0, instruction);
  }
  issuer->latest = stream->identity;
  int64_t lane = issuer->key[1] >> 8 & 255;
  return access_pipelined(accesses, count, context->agent, stream->identity, lane, stream->column) == count;
}

static MmaType type_of(int64_t element, int64_t negated, int64_t mn_major) {
  return (MmaType){element, negated, !mn_major ? 16 : element == F16 || element == BF16 ? 2 : element == TF32 ? 4 : 1};
}

static int execute(const Tables *t, const Issued *mma, int64_t accumulate) {
  const MmaFields *f = &mma->fields;
  Mma product = {
      .ctas = mma->ctas, .m = mma->m, .n = f->n, .a = type_of(f->a, f->negate_a, f->a_mn_major),
      .b = type_of(f->b, f->negate_b, f->b_mn_major), .d = f->d, .accumulate = accumulate, .saturate = f->saturate,
      .fraction = mma->sums->fraction, .result = mma->sums->result, .step = mma->sums->step,
      .lowest = mma->sums->lowest, .columns = mma->columns, .column_stride = TENSOR_LANES, .wrap = mma->columns,
      .wrap_offset = mma->m, .group_stride = LANE_GROUP,
  };
  for (int64_t i = 0; i < mma->ctas; i++) {
    const Cta *cta = &t->ctas[mma->first_rank + i];
    const TensorCells *memory = &t->tensor_cells[mma->first_rank + i];
    const uint8_t *states = t->flags & STATES ? cta->states : NULL;
    product.parts[i] = (MmaPart){
        .a = {cta->data, states, mma->a.places}, .b = {cta->data, states, mma->b.places},
        .cells = memory->cells + mma->column * TENSOR_LANES, .allocated = memory->allocated + mma->column,
    };
  }
  return mma_execute(&product);
}

// What `Mma.asks_for` says: each CTA reads its own rows of A and of B.
static void count(Tables *t, const Issued *mma, int64_t accumulate, int32_t instruction) {
  int64_t accumulator = mma->ctas * mma->m * mma->fields.n * (int64_t)sizeof(uint32_t);
  meter_mma(t, instruction, mma->ctas * (mma->m + mma->n) * K_BYTES, accumulate ? accumulator : 0, accumulator);
}

int32_t tensor_mma(Tables *t, const MmaArguments *arguments, int32_t instruction) {
  Issued mma;
  int64_t accumulate = arguments->accumulate != 0;
  if (!(t->unit_flags & EAGER)) return 0;
  MmaIssuer *issuer = &t->mma_issuers[key_slot(&arguments->group, ISSUER_KEY, MMA_ISSUERS)];
  if (memcmp(issuer->key, &arguments->group, sizeof issuer->key) || !issuer->known) return 0;
  if (!decode(t, arguments, &mma) || !may_access(t, &mma, accumulate)) return 0;
  if (t->unit_flags & WATCHED && !watch(t, &mma, issuer, instruction)) return 0;
  if (!execute(t, &mma, accumulate)) return 0;
  mark_written(t, &mma);
  if (t->meter) count(t, &mma, accumulate, instruction);
  if (t->events) {
    const MmaWork work = {
        {.kind = WORK_MMA}, arguments->issuer & 255, issuer - t->mma_issuers, mma.fields.m, mma.fields.n};
    for (int kind = EVENT_ISSUED; kind <= EVENT_ENDS; kind++)
      event_of_work(t, kind, instruction, &work.work, sizeof work);
  }
  t->progress++;
  t->mmas++;
  return 1;
}
