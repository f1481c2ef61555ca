#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

// Graphics cards as the kernel's files describe them: no driver is opened, so that a card is also seen where nothing works yet.

namespace quern::app {

struct PcieLink {
  double gigatransfers = 0;  // a second and lane; 0: unknown
  int width = 0;             // lanes
  [[nodiscard]] bool known() const { return gigatransfers > 0 && width > 0; }
  /// Of payload and headers, in one direction.
  [[nodiscard]] double bytes_per_second() const;
  friend bool operator==(const PcieLink&, const PcieLink&) = default;
};
/// "PCIe 5.0 x8 (31.5 GB/s)"
std::string describe(const PcieLink& link);

struct GraphicsCard {
  std::string address;  // "0000:03:00.0"
  uint32_t vendor = 0, device = 0;
  std::string name;           // "Intel Arc Pro B60"; of cards that we do not know: "NVIDIA 10de:2335"
  bool is_battlemage = false; // Xe2: B60, B70 and their siblings
  uint64_t memory_bytes = 0;  // of cards that we know
  std::string kernel_driver;  // "xe", "i915", "nvidia"; empty: none has taken the card
  PcieLink link, fastest_link;  // between board and card: now, and what the card is able to
  uint64_t window_bytes = 0;  // the largest window (BAR) through which the host sees its memory
  int numa_node = -1;
  std::string render_node;    // "renderD128"; empty: none
};

/// All cards below `sys`, which is /sys or looks like it, by address.
std::vector<GraphicsCard> find_graphics_cards(const std::filesystem::path& sys);

/// Size of the largest memory window in the text of a device's `resource` file: a line "begin end flags" for each.
uint64_t largest_window(std::string_view resource);

/// 580.159.04 of /proc/driver/nvidia/version; empty: the text names none.
std::string nvidia_driver_version(std::string_view text);

}  // namespace quern::app
