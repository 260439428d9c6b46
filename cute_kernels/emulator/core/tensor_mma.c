// tcgen05.mma: what it asks for is checked when it is issued, and told to the race detector; its product is computed
// when it takes effect, in the queue of its CTA. tensor_mma.py words what is wrong; scaled_mma.py has the products of
// elements of less than eight bits and those with block scaling.
#include <stddef.h>
#include <string.h>

#include "asynchronous.h"
#include "bytecode.h"
#include "descriptors.h"
#include "matrix.h"
#include "meter.h"
#include "tensor_memory.h"

enum {
  GROUPS = TENSOR_LANES / LANE_GROUP,
  QUARTER = 32,                // lanes, of which tensor memory has four
  A_COLUMNS = K_BYTES / 4,     // of A in tensor memory
  SCALE_ADDRESS = 0x3FFFFFFF,  // bits 30 and 31 may hold the byte, which counts in the instruction descriptor alone
  NO_RULE = -1
};

// Rows of A and of B in each CTA.
static int64_t rows_of(const TensorMma *mma) { return mma->fields.m / mma->group; }
static int64_t columns_of(const TensorMma *mma) { return mma->fields.n / mma->group; }
// 64 rows of one CTA are in half of the lanes of each quarter. Of a pair, the upper half of D's columns is in other lanes.
static int in_quarters(const TensorMma *mma) { return mma->group == 1 && mma->fields.m == 64; }
static int64_t width_of(const TensorMma *mma) {
  return mma->group == 2 && rows_of(mma) == 64 ? columns_of(mma) : mma->fields.n;
}
static int64_t lane_of(int64_t address) { return address >> 16 & 0xFFFF; }
static int64_t column_of(int64_t address) { return address & 0xFFFF; }

// Whether execution ends here, as of all below that check or watch.
#define asks(t, what, mma, ...) stops(t, what, .tensor.record = WHERE(mma), __VA_ARGS__)

static int breaks(Tables *t, const TensorMma *mma, int rule, int64_t operand, int64_t cta) {
  return asks(t, MMA_REFUSED, mma, .tensor.rule = rule, .tensor.operand = operand, .tensor.cta = cta);
}

// --- what is asked for -----------------------------------------------------------------------------------------------

// A (0) or B (1) in shared memory; the rule that it breaks, or NO_RULE.
static int find_operand(const TensorMma *mma, int which, SharedOperand *operand) {
  const MmaFields *f = &mma->fields;
  int64_t element = which ? f->b : f->a, mn_major = which ? f->b_mn_major : f->a_mn_major;
  int64_t nbytes = element == TF32 ? 4 : element == F16 || element == BF16 ? 2 : 1;
  const MatrixRows rows = {which ? columns_of(mma) : rows_of(mma), nbytes, mn_major};
  Matrix matrix;
  if (matrix_fields(which ? mma->b : mma->a, &matrix)) return MMA_MATRIX;
  int by_words = matrix.swizzle == SWIZZLE_128B_ATOM32B;
  if (mn_major ? nbytes == 4 && !by_words : by_words) return MMA_SWIZZLE;
  if (!shared_operand(&matrix, &rows, operand)) operand->high = INT64_MAX;
  return NO_RULE;
}

// Their arrays are good until this thread asks again.
static void find_operands(const TensorMma *mma, SharedOperand operands[2]) {
  operands_make_room();
  for (int which = mma->a_in_tensor != 0; which < 2; which++) find_operand(mma, which, &operands[which]);
}

static int decode(Tables *t, TensorMma *mma) {
  for (int i = 0; i < MOST_DISABLED; i++)
    if (mma->disabled[i]) return breaks(t, mma, MMA_LANES, 0, 0);
  if (mma->group == 2 && mma->rank % 2) return breaks(t, mma, MMA_ODD, 0, 0);
  if (mma->scales) return asks(t, MMA_FIELDS, mma);
  int wrong = mma_fields(&t->mma_kinds[mma->kind], mma->group, mma->instruction, &mma->fields);
  return wrong && breaks(t, mma, MMA_INSTRUCTION, 0, 0);
}

