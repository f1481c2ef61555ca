#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"

// An item per run (axis 1) and element of the hidden (axis 0): the boundary first, since its row may be about to leave the window.
PORTABLE __kernel void store_hidden(PLACE(const run_t, runs), PLACE(const int, cursors), PLACE(const int, boundaries), int width, int window_length, PLACE(const activation_t, hidden),
                           PLACE(activation_t, window), PLACE(activation_t, boundary_hidden)) {
  FIND(const run_t, runs);
  FIND(const int, cursors);
  FIND(const int, boundaries);
  FIND(const activation_t, hidden);
  FIND(activation_t, window);
  FIND(activation_t, boundary_hidden);
  const run_t run = runs[get_global_id(1)];
  const int i = (int)get_global_id(0);
  if (run.slot < 0 || run.num_rows == 0 || i >= width) return;
  const long cursor = cursors[run.slot], end = cursor + run.num_rows, first_place = (long)run.slot * window_length;
  const long boundary = ((run.flags & RUN_IS_COMMITTED) != 0 ? end : cursor) / GRID * GRID;
  if (boundary > boundaries[run.slot]) {
    const long index = boundary - 1;
    boundary_hidden[(long)run.slot * width + i] =
        index >= cursor ? hidden[(run.first_row + index - cursor) * width + i] : window[(first_place + index % window_length) * width + i];
  }
  for (long index = max(end - window_length, cursor); index < end; ++index)
    window[(first_place + index % window_length) * width + i] = hidden[(run.first_row + index - cursor) * width + i];
}
