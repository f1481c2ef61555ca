#pragma once

#include <string>
#include <vector>

#include "app/graphics_cards.h"
#include "worker/opencl_devices.h"

// What is wrong with a machine's cards and drivers, from facts alone: nothing is opened here.

namespace quern::app {

/// Whether this process may use a card's render node below /dev/dri.
struct NodeAccess {
  enum class State : uint8_t { kUsable, kMissing, kForbidden };
  std::string node;   // "renderD128"
  State state = State::kUsable;
  std::string group;  // of the node, by name or number
};
/// `dev` is /dev or looks like it. `user_groups`: those of the process; 0 as `user` may do all.
NodeAccess check_node(const std::filesystem::path& dev, const std::string& node, uint32_t user, const std::vector<uint32_t>& user_groups);

struct DriverFacts {
  std::vector<GraphicsCard> cards;
  std::vector<NodeAccess> nodes;                    // of the cards that have one
  std::vector<worker::OpenClDevice> opencl_devices;
  std::string why_no_opencl;                        // empty: the loader lists devices
};

/// Sentences for a person, the worst first. Empty: nothing is known to be wrong.
std::vector<std::string> findings(const DriverFacts& facts);

/// Year and week of a version of Intel's driver: 2544 for "25.44.36015.5"; 0: it is none.
int intel_driver_release(std::string_view version);

}  // namespace quern::app