static int refused(Tables *t, TensorMma *mma, SharedOperand operands[2]) {
  const int64_t scales[] = {mma->scale_a, mma->scale_b};
  int first = mma->a_in_tensor != 0;  // operand in shared memory
  if (decode(t, mma)) return 1;
  if (mma->rank + mma->group > t->ranks) return breaks(t, mma, MMA_NO_CTA, 0, mma->rank + 1);
  if (first && (rows_of(mma) != TENSOR_LANES || mma->fields.a_mn_major || lane_of(mma->a)))
    return breaks(t, mma, MMA_A, 0, 0);
  operands_make_room();
  for (int which = first; which < 2; which++) {
    int rule = find_operand(mma, which, &operands[which]);
    if (rule != NO_RULE) return breaks(t, mma, rule, which, 0);
  }
  for (int which = 0; which < 2 && mma->scales; which++)
    if (lane_of(scales[which])) return breaks(t, mma, MMA_SCALES, which, 0);
  for (int64_t rank = mma->rank; rank < mma->rank + mma->group; rank++)
    for (int which = 1; which >= first; which--)
      if (operands[which].high > t->ctas[rank].size) return breaks(t, mma, MMA_OUTSIDE, which, rank);
  return 0;
}

// --- what the race detector hears ------------------------------------------------------------------------------------

// An access to shared memory, or to tensor memory, where what the pipe did before is in order.
static Access access_of(const Context *context, const TensorMma *mma, const Stream *stream, int tensor) {
  const Agent *agent = context->agent;
  const int32_t *known = agent_row(agent, tensor ? ROW_TENSOR : ROW_VISIBLE);
  return (Access){
      .grain = tensor ? 1 : GRANULE, .rows = 1, .known = known, .width = agent->width, .own = tensor ? -1 : agent->base,
      .lane = tensor ? -1 : mma->lane, .exempt = tensor ? stream->column : -1, .epochs = context->epochs,
      .identity = stream->identity, .fenced = tensor ? NULL : agent_row(agent, ROW_PROXY),
      .read_known = tensor ? known : NULL, .read_column = stream->column, .instruction = -1, .issuer = agent,
  };
}

static int races(Tables *t, const Access *access) {
  if (access->grain == GRANULE && access_pipelined(access)) return 0;
  return !access_whole(access, t->context->ask, NULL) && stops(t, RACE_RAISED);
}

static int read_races(Tables *t, const TensorMma *mma, const Stream *stream, int64_t rank, const SharedOperand *operand) {
  Access access = access_of(t->context, mma, stream, 0);
  access.shadow = t->context->all_shared[rank];
  access.offsets = operand->starts;
  access.rows = operand->count;
  access.count = operand->nbytes;
  return races(t, &access);
}

// Columns of tensor memory, in lanes from one on.
static int tensor_races(
    Tables *t, const TensorMma *mma, const Stream *stream, int64_t rank, int64_t address, int64_t columns, int write) {
  int64_t offsets[TENSOR_COLUMNS * GROUPS], first = lane_of(address) / LANE_GROUP, base = column_of(address) * GROUPS;
  Access access = access_of(t->context, mma, stream, 1);
  access.shadow = t->tensor_cells[rank].shadow;
  access.write = write;
  access.base = base + first;
  if (first >= GROUPS) return 0;  // which is reported when it takes effect
  if (write && in_quarters(mma)) {
    access.rows = 0;
    access.count = 1;
    for (int64_t column = 0; column < columns; column++)
      for (int64_t group = first; group < GROUPS; group += QUARTER / LANE_GROUP)
        offsets[access.rows++] = base + column * GROUPS + group;
    access.offsets = offsets;
  } else if (first) {
    access.rows = columns;
    access.stride = GROUPS;
    access.count = GROUPS - first;
  } else {
    access.count = columns * GROUPS;
  }
  return races(t, &access);
}

// Columns of the scales of A and of B: 32 rows in one.
static int64_t scale_columns(const TensorMma *mma, int which) {
  return ((which ? width_of(mma) : rows_of(mma)) + QUARTER - 1) / QUARTER;
}

static int watch_cta(Tables *t, const TensorMma *mma, const Stream *stream, int64_t rank, const SharedOperand operands[2]) {
  const int64_t scales[] = {mma->scale_a, mma->scale_b};
  if (read_races(t, mma, stream, rank, &operands[1])) return 1;
  if (mma->a_in_tensor ? tensor_races(t, mma, stream, rank, mma->a, A_COLUMNS, 0)
                       : read_races(t, mma, stream, rank, &operands[0]))
    return 1;
  for (int which = 0; which < 2 && mma->scales; which++)
    if (tensor_races(t, mma, stream, rank, scales[which], scale_columns(mma, which), 0)) return 1;
  return tensor_races(t, mma, stream, rank, mma->d, width_of(mma), 1);
}

