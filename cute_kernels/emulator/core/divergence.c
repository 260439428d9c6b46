// Lanes of a warp that have parted at branches: each path runs until it comes to the block where its lanes meet the
// others (the immediate post-dominator of the branch), or waits. Then another path runs (independent thread
// scheduling), so that lanes may wait for each other.
#include <string.h>

#include "bytecode.h"

// Lanes whose meeting block is the end of the kernel have exited: barriers no longer count on them.
static int exits(WarpHeader *warp, Machine *m, int32_t meet, uint32_t lanes) {
  if (meet != m->program->exit) return 0;
  warp->live &= ~lanes;
  return m->call(SITE_EXIT, lanes) == ERROR;
}

static int is_inside(const WarpHeader *warp, int32_t frame, int32_t outer) {
  while (frame != NO_FRAME && frame != outer) frame = warp->frames[frame].below;
  return frame == outer;
}

static Path take(WarpHeader *warp, int path) {
  Path taken = warp->paths[path];
  memmove(&warp->paths[path], &warp->paths[path + 1], (size_t)(--warp->parted - path) * sizeof taken);
  memset(&warp->paths[warp->parted], 0, sizeof taken);
  return taken;
}

static const Instruction *resume(WarpHeader *warp, Machine *m, int path) {
  Path next = take(warp, path);
  warp->pc = next.pc;
  warp->mask = next.mask;
  warp->token = next.token;
  warp->gathers = (int32_t)next.gathers;
  warp->top = next.frame;
  warp->meet = warp->frames[next.frame].meet;
  return start_of(m, warp->pc);
}

// Every path is asked again, before the warp waits.
static void ask_again(WarpHeader *warp) {
  for (int k = 0; k < warp->parted; k++) warp->paths[k].blocked = 0;
}

const Instruction *meet_others(uint8_t *s, Machine *m) {
  WarpHeader *warp = (WarpHeader *)s;
  do {
    Frame *frame = &warp->frames[warp->top];
    frame->arrived |= warp->mask;
    if (exits(warp, m, frame->meet, warp->mask)) return leave(m, ERROR);
    if (--frame->parts) {
      int latest = warp->parted - 1;
      while (!is_inside(warp, warp->paths[latest].frame, warp->top)) latest--;
      return resume(warp, m, latest);
    }
    warp->pc = frame->meet;
    warp->mask = frame->arrived;
    warp->used &= ~(1u << warp->top);
    warp->top = frame->below;
    memset(frame, 0, sizeof *frame);
    warp->meet = warp->top == NO_FRAME ? NO_MEET : warp->frames[warp->top].meet;
    ask_again(warp);
  } while (warp->meet == warp->pc);
  return start_of(m, warp->pc);
}

const Instruction *part(uint8_t *s, Machine *m, uint32_t taken, int32_t target, int32_t following, int32_t meet) {
  WarpHeader *warp = (WarpHeader *)s;
  int32_t top = __builtin_ctz(~warp->used);
  Path first = {.pc = target, .mask = taken, .frame = top};
  Path second = {.pc = following, .mask = m->mask ^ taken, .frame = top};
  if (target == meet) {
    Path other = first;
    first = second;
    second = other;
  }
  warp->used |= 1u << top;
  warp->frames[top] = (Frame){.meet = meet, .below = warp->top, .parts = 2};
  warp->top = top;
  warp->meet = meet;
  warp->pc = first.pc;
  warp->mask = first.mask;
  if (second.pc == meet) {
    warp->frames[top].arrived = second.mask;
    warp->frames[top].parts = 1;
    if (exits(warp, m, meet, second.mask)) return leave(m, ERROR);
  } else {
    warp->paths[warp->parted++] = second;
  }
  return first.pc == meet ? meet_others(s, m) : start_of(m, first.pc);
}

// The block counts once, however often it begins.
static void begins_again(uint8_t *s, const Machine *m, uint32_t block) {
  WarpHeader *warp = (WarpHeader *)s;
  warp->pc = (int32_t)block;
  ((int64_t *)(void *)(s + sizeof *warp))[block]--;
  warp->steps -= start_of(m, warp->pc)->b;
}

static const Instruction *wait_with(uint8_t *s, Machine *m, uint32_t block, int gathers) {
  WarpHeader *warp = (WarpHeader *)s;
  begins_again(s, m, block);
  if (!warp->parted) return leave(m, WAIT);
  warp->paths[warp->parted++] =
      (Path){.pc = warp->pc, .mask = warp->mask, .frame = warp->top, .blocked = 1, .token = warp->token,
             .gathers = gathers};
  int all = 1;
  for (int k = 0; k < warp->parted; k++) all &= warp->paths[k].blocked;
  if (all) ask_again(warp);
  warp->waiting = all;
  const Instruction *next = resume(warp, m, 0);  // the one that has not run for longest
  return all ? leave(m, WAIT) : next;
}

const Instruction *wait_in(uint8_t *s, Machine *m, uint32_t block) { return wait_with(s, m, block, 0); }

// --- lanes that wait for each other ----------------------------------------------------------------------------------

// A part of a branch has gone over to another branch. If it was the last one, what has come to the meeting block goes on.
static void abandon(WarpHeader *warp, int32_t top) {
  while (top != NO_FRAME && !--warp->frames[top].parts) {
    Frame ended = warp->frames[top];
    memset(&warp->frames[top], 0, sizeof ended);
    warp->used &= ~(1u << top);
    top = ended.below;
    if (top != NO_FRAME && warp->frames[top].meet == ended.meet) {
      warp->frames[top].arrived |= ended.arrived;
    } else if (ended.arrived) {
      warp->paths[warp->parted++] = (Path){.pc = ended.meet, .mask = ended.arrived, .frame = top};
      return;
    }
  }
}

// The lanes of a path run with the others from here on, and meet where the inner one of both would have: all ways from here
// lead there.
static void join(WarpHeader *warp, int path) {
  Path other = take(warp, path);
  int32_t left = other.frame;
  warp->mask |= other.mask;
  if (is_inside(warp, other.frame, warp->top)) {
    left = warp->top;
    warp->top = other.frame;
    warp->meet = warp->frames[warp->top].meet;
  }
  abandon(warp, left);
}

const Instruction *gather(const Instruction *i, uint8_t *s, Machine *m, uint32_t missing) {
  WarpHeader *warp = (WarpHeader *)s;
  uint32_t block = (uint32_t)(i->imm >> 8) & 0xFFFFFF, before = warp->mask;
  int others = 0;
  for (int k = warp->parted - 1; k >= 0; k--) {
    const Path *other = &warp->paths[k];
    if (other->gathers && other->pc == (int32_t)block && other->mask & missing) join(warp, k);
    else others |= !other->gathers;
  }
  if (warp->mask != before) {
    begins_again(s, m, block);
    return start_of(m, warp->pc);
  }
  return others ? wait_with(s, m, block, 1) : i + 1;  // if all wait for each other, nobody will come
}
