#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "worker/card_speed.h"

namespace quern::app {

/// What `plan` prints of cards whose speed is modelled: every term, and what others measured on them. Several lines.
std::string card_speed_as_text(const worker::ExecutionPlan& plan, const worker::CardSpeed& speed);
/// The same for programs; docs/cli.md lists the fields.
Json card_speed_as_json(const worker::ExecutionPlan& plan, const worker::CardSpeed& speed);

/// One line of a table of layouts: "-tp 2 -pp 2".
struct Layout {
  worker::ExecutionPlan plan;
  std::optional<worker::CardSpeed> speed;
};
/// Layouts of as many cards, the fastest for one sequence first; those that do not fit last.
std::string layouts_as_text(std::vector<Layout> layouts);
Json layouts_as_json(std::vector<Layout> layouts);

}  // namespace quern::app