static int watch(Tables *t, const TensorMma *mma, const SharedOperand operands[2]) {
  TensorThread *thread = &t->tensor_threads[mma->work.warp * LANES + mma->lane];
  int64_t form = 2 * mma->kind + mma->group;
  if (!thread->stream || (!thread->stream->identity && thread->form != form)) {
    if (asks(t, MMA_NAME, mma, .tensor.thread = WHERE(thread))) return 1;
    thread->form = form;
  }
  Stream *stream = thread->stream;
  if (!stream->identity)
    stream->identity = work_epoch(t, &mma->work, stream->column, stream->commits + 1, thread->text, 0);
  if (!stream->identity) return 1;
  if (mma->group == 2) stream->paired = stream->identity;
  for (int64_t rank = mma->rank; rank < mma->rank + mma->group; rank++)
    if (watch_cta(t, mma, stream, rank, operands)) return 1;
  return 0;
}

// --- the product -----------------------------------------------------------------------------------------------------

static int64_t d_parts(const TensorMma *mma, Rectangle parts[TENSOR_LANES / QUARTER]) {
  int64_t lane = lane_of(mma->d), column = column_of(mma->d), width = width_of(mma), count = 0;
  parts[0] = (Rectangle){0, TENSOR_LANES, column, width};
  if (!in_quarters(mma)) return 1;
  for (; count < TENSOR_LANES / QUARTER; count++)
    parts[count] = (Rectangle){lane + QUARTER * count, QUARTER / 2, column, width};
  return count;
}

// Whether D and A in tensor memory may be accessed, and no CTA has exited.
static int may_touch(const Tables *t, const TensorMma *mma) {
  const Rectangle a = {0, TENSOR_LANES, column_of(mma->a), A_COLUMNS};
  Rectangle parts[TENSOR_LANES / QUARTER];
  int64_t count = d_parts(mma, parts), lane = lane_of(mma->d);
  if (lane && !(in_quarters(mma) && lane == QUARTER / 2)) return 0;
  for (int64_t rank = mma->rank; rank < mma->rank + mma->group; rank++) {
    const TensorCells *memory = &t->tensor_cells[rank];
    if (t->ctas[rank].exited) return 0;
    if (mma->a_in_tensor && !cells_allowed(memory, &a, 1)) return 0;
    for (int64_t i = 0; i < count; i++)
      if (!cells_allowed(memory, &parts[i], mma->accumulate != 0)) return 0;
  }
  return 1;
}

// Where the words of A are in tensor memory, from its first column on.
static const int64_t *places_in_tensor(void) {
  static _Thread_local int64_t places[TENSOR_LANES * A_COLUMNS];
  if (!places[1])
    for (int64_t i = 0; i < TENSOR_LANES * A_COLUMNS; i++) places[i] = i % A_COLUMNS * TENSOR_LANES + i / A_COLUMNS;
  return places;
}

static MmaType type_of(int64_t element, int64_t negated, int64_t mn_major) {
  return (MmaType){element, negated, !mn_major ? 16 : element == F16 || element == BF16 ? 2 : element == TF32 ? 4 : 1};
}

// 0: nothing is done, bytes of operands are not initialised, which `unchecked` says not to look at.
static int multiply(const Tables *t, const TensorMma *mma, const MmaSums *sums, int unchecked) {
  const MmaFields *f = &mma->fields;
  int64_t width = width_of(mma);
  SharedOperand operands[2];
  find_operands(mma, operands);
  Mma product = {
      .ctas = mma->group, .m = rows_of(mma), .n = f->n, .a = type_of(f->a, f->negate_a, f->a_mn_major),
      .b = type_of(f->b, f->negate_b, f->b_mn_major), .d = f->d, .accumulate = mma->accumulate, .saturate = f->saturate,
      .fraction = sums->fraction, .result = sums->result, .step = sums->step, .lowest = sums->lowest,
      .column_stride = TENSOR_LANES, .wrap = width, .wrap_offset = rows_of(mma),
      .group_stride = in_quarters(mma) ? QUARTER : LANE_GROUP,
  };
  if (mma->a_in_tensor) product.a.unit = sizeof(uint32_t);
  for (int64_t i = 0; i < mma->group; i++) {
    const Cta *cta = &t->ctas[mma->rank + i];
    const uint8_t *states = t->flags & STATES && !unchecked ? cta->states : NULL;
    uint32_t *cells = t->tensor_cells[mma->rank + i].cells;
    MmaOperand a = {cta->data, states, operands[0].places};
    if (mma->a_in_tensor)
      a = (MmaOperand){(const uint8_t *)(cells + column_of(mma->a) * TENSOR_LANES), NULL, places_in_tensor()};
    product.parts[i] = (MmaPart){
        .a = a, .b = {cta->data, states, operands[1].places},
        .cells = cells + column_of(mma->d) * TENSOR_LANES + lane_of(mma->d),
    };
  }
  return mma_execute(&product);
}

