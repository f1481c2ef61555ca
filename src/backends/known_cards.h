#pragma once

#include <span>
#include <string_view>

#include "ops/device.h"

namespace quern::backends {

/// A card that plans can be made for without having it.
struct KnownCard {
  std::string_view short_name;  // "b60"
  std::string_view name;        // "Intel Arc Pro B60"
  ops::Platform platform;
  uint64_t memory_bytes;  // what a program finds on it
  double read_bandwidth;  // bytes per second, datasheet
  int num_cores;          // SMs or Xe cores
  int architecture;       // as in ops::DeviceTraits
  bool fp8_matrix;
  double issue_rate = 0;  // instructions of 16 lanes per second, all engines of the card together: 8 engines a core at the card's clock; 0: not used
};

std::span<const KnownCard> known_card_table();

}  // namespace quern::backends
