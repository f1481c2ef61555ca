#pragma once

#include "ops/kernel_table.h"
#include "ops/transport.h"

// Goals: before a model is loaded, every transport between some devices has shown that it moves bytes rightly and how fast; a wrong or stuck one is named and passed over.
// Non-goals: speed of devices, sums (Combine has its own tests).

namespace quern::backends {

inline constexpr int64_t kTrialRows[] = {1, 64, 512};  // one decode row, many, a piece of a prompt

/// Tries the transports of a list, or the one that the options name, between devices of one platform, whose kernels are `kernels`: probe, self-test (patterns both ways of 10 KB to 40 MB, or to the longest message that will be sent,
/// repeated, and in a recorded graph where streams record), timing with each number of rows that is no longer. Of those that work the first is chosen that is not much slower with small messages than the fastest: all give the same bits. Takes some tenths of a second,
/// 60 MB of each device and 40 of host memory, for messages of 40 MB; less for less.
ops::Connection try_list(const ops::TransportList& list, std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, const ops::KernelTable& kernels,
                         std::span<const int64_t> row_counts = kTrialRows);

/// "works: 12.1 us for 10 KB, 131 us for 655 KB, 902 us for 5.2 MB", or why it does not.
std::string describe(const ops::TransportTrial& trial);

}  // namespace quern::backends