int32_t tensor_mma_run(WorkQueues *all, TensorMma *mma) {
  Tables *t = all->tables;
  const MmaFields *f = &mma->fields;
  const MmaSums *sums = mma->scales ? NULL : &t->mma_kinds[mma->kind].sums[f->d];
  if (!sums || is_narrow(f->a) || is_narrow(f->b) || sums->fraction == UNKNOWN_SUMS) {
    if (asks(t, MMA_PRODUCT, mma)) return 1;
  } else if (!may_touch(t, mma) || !multiply(t, mma, sums, 0)) {
    if (asks(t, MMA_TOUCHES, mma)) return 1;
    multiply(t, mma, sums, 1);  // execution goes on after the report, with whatever the memory holds
  }
  Rectangle parts[TENSOR_LANES / QUARTER];
  int64_t count = d_parts(mma, parts);
  for (int64_t rank = mma->rank; rank < mma->rank + mma->group; rank++)
    for (int64_t i = 0; i < count; i++) cells_mark_written(&t->tensor_cells[rank], &parts[i]);
  t->mmas++;
  return 0;
}

// --- issue -----------------------------------------------------------------------------------------------------------

// Each CTA reads its own rows of A and of B; the pair exchanges what it reads of B.
static void meter(const Tables *t, const TensorMma *mma) {
  if (!t->meter) return;
  int64_t rows = columns_of(mma) + (mma->a_in_tensor ? 0 : rows_of(mma));
  int64_t accumulator = rows_of(mma) * mma->fields.n * (int64_t)sizeof(uint32_t);
  int64_t read = (mma->accumulate ? accumulator : 0) + (mma->a_in_tensor ? rows_of(mma) * K_BYTES : 0);
  meter_mma(t, mma->work.place, mma->group * rows * K_BYTES, mma->group * read, mma->group * accumulator);
}

int32_t tensor_mma(Tables *t, const TensorMma *given) {
  TensorMma mma = *given;
  SharedOperand operands[2];
  mma.work.kind = WORK_TENSOR_MMA;
  mma.work.queue = TENSOR_QUEUE - mma.rank;
  mma.scale_a &= SCALE_ADDRESS;
  mma.scale_b &= SCALE_ADDRESS;
  if (refused(t, &mma, operands)) return 1;
  if (t->context && watch(t, &mma, operands)) return 1;
  meter(t, &mma);
  return work_submit(t->work, &mma.work, sizeof mma);
}

// By each lane. The list b: kind, group, whether A is in tensor memory, scales of a row, whether the predicate varies; D, A,
// B, instruction descriptor, predicate, scales of A and of B, lanes of D that are left out.
static const Instruction *run_tensor_mma(const Instruction *i, uint8_t *s, Machine *m) {
  enum { FACTS = 5 };
  const WarpHeader *header = (const WarpHeader *)(const void *)s;
  const uint32_t *list = m->program->lists + i->b;
  Tables *t = m->tables;
  t->place = place_of(i);
  t->progress++;
  if (!takes_logs(t)) return leave(m, ERROR);
  for (uint32_t left = m->active; left; left &= left - 1) {
    int lane = __builtin_ctz(left);
    const uint32_t *item = list + FACTS;
    TensorMma mma = {
        .work = {.place = t->place, .warp = header->number}, .kind = list[0], .group = list[1], .a_in_tensor = list[2],
        .scales = list[3], .rank = header->rank, .lane = lane,
    };
    mma.d = listed(s, *item++, lane, 0);
    mma.a = listed(s, *item++, lane, 0);
    mma.b = listed(s, *item++, lane, 0);
    mma.instruction = listed(s, *item++, lane, 0);
    mma.accumulate = listed(s, *item++, lane, 0) >> (list[4] ? lane : 0) & 1;
    mma.scale_a = listed(s, *item++, lane, 0);
    mma.scale_b = listed(s, *item++, lane, 0);
    for (int k = 0; k < MOST_DISABLED; k++) mma.disabled[k] = listed(s, *item++, lane, 0);
    if (tensor_mma(t, &mma)) return leave(m, ERROR);
  }
  return i + 1;
}

const Operation mma_operations[] = {{"tensor_mma", run_tensor_mma, 0}, {0, 0, 0}};
