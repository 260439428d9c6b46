// What the core tells a timeline: inline where operations take effect.
#ifndef TRACE_H
#define TRACE_H

#include "core.h"

// Notes an event, of which only kind, instruction and steps are filled in; Python makes room.
static inline TraceEvent *trace_event(Tables *t, int32_t kind, int64_t instruction) {
  if (t->trace_used == t->trace_size) t->report(TAKE_LOGS);
  TraceEvent *event = &t->trace[t->trace_used++];
  *event = (TraceEvent){.kind = kind, .instruction = instruction, .steps = *t->steps};
  return event;
}

static inline void trace_barrier(TraceEvent *event, int64_t address, const Barrier *barrier) {
  event->address = address;
  event->phase = barrier->phase;
  event->pending = barrier->pending;
  event->tx = barrier->tx;
  event->arriver = barrier->arriver;
}

#endif
