#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/candidate.h"
#include "ops/collective.h"

namespace quern::ops {

using Collectives = std::vector<std::unique_ptr<Collective>>;  // the ends of a group, in rank order

/// One way for a platform's devices to exchange bytes. A platform lists its own in order of preference; `staged`, which always works, is among them.
struct Transport {
  std::string_view name;
  /// Whether the devices say that they can: peer access claimed, a library found. Opens and changes nothing.
  Verdict (*probe)(std::span<Device* const> devices);
  /// Joins them, rank r on devices[r]. Memory for messages is allocated here.
  Result<Collectives> (*connect)(std::span<Device* const> devices, const CollectiveOptions& options);
};

/// Why a platform's devices cannot be joined, or how.
class TransportList {
 public:
  constexpr TransportList(Absent why) : why_absent_(why.why) {}  // NOLINT(google-explicit-constructor)
  template <size_t N>
  constexpr TransportList(const Transport (&in_order)[N]) : transports_(in_order) {}  // NOLINT(google-explicit-constructor)
  [[nodiscard]] constexpr std::span<const Transport> transports() const { return transports_; }
  [[nodiscard]] constexpr std::string_view why_absent() const { return why_absent_; }

 private:
  std::span<const Transport> transports_;
  std::string_view why_absent_;
};

/// What a transport showed when it was tried.
struct TransportTrial {
  std::string transport;
  std::string refusal;  // why it cannot be used; empty: it works
  struct Time {
    size_t bytes;    // of one rank's partial
    double seconds;  // of one add_partials, all ranks together: the median
  };
  std::vector<Time> times;  // of each number of rows
};

struct Connection {
  std::vector<TransportTrial> trials;  // in order of preference; only the one that was asked for, where one was
  std::string chosen;                  // empty: none works
  Collectives ends;                    // of the chosen
};

}  // namespace quern::ops
