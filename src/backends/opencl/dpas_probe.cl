// Whether the matrix units take half subnormals for zeros: 16 products of 1 and 2^-17, the smallest e4m3 code as an operand. One sub-group.
#include "backends/opencl/numeric.clh"
#include "backends/opencl/xe2.clh"

SUB_GROUP __attribute__((reqd_work_group_size(16, 1, 1))) __kernel void half_subnormals(PLACE(int, flushed)) {
  FIND(int, flushed);
  EMULATION_MEMORY(16);
  const float8 sums = MAD_F16((short8)(0x3c00), (int8)(0x00800080), (float8)(0.0f));
  if (get_sub_group_local_id() == 0) flushed[0] = sums.s0 != 0x1p-13f || sums.s7 != 0x1p-13f;
}
