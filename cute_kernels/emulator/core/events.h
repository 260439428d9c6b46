// What the core tells observers: inline where it happens.
#pragma once

#include <string.h>

#include "core.h"

// Notes an event at an instruction and returns its values; only where somebody observes (`Tables.events`).
static inline int64_t *event_at(Tables *t, int64_t kind, int64_t place) {
  if (t->event_count == t->event_room) {
    t->report(TAKE_EVENTS);
    if (t->event_count == t->event_room) t->event_count = 0;  // it has failed: what it could not read is lost
  }
  Event *event = &t->events[t->event_count++];
  event->kind = kind;
  event->place = place;
  event->steps = t->steps ? *t->steps : 0;
  return event->values;
}

// Notes an event with these values where the warp is, if somebody observes.
#define event(t, kind, ...)                                                                          \
  do {                                                                                               \
    const int64_t values_[] = {__VA_ARGS__};                                                         \
    if ((t)->events) memcpy(event_at(t, kind, (t)->place), values_, sizeof values_);                 \
  } while (0)

// Notes what happens to an operation, of whose record so many bytes are known.
static inline void event_of_work(Tables *t, int64_t kind, int64_t place, const Work *work, int64_t size) {
  int64_t *values = event_at(t, kind, place), most = EVENT_VALUES * (int64_t)sizeof *values;
  memset(values, 0, (size_t)most);
  if (kind == EVENT_ISSUED) memcpy(values, work, (size_t)(size < most ? size : most));
  else values[0] = work->number;
}
